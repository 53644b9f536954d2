"""The folder for our files in the user's cache: `cache_root`."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path | None:
    """Return $XDG_CACHE_HOME/bass, else ~/.cache/bass; None without a home folder. It is not created.

    A relative $XDG_CACHE_HOME is ignored, as the XDG specification asks.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():
        return base / "bass"
    try:
        return Path.home() / ".cache" / "bass"
    except RuntimeError:  # HOME is not set and the user id has no passwd entry
        return None
