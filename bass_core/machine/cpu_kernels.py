"""Whether the compiled kernels for the CPU (kernels/cpu) can be used here.

Contract: `available` is asked before anything of kernels/cpu is imported; the first time it says where compiled
code is kept, beside the weights. BASS_CPU_KERNELS=0 turns the kernels off. Without them torch's own products are
used, and the log says so once.
"""

from __future__ import annotations

import logging
import os
import platform
from functools import cache

from ..errors import WeightsError
from .user_cache import cache_root

_log = logging.getLogger(__name__)


@cache
def why_unavailable() -> str | None:
    """Why the kernels can't be used, as a clause; None if they can."""
    if os.environ.get("BASS_CPU_KERNELS") == "0":
        return "BASS_CPU_KERNELS is 0"
    try:
        from kernels.cpu import jit
    except Exception as error:  # a numba that doesn't fit this Python, numpy or system fails in many ways
        return f"numba can't be imported ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
    lacking = sorted({"fma", "f16c"} - jit.cpu_features())
    if platform.machine().lower() in ("x86_64", "amd64") and lacking:
        return f"this CPU has no {' or '.join(lacking)}"
    try:
        jit.folder = cache_root() / "compiled"
        jit.folder.mkdir(parents=True, exist_ok=True)
    except (OSError, WeightsError):
        jit.folder = None  # numba keeps the code where it keeps other code, or compiles at each start
    return None


@cache
def available() -> bool:
    """Whether the compiled kernels can be used."""
    reason = why_unavailable()
    if reason is not None:
        _log.warning("The CPU's own kernels are off, so torch's products are used: %s.", reason)
    return reason is None
