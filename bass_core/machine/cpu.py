"""The number of cores that this process may use.

Contract: the cores that the scheduler allows (CPU affinity), not the cores of the machine.
"""

from __future__ import annotations

import os


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
