"""The interface between the page and the service that runs its races.

A RaceSource takes a race as plain data and yields its snapshots, also plain data. Closing it ends the race and
frees its memory. The page, its API and both services (local.py, cluster/) use this type. A race that waits yields
snapshots of phase "waiting" without lanes (see `waiting`).
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

RaceSource = Callable[[RaceRequest], Generator[Snapshot, None, None]]
# Several races in a row, e.g. a sweep: takes the source that runs them, and yields any results.
Races = Callable[[RaceSource], Generator[Any, None, None]]
# Runs Races that belong together. The second argument is an upper bound on the seconds that they need.
Together = Callable[[Races, float], Generator[Any, None, None]]
# Counts the tokens of a prompt with the model's template. Takes the text and whether it has one prompt per line.
# Returns JSON {"text", "refused"}. "text" is the count in words, and "refused" the sentence with which a race
# would refuse this prompt. For an empty prompt, a Count returns NOTHING. The page also calls
# it during races, outside the queue.
Count = Callable[[str, bool], str]
NOTHING = json.dumps({"text": "", "refused": False})
# A snapshot's "phase" -> text of the status line.
PHASES = {
    "measuring": "Measuring the cost of a round on this machine, once",
    "starting": "The model is being loaded",
}


class WorkerLost(BassError):
    """The process that ran the race ended before the race did."""


@dataclass(frozen=True)
class PairOptions:
    """The operator's options for the pair.

    Attributes:
        pair: as in load_pair, like `draft`, `device`, `dtype` and `device_map`.
        draft_length: the draft length that the form starts with.
        max_batch: the largest number of rows for which costs are measured between races.
        any_model: whether visitors may name another pair.
        measures: whether costs are measured between races.
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
class PairInfo:
    """The page's information about the loaded pair.

    Attributes:
        about: one line that names models and device.
        choices: the entries of the form's lists.
        pair: the arguments of load_pair, for the page's code snippet.
        counts: whether there is a tokenizer that can count a prompt's tokens.
        advice: a sentence that names a pair which suits the operator's GPU better, or None.
    """

    about: str
    choices: Choices
    pair: dict[str, Any]
    counts: bool
    advice: str | None = None


@dataclass(frozen=True)
class Service:
    """A service that runs the page's races.

    Attributes:
        facts: the page's information about the pair.
        count: counts a prompt's tokens, or None without a tokenizer.
        at_once: how many events the page may hand over at the same time. Further ones wait in Gradio's queue.
        together: runs races that belong together, or None to run them like any others.
        opened: call it once the page is up.
        close: call it at the end.
    """

    source: RaceSource
    facts: PairInfo
    count: Count | None
    at_once: int = 1
    together: Together | None = None
    opened: Callable[[], None] = field(default=lambda: None)
    close: Callable[[], None] = field(default=lambda: None)


def one_by_one(source: RaceSource) -> Together:
    """Return a Together that runs its races like any others."""
    return lambda races, seconds: races(source)


def waiting(place: int, expected_s: float | None) -> Snapshot:
    """Return a snapshot of a race that no worker runs yet.

    Args:
        place: its place in the queue: 1 is next, 0 means that its worker is getting ready.
        expected_s: expected seconds until it starts, or None as long as no race has shown the workers' speed.
    """
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
    """Return whether the race is still waiting for a worker."""
    return str(snapshot.get("phase")) == "waiting"


def words(snapshot: Snapshot) -> str:
    """Return the status line's text for a snapshot, or "" for one that has lanes."""
    if not waits(snapshot):
        return PHASES.get(str(snapshot.get("phase", "")), "")
    waited: dict[str, Any] = dict(snapshot)
    seconds = waited["expected_s"]
    text = f"Waiting for a free worker: place {waited['place']} in the queue"
    if seconds is None:
        return text
    # Show rounded seconds, because they are only an estimate.
    rest = f"{round(seconds, -1):.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    return f"{text}, about {'a few seconds' if seconds < 10 else rest}"


def give_memory_back() -> None:
    """Return freed memory to the system, because glibc would keep it in each thread's arena."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # another C library has no malloc_trim
            ctypes.CDLL(None).malloc_trim(0)
