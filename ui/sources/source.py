"""What the page knows of the place where races run.

Contract: a Source takes a race as plain data and yields its snapshots, plain data too; closing it ends the race
and frees its memory. The page, its API, recordings and both places (local.py, cluster/) keep to this type.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from bass_core import BassError, Snapshot
from ui.page.choices import Choices
from ui.page.request import RaceRequest
from ui.sources.count import Count

Source = Callable[[RaceRequest], Generator[Snapshot, None, None]]


class WorkerLost(BassError):
    """The process that ran the race ended before the race did."""


@dataclass(frozen=True)
class Ask:
    """What the operator asked to be loaded: the arguments of load_pair, and what visitors may do with it.

    draft_length: what the page starts with. max_batch: rows up to which costs are measured between races.
    measures: whether they are at all.
    """

    pair: str
    draft: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    draft_length: str = "auto"
    max_batch: int = 32
    any_model: bool = False
    device_map: str | dict[str, Any] | None = None
    measures: bool = True


@dataclass(frozen=True)
class Facts:
    """What the page says of the loaded pair: one line, the settings' choices, the arguments of load_pair."""

    about: str
    choices: Choices
    pair: dict[str, Any]
    counts: bool


@dataclass(frozen=True)
class Place:
    """Where races run. `at_once`: how many events the page may hand over together; more wait in Gradio's queue."""

    source: Source
    facts: Facts
    count: Count | None
    at_once: int = 1
    opened: Callable[[], None] = field(default=lambda: None)
    close: Callable[[], None] = field(default=lambda: None)


def give_memory_back() -> None:
    """Return freed memory to the system: glibc would keep it in each thread's arena."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # another C library has no malloc_trim
            ctypes.CDLL(None).malloc_trim(0)
