"""A peer that needs no package of its own: each row's tokens, repeated, and what process they come from."""

import os
import sys
from typing import Any


def serve(fault: str = "") -> tuple[str, Any]:
    """Say which Python runs and what $ECHO holds, or fail as `fault` says."""
    print("text on the child's standard output")
    if fault == "no file":
        raise FileNotFoundError("no model there")

    def complete(rows: list[list[int]], tokens: int) -> list[list[int]]:
        if fault == "a crash":
            os._exit(1)
        return [row * tokens for row in rows]

    return f"{sys.flags.dev_mode} {os.environ.get('ECHO')}", complete
