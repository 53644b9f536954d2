"""What the page knows of what runs its races.

Contract: a Source takes a race as plain data and yields its snapshots, plain data too; closing it ends the race
and frees its memory. The page, its API, recordings and both services (local.py, cluster/) keep to this type. A
race that waits yields snapshots of phase "waiting" with no lanes, its place in the queue (1 is next) and the
seconds until it is expected to start, None while no race has shown how fast the workers are.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from bass_core import BassError, Snapshot
from ui.page.choices import Choices
from ui.page.request import RaceRequest

Source = Callable[[RaceRequest], Generator[Snapshot, None, None]]
# Several races in a row: takes the source that runs them, and yields what it makes of their snapshots.
Races = Callable[[Source], Generator[Any, None, None]]
# Runs Races that belong together. Takes the seconds that they need, which is an upper bound.
Together = Callable[[Races, float], Generator[Any, None, None]]
# Says how long a prompt is: takes the text and whether it holds one prompt a line, and returns JSON {"text",
# "refused"}, its tokens with the model's template, or the sentence with which a race of it would be refused;
# NOTHING of an empty prompt. It is called during races too, and outside of the queue.
Count = Callable[[str, bool], str]
NOTHING = json.dumps({"text": "", "refused": False})
# The status line's text for each value of a snapshot's "phase".
PHASES = {
    "measuring": "Measuring once what a round costs on this machine",
    "starting": "A worker is loading the model",
}


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
class Service:
    """What runs the page's races. opened: to be called once the page is up.

    at_once: how many events the page may hand over together; more wait in Gradio's queue. together: runs races
    that belong together; None: as any others.
    """

    source: Source
    facts: Facts
    count: Count | None
    at_once: int = 1
    together: Together | None = None
    opened: Callable[[], None] = field(default=lambda: None)
    close: Callable[[], None] = field(default=lambda: None)


def one_by_one(source: Source) -> Together:
    """Races that belong together run as any others."""
    return lambda races, seconds: races(source)


def waiting(place: int, expected_s: float | None) -> Snapshot:
    """A snapshot of a race that no worker runs yet; "place" 0 means that its worker is getting ready."""
    snapshot: dict[str, Any] = {
        "phase": "waiting" if place else "starting",
        "done": False,
        "scheduling": "",
        "elapsed_ms": 0.0,
        "lanes": {},
        "device": {},
        "place": place,
        "expected_s": expected_s,
    }
    return cast(Snapshot, snapshot)


def waits(snapshot: Snapshot) -> bool:
    """Whether no worker has the race yet."""
    return str(snapshot.get("phase")) == "waiting"


def words(snapshot: Snapshot) -> str:
    """The status line's text for a snapshot; "" for one with lanes."""
    if not waits(snapshot):
        return PHASES.get(str(snapshot.get("phase", "")), "")
    waited: dict[str, Any] = dict(snapshot)
    seconds = waited["expected_s"]
    text = f"Waiting for a free worker: place {waited['place']} in the queue"
    if seconds is None:
        return text
    # Coarse, since it is an estimate.
    rest = f"{round(seconds, -1):.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    return f"{text}, about {'a few seconds' if seconds < 10 else rest}"


def give_memory_back() -> None:
    """Return freed memory to the system: glibc would keep it in each thread's arena."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # another C library has no malloc_trim
            ctypes.CDLL(None).malloc_trim(0)
