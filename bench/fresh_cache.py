"""A temporary cache folder that holds only the weights, for benches that must not find anything else.

It neither reads nor changes the costs in the user's cache, and imports nothing of the page.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bass_core.machine.user_cache import cache_root
from bass_core.model.loading.weights import FOLDER, ensure_smollm2, smollm2_gguf


@contextmanager
def fresh_cache(converted: bool = True) -> Iterator[Path]:
    """Use a temporary cache folder with only the weights, in this process and those that it starts.

    converted: whether they are converted already; if not, there is only the file that they are made of.
    """
    weights = ensure_smollm2() if converted else smollm2_gguf()
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory(prefix="bass-smoke-") as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            cache_root().mkdir()
            (cache_root() / (FOLDER if converted else weights.name)).symlink_to(weights, converted)
            yield cache_root()
        finally:
            if before is None:
                del os.environ["XDG_CACHE_HOME"]
            else:
                os.environ["XDG_CACHE_HOME"] = before
