"""A sweep races arm by arm: its figures, its share of the time, its limit, and what it frees."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from bass_core import BassError, Snapshot
from ui.page.limits import Limits
from ui.page.request import RaceRequest
from ui.race.verdict import LaneRounds
from ui.sources.source import waiting
from ui.sweep.figures import sentences
from ui.sweep.measure import MOST_REPEATS, WARM_UP, measured
from ui.sweep.request import make_sweep

PLAIN_MS, DRAFTING_MS = 100.0, 160.0


class Toy:
    """A source of races whose lanes take turns: a plain step takes 100 ms, a round of drafts 160 ms.

    `now` is the clock in seconds, which passes with the lanes' rounds; rows of BASS write `each` tokens a round.
    """

    def __init__(self, rounds: int = 1000, each: int = 2) -> None:
        self.rounds, self.each = rounds, each
        self.now, self.asked, self.open = 0.0, [], 0  # type: ignore[var-annotated]

    def clock(self) -> float:
        return self.now

    def __call__(self, request: RaceRequest) -> Generator[Snapshot, None, None]:
        self.asked.append(request)
        self.open += 1
        try:
            rounds = min(self.rounds, request.max_new_tokens)
            for count in range(1, rounds + 1):
                self.now += (PLAIN_MS + DRAFTING_MS) / 1000
                yield self.snapshot(request, count, count == rounds)
        finally:
            self.open -= 1

    def snapshot(self, request: RaceRequest, count: int, done: bool) -> Any:
        rows = request.batch_size
        lanes = {"regular": _lane(rows, count, PLAIN_MS, 1), "bass": _lane(rows, count, DRAFTING_MS, self.each)}
        return {"done": done, "lanes": lanes, "device": {"name": "toy"}, "phase": "running"}


def _lane(rows: int, count: int, ms: float, each: int) -> dict[str, Any]:
    kind = "plain" if each == 1 else "verify"
    rounds: list[dict[str, Any]] = [{"kind": "prefill", "time_ms": 5.0, "rows": []}]
    rounds += [
        {"kind": kind, "time_ms": 5 + ms * (i + 1), "rows": [{"written": each}] * rows} for i in range(count)
    ]
    metrics = {
        "drafted": 0 if each == 1 else 4 * count, "token_acceptance": 0.5,
        # A step reads for 80 ms at the peak, and multiplies a token in 2.5 ms.
        "bandwidth_utilization": 80 / ms, "flops_utilization": 2.5 * rows / ms,
    }  # fmt: skip
    return {"rounds": rounds, "metrics": metrics, "error": None, "finished": False}


def asked(**given: Any) -> Any:
    return make_sweep({"prompt": "Hello", "batches": [1, 4], "draft_lengths": ["bass", 4], **given}, Limits())


def test_the_figures_are_those_of_the_races() -> None:
    toy = Toy()
    *states, last = measured(asked(), toy, Limits(), toy.clock)
    assert last["done"] and last["progress"] is None and last["device"] == "toy"
    assert [(one["batch"], one["draft_length"]) for one in last["points"]] == [
        (1, "bass"),
        (1, 4),
        (4, "bass"),
        (4, 4),
    ]
    for one in last["points"]:
        # Two tokens in 160 ms against one in 100 ms; rounds that are all alike have no scatter.
        assert one["speedup"] == pytest.approx(2 / 1.6) and one["error"] == pytest.approx(0, abs=1e-6)
        assert (one["ms_per_token"], one["regular_ms_per_token"]) == (pytest.approx(80), pytest.approx(100))
        assert (one["tokens"], one["acceptance"], one["against"]) == (2, 0.5, "ahead")
    assert last["ridge"]["tokens"] == pytest.approx(32)
    # Points come one by one, and each state is a new object.
    assert sorted({len(state["points"]) for state in states}) == [0, 1, 2, 3]
    assert len({id(state) for state in states}) == len(states)


def test_an_arm_is_left_after_its_share_of_the_time_and_what_remains_is_told() -> None:
    toy = Toy()
    *states, _ = measured(asked(seconds=40), toy, Limits(), toy.clock)
    # Four arms share four fifths of 40 s: 8 s each.
    assert toy.asked[0].max_new_tokens == WARM_UP
    arms = [state["progress"] for state in states if state["progress"] and state["progress"]["done"] == 2]
    assert arms[0]["races"] == 4 and arms[0]["left_s"] == pytest.approx(16, rel=0.05)
    assert arms[-1]["left_s"] < arms[0]["left_s"] and "batch 4, Algorithm 1" in arms[0]["now"]
    assert toy.open == 0


def test_a_short_race_is_run_again_with_other_seeds() -> None:
    toy = Toy(rounds=4)
    *_, last = measured(asked(seconds=20), toy, Limits(), toy.clock)
    # Each arm has 4 s; a race has four rounds of both lanes, 1.04 s.
    seeds = [race.seed for race in toy.asked[1:]]
    assert seeds == [0, 1, 2, 3] * 4
    assert all(one["rounds"] == 16 for one in last["points"])
    assert all(one["speedup"] == pytest.approx(1.25) for one in last["points"])
    toy = Toy(rounds=2)
    *_, last = measured(asked(seconds=600, batches=[1], draft_lengths=[4]), toy, Limits(), toy.clock)
    assert len(toy.asked) == 1 + MOST_REPEATS and last["points"][0]["rounds"] == 2 * MOST_REPEATS


def test_the_operator_s_limit_holds_for_the_whole_sweep_and_frees_the_race() -> None:
    toy, kept = Toy(), []
    with pytest.raises(BassError, match="The sweep was stopped after 30 s, this server's limit"):
        for state in measured(asked(seconds=40), toy, Limits(max_seconds=30), toy.clock):
            kept.append(len(state["points"]))
    assert kept[-1] >= 1 and toy.now < 60 and toy.open == 0


class Busy(Toy):
    """Each race waits 20 s for a free worker."""

    def __call__(self, request: RaceRequest) -> Generator[Snapshot, None, None]:
        for place in (2, 1):
            self.now += 10
            yield waiting(place, None)
        yield from super().__call__(request)


def test_the_limit_does_not_count_the_wait_for_a_worker_which_is_told() -> None:
    toy, busy = Toy(), Busy()
    *_, expected = measured(asked(seconds=20), toy, Limits(max_seconds=30), toy.clock)
    *states, last = measured(asked(seconds=20), busy, Limits(max_seconds=30), busy.clock)
    assert last["points"] == expected["points"] and last["device"] == "toy" and busy.now > 100
    said = [state["progress"]["now"] for state in states if state["progress"]]
    assert "waiting for a free worker: place 2 in the queue" in said


def test_an_error_of_a_lane_is_told() -> None:
    class Failing(Toy):
        def snapshot(self, request: RaceRequest, count: int, done: bool) -> Any:
            shot = super().snapshot(request, count, done)
            shot["lanes"]["bass"]["error"] = "out of luck"
            return shot

    toy = Failing(rounds=3)
    with pytest.raises(BassError, match="out of luck"):
        list(measured(asked(), toy, Limits(), toy.clock))


def test_scatter_makes_a_difference_level() -> None:
    """Every second round of BASS writes nothing but its one token, so its speed is not known well."""

    class Ragged(Toy):
        def snapshot(self, request: RaceRequest, count: int, done: bool) -> Any:
            shot = super().snapshot(request, count, done)
            for record in shot["lanes"]["bass"]["rounds"][1::2]:
                record["rows"] = [{"written": 1}] * request.batch_size
            return shot

    toy = Ragged(rounds=12, each=3)
    *_, last = measured(asked(seconds=5, batches=[2], draft_lengths=[4]), toy, Limits(), toy.clock)
    (one,) = last["points"]
    sums = LaneRounds()
    for i in range(one["rounds"]):
        rows = [{"written": 1 if i % 12 % 2 == 0 else 3}] * 2
        sums.add({"kind": "verify", "time_ms": DRAFTING_MS * (i + 1), "rows": rows})  # type: ignore[typeddict-item]
    assert one["speedup"] == pytest.approx(2 / 1.6, rel=0.1)
    assert one["error"] == pytest.approx(sums.error, rel=1e-6) and math.isfinite(sums.error)
    assert one["against"] == ("level" if 2 * one["error"] * one["speedup"] >= one["speedup"] - 1 else "ahead")


def test_the_sentences_say_where_each_line_is_ahead() -> None:
    toy = Toy(each=1)
    *_, last = measured(asked(batches=[1, 2, 4, 8]), toy, Limits(), toy.clock)
    said = sentences(last)
    assert said[0] == "Algorithm 1: behind regular decoding at batch 1 to 8."
    assert said[1] == "Fixed length 4: behind regular decoding at batch 1 to 8."
    assert said[2] == (
        "Ridge: from 32 tokens a step on, multiplying takes longer than reading. Plain steps get there at batch "
        "32; with 4 drafts a row at batch 6.4."
    )
    mixed = {**last, "points": [{**one, "against": against} for one, against in _in_turn(last["points"])]}
    assert sentences(mixed)[0] == (  # type: ignore[arg-type]
        "Algorithm 1: ahead of regular decoding at batch 1 and 8, level with it at batch 2, behind it at batch 4."
    )
    assert "Ridge: n/a" in sentences({**last, "ridge": {"tokens": None}})[-1]


def _in_turn(points: list[Any]) -> Iterator[tuple[Any, str]]:
    by_batch = {1: "ahead", 2: "level", 4: "behind", 8: "ahead"}
    return ((one, by_batch[one["batch"]]) for one in points)
