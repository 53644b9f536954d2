"""A lane tells how far it has read its prompts, and what its caches take, with and without a shared prefix."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from bass_core import DEFAULT_LANES, race
from bass_core.decode.request import make_request
from bass_core.lanes.lane import Lane
from bass_core.lanes.view import lane_view
from bass_core.model.base import CausalModel
from tests.support.models import VOCAB, tiny_pair

PAIR = tiny_pair()
TARGET = PAIR.target
# Three chunks of 128 tokens; 400 tokens are 25 whole units of a prefix.
PROMPT = [1 + i * i % (VOCAB - 1) for i in range(400)]
ROWS = 3


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot after every step."""
    monkeypatch.setattr(sys.modules[race.__module__], "SNAPSHOT_SECONDS", 0)


@pytest.fixture(params=[1, None], ids=["shared", "copied"])
def shares(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(CausalModel, "least_saved", request.param)
    return request.param is not None


def snapshots(*lanes: str, **arguments: Any) -> list[dict[str, Any]]:
    arguments = {"n": ROWS, "max_new_tokens": 6, "draft_length": 2, "scheduling": "in_turn"} | arguments
    return [
        snapshot["lanes"] for snapshot in race(PAIR, arguments.pop("prompt", PROMPT), lanes=lanes, **arguments)
    ]


def read(lane: str, **arguments: Any) -> list[tuple[int, int, tuple[int, ...]]]:
    """What the lane told while it read, each state once."""
    told = [shot[lane]["reading"] for shot in snapshots(lane, **arguments)]
    assert told[-1] is None, "a finished lane reads nothing"
    return list(dict.fromkeys((t["fed"], t["total"], tuple(t["sequences"])) for t in told if t))


def test_a_batch_reads_its_prompt_in_chunks(shares: bool) -> None:
    everyone = tuple(range(ROWS))
    # The last chunk ends the reading. While the draft reads, the target has read nothing.
    assert read("regular") == [(128 * i, 400, everyone) for i in range(1, 4)]
    assert read("bass") == [(128 * i, 400, everyone) for i in range(4)]
    first = snapshots("bass")[0]["bass"]
    assert first["reading"]["fed"] == 0 and first["sequences"][0]["token_ids"] == []


def test_one_row_after_another_reads_what_the_cache_does_not_hold(shares: bool) -> None:
    rows = (0,) if shares else range(ROWS)
    assert read("speculative") == [(128 * i, 400, (row,)) for row in rows for i in range(4)]


def test_amusd_tells_of_its_target(shares: bool) -> None:
    lane = Lane(PAIR, make_request(PAIR, PROMPT, n=ROWS, max_new_tokens=6, draft_length=2), "amusd")
    told = []
    while not lane.sequences[0].token_ids:
        lane.step()
        told.append(lane_view(lane)["reading"])
    held = lane_view(lane)["cache"]
    lane.end("stopped")
    assert told == [{"fed": 128 * i, "total": 400, "sequences": [0, 1, 2]} for i in range(1, 4)] + [None]
    assert held is not None and held["draft"] > 0 and held["own"] > 0
    assert (held["shared"] > 0) == (held["copies"] > held["own"] + held["shared"] + held["draft"]) == shares


def test_a_lane_that_is_stopped_reads_no_more() -> None:
    last = snapshots("regular", time_budget_ms=1e-6)[-1]["regular"]
    assert last["finished"] and last["reading"] is None


def test_the_bytes_of_caches_are_those_of_their_numbers(shares: bool) -> None:
    # Keys and values of two layers, with two heads of 16 float32 numbers.
    token = 2 * 2 * 2 * 16 * 4
    shots = snapshots(*DEFAULT_LANES)
    assert all(shot[lane]["cache"] == shots[0][lane]["cache"] for shot in shots for lane in DEFAULT_LANES)
    held = {lane: shots[0][lane]["cache"] for lane in DEFAULT_LANES}
    prefix = 400 if shares else 0
    # A row of its own has the prompt's rest, six new tokens, up to two drafts and one column for padding.
    for lane, rows, spare in (("regular", 3, 1), ("bass", 3, 3), ("speculative", 1, 3)):
        own = rows * (400 - prefix + 6 + spare) * token
        drafted = 0 if lane == "regular" else own + prefix * token
        copies = (rows * (400 + 6 + spare) * token) * (1 if lane == "regular" else 2)
        assert held[lane] == {"shared": prefix * token, "own": own, "draft": drafted, "copies": copies}, lane
