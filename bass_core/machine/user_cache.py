"""The folder in the user's cache for weights and measured costs."""

from __future__ import annotations

from pathlib import Path

from kernels import user_cache

from ..errors import WeightsError


def cache_root() -> Path:
    """Return our cache folder: $XDG_CACHE_HOME/bass, else ~/.cache/bass. It is not created.

    Raises:
        WeightsError: if there is no home folder either.
    """
    root = user_cache.cache_root()
    if root is None:
        raise WeightsError(
            "There is no home folder to keep the model in: set XDG_CACHE_HOME to the absolute path of a folder "
            "that can be written."
        )
    return root
