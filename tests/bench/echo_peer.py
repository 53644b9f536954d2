"""A peer for tests: it repeats each row's tokens and needs no package."""

import os
import sys
from typing import Any


def serve(fault: str = "") -> tuple[str, Any]:
    """Return a string with this process's dev mode and $ECHO, and the function `complete`.

    Args:
        fault: "no file" makes this call raise FileNotFoundError; "a crash" makes `complete` end the process.
    """
    print("text on the child's standard output")
    if fault == "no file":
        raise FileNotFoundError("no model there")

    def complete(rows: list[list[int]], tokens: int) -> list[list[int]]:
        if fault == "a crash":
            os._exit(1)
        return [row * tokens for row in rows]

    return f"{sys.flags.dev_mode} {os.environ.get('ECHO')}", complete
