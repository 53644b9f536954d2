"""A lane reports its prefill progress and the size of its caches, with and without a shared prefix."""

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
# 400 tokens are three whole chunks of 128 tokens and a rest, and exactly 25 units of a shared prefix.
PROMPT = [1 + i * i % (VOCAB - 1) for i in range(400)]
ROWS = 3


@pytest.fixture(autouse=True)
def frequent_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a race give a snapshot after every step."""
    monkeypatch.setattr(sys.modules[race.__module__], "SNAPSHOT_SECONDS", 0)


@pytest.fixture(params=[1, None], ids=["shared", "copied"])
def shares(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(CausalModel, "min_shared_tokens", request.param)
    return request.param is not None


def snapshots(*lanes: str, **arguments: Any) -> list[dict[str, Any]]:
    arguments = {"n": ROWS, "max_new_tokens": 6, "draft_length": 2, "scheduling": "in_turn"} | arguments
    return [
        snapshot["lanes"] for snapshot in race(PAIR, arguments.pop("prompt", PROMPT), lanes=lanes, **arguments)
    ]


def prefill_states(lane: str, **arguments: Any) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return the lane's distinct states during the prefill: (tokens fed, total tokens, rows)."""
    readings = [shot[lane]["reading"] for shot in snapshots(lane, **arguments)]
    assert readings[-1] is None, "a finished lane reads nothing"
    return list(
        dict.fromkeys(
            (reading["fed"], reading["total"], tuple(reading["sequences"])) for reading in readings if reading
        )
    )


def test_a_batch_reads_its_prompt_in_chunks(shares: bool) -> None:
    everyone = tuple(range(ROWS))
    # The last chunk ends the prefill. The draft reads the prompt before the target does.
    assert prefill_states("regular") == [(128 * i, 400, everyone) for i in range(1, 4)]
    assert prefill_states("bass") == [(128 * i, 400, everyone) for i in range(4)]
    first = snapshots("bass")[0]["bass"]
    assert first["reading"]["fed"] == 0 and first["sequences"][0]["token_ids"] == []


def test_row_by_row_decoding_reads_only_tokens_that_are_not_cached(shares: bool) -> None:
    rows = (0,) if shares else range(ROWS)
    assert prefill_states("speculative") == [(128 * i, 400, (row,)) for row in rows for i in range(4)]


def test_amusd_reports_the_prefill_of_its_target(shares: bool) -> None:
    lane = Lane(PAIR, make_request(PAIR, PROMPT, n=ROWS, max_new_tokens=6, draft_length=2), "amusd")
    readings = []
    while not lane.sequences[0].token_ids:
        lane.step()
        readings.append(lane_view(lane)["reading"])
    cache_bytes = lane_view(lane)["cache"]
    lane.end("stopped")
    assert readings == [{"fed": 128 * i, "total": 400, "sequences": [0, 1, 2]} for i in range(1, 4)] + [None]
    assert cache_bytes is not None and cache_bytes["draft"] > 0 and cache_bytes["own"] > 0
    assert (
        (cache_bytes["shared"] > 0)
        == (cache_bytes["copies"] > cache_bytes["own"] + cache_bytes["shared"] + cache_bytes["draft"])
        == shares
    )


def test_a_stopped_lane_reports_no_prefill() -> None:
    last = snapshots("regular", time_budget_ms=1e-6)[-1]["regular"]
    assert last["finished"] and last["reading"] is None


def test_cache_bytes_follow_from_the_stored_numbers(shares: bool) -> None:
    # Keys and values of two layers, with two heads of 16 float32 numbers.
    token_bytes = 2 * 2 * 2 * 16 * 4
    shots = snapshots(*DEFAULT_LANES)
    assert all(shot[lane]["cache"] == shots[0][lane]["cache"] for shot in shots for lane in DEFAULT_LANES)
    cache_bytes = {lane: shots[0][lane]["cache"] for lane in DEFAULT_LANES}
    prefix = 400 if shares else 0
    # A row's columns: the unshared rest of the prompt, six new tokens, up to two drafts and one column of padding.
    for lane, rows, spare in (("regular", 3, 1), ("bass", 3, 3), ("speculative", 1, 3)):
        own_bytes = rows * (400 - prefix + 6 + spare) * token_bytes
        draft_bytes = 0 if lane == "regular" else own_bytes + prefix * token_bytes
        copies = (rows * (400 + 6 + spare) * token_bytes) * (1 if lane == "regular" else 2)
        assert cache_bytes[lane] == {
            "shared": prefix * token_bytes,
            "own": own_bytes,
            "draft": draft_bytes,
            "copies": copies,
        }, lane
