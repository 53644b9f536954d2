"""What a race's snapshots say before its first lanes, and how the page puts it.

Contract: a waiting race yields snapshots of phase "waiting" with no lanes, its place in the queue (1 is next) and
the seconds until it is expected to start, None while no race has shown how fast the workers are.
"""

from __future__ import annotations

from typing import Any, cast

from bass_core import Snapshot

# The status line's text for each value of a snapshot's "phase".
PHASES = {
    "measuring": "Measuring once what a round costs on this machine",
    "starting": "A worker is loading the model",
}


def waiting(place: int, expected_s: float | None) -> Snapshot:
    """A snapshot of a race that no worker runs yet; "place" 0 means that its worker is getting ready."""
    told: dict[str, Any] = {
        "phase": "waiting" if place else "starting",
        "done": False,
        "scheduling": "",
        "elapsed_ms": 0.0,
        "lanes": {},
        "device": {},
        "place": place,
        "expected_s": expected_s,
    }
    return cast(Snapshot, told)


def waits(snapshot: Snapshot) -> bool:
    """Whether no worker has the race yet."""
    return str(snapshot.get("phase")) == "waiting"


def words(snapshot: Snapshot) -> str:
    """The status line's text for a snapshot; "" for one with lanes."""
    told: dict[str, Any] = dict(snapshot)
    phase = str(told.get("phase", ""))
    if phase != "waiting":
        return PHASES.get(phase, "")
    text = f"Waiting for a free worker: place {told['place']} in the queue"
    return text if told["expected_s"] is None else f"{text}, about {_span(told['expected_s'])}"


def _span(seconds: float) -> str:
    """The time in words, coarse, since it is an estimate."""
    if seconds < 10:
        return "a few seconds"
    return f"{round(seconds, -1):.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
