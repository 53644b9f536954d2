"""The folder in the user's cache for weights and measured costs."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import WeightsError


def cache_root() -> Path:
    """Return our cache folder: $XDG_CACHE_HOME/bass, else ~/.cache/bass. It is not created.

    A relative $XDG_CACHE_HOME is ignored, as the XDG specification asks.

    Raises:
        WeightsError: if there is no home folder either.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():
        return base / "bass"
    try:
        return Path.home() / ".cache" / "bass"
    except RuntimeError as error:  # HOME is not set and the user id has no passwd entry
        raise WeightsError(
            "There is no home folder to keep the model in: set XDG_CACHE_HOME to the absolute path of a folder "
            "that can be written."
        ) from error
