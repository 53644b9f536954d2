"""The pair for "auto": the largest one that is downloaded and fits the GPU. `choose` downloads nothing.

A 135M model is too small for a GPU: its steps are chains of short kernels, to which drafts add more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from kernels.support import is_accelerator, on_zero_gpu

from ...machine.memory import available_bytes
from .entry import CatalogueEntry
from .sources import cached, weight_bytes

AUTO, DEFAULT = "auto", "smollm2"
# Gigabytes besides the weights: three lanes' caches, captured graphs and torch's own.
ROOM_GB = 3.0


class Choice(NamedTuple):
    """A pair's name, and a sentence about the pair to fetch instead, or None."""

    name: str
    advice: str | None = None


def choose(entries: Iterable[CatalogueEntry], device: torch.device, dtype: torch.dtype) -> Choice:
    """Choose among the entries that have `gigabytes`, or return smollm2.

    Always smollm2 on a CPU, on ZeroGPU (which runs no EAGLE-3 heads), and in float16 (these models are bfloat16).

    Args:
        entries: in the order in which to advise them.
        dtype: the dtype to compute in.
    """
    if not is_accelerator(device) or on_zero_gpu() or dtype == torch.float16:
        return Choice(DEFAULT)
    candidates = [entry for entry in entries if entry.gigabytes]
    scale, free = dtype.itemsize / 2, available_bytes(device) / 1e9
    for entry in sorted(candidates, key=lambda entry: -entry.gigabytes):
        size = _cached_gb(entry)
        if size is not None and scale * size + ROOM_GB <= free:
            return Choice(entry.name)
    for entry in candidates:
        if scale * entry.gigabytes + ROOM_GB <= free:
            return Choice(
                DEFAULT,
                f"{entry.name} suits this GPU better than {DEFAULT}: python app.py --pair {entry.name} fetches it "
                f"({entry.gigabytes:g} GB) and races it.",
            )
    return Choice(DEFAULT)


def _cached_gb(entry: CatalogueEntry) -> float | None:
    """Return the size of the entry's weights in the Hub's cache, or None if they are not complete."""
    sources = [cached(name) for name in (entry.target, entry.draft) if name is not None]
    found = [source for source in sources if source is not None]
    return sum(map(weight_bytes, found)) / 1e9 if len(found) == len(sources) else None
