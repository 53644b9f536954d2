"""A line of the catalogue (catalogue.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CatalogueEntry:
    """A pair that can be loaded by name.

    Attributes:
        target: a Hub id or a folder.
        draft: a Hub id, a folder, or `drafts/NAME` for a folder in this repository; None for no draft.
        drafter: the pair's `default_drafter`.
        note: one line for the user.
        tested: whether this project has run the pair.
        prepare: returns the target's folder, and makes it first if needed; only for a target that we convert.
        gguf: returns the GGUF file that the target was converted from; int4 uses the file's quantised blocks as
            they are.
        gigabytes: the size of the pair's weights on the Hub, for pairs that "auto" may choose; else 0.
    """

    name: str
    target: str
    draft: str | None = None
    drafter: str = "auto"
    dtype: str = "auto"
    note: str = ""
    tested: bool = False
    prepare: Callable[[], Path] | None = None
    gguf: Callable[[], Path] | None = None
    gigabytes: float = 0.0
