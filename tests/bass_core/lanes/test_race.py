"""A race: snapshots grow, a lane that fails does not stop the others, and no memory leaks.

The snapshot's keys are checked because the page and API clients read them. The tests of fair scheduling set the
lanes' clocks. Memory must be freed together with the generator, without the garbage collector.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

import bass_core.lanes.lane as lane_module
from bass_core import DEFAULT_LANES, METHODS, ModelPair, RequestError, generate, race
from bass_core.lanes import warmup
from bass_core.lanes.schedule import _guarded
from tests.support.memory import alive, frees_at_once
from tests.support.models import byte_tokenizer, perturbed, prompts, reference, texts_of, tiny_pair

race_module = import_module("bass_core.lanes.race")  # the package binds this name to the function
PAIR = tiny_pair(tokenizer=byte_tokenizer())
TARGET = PAIR.target
SCHEDULINGS = ("fair", "overlap", "in_turn")
ROWS = prompts(3)

SEQUENCE = {"text", "token_ids", "pieces", "origins", "times_ms", "finish_reason"}
METRICS = {
    "ms_per_token", "plain_steps", "speedup", "round_cost", "scatter", "throughput_tps",
    "acceptance_rate", "token_acceptance", "mean_acceptance_length",
    "per_position_acceptance", "ptl_first_ms", "ptl_last_ms", "ptl_all_ms", "ttft_ms", "rounds", "target_forwards",
    "draft_length", "new_tokens",
}  # fmt: skip
DEVICE = {
    "name", "kind", "gpu_utilization", "gpu_memory_mb", "gpu_memory_total_mb", "gpu_power_w", "gpu_energy_mj",
    "cpu_percent", "cpu_count", "rss_mb",
}  # fmt: skip


@pytest.fixture(autouse=True)
def frequent_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a race give a snapshot after every step, or every millisecond if lanes overlap."""
    monkeypatch.setattr(race_module, "SNAPSHOT_SECONDS", 0.001)


def run_race(**arguments: Any) -> list[dict[str, Any]]:
    """Return all snapshots, each passed through JSON as a client would get it."""
    arguments = {"max_new_tokens": 14, "draft_length": 3} | arguments
    return [json.loads(json.dumps(s, allow_nan=False)) for s in race(PAIR, ROWS, **arguments)]


@pytest.mark.parametrize("scheduling", SCHEDULINGS)
def test_snapshots_grow_and_the_last_is_done(scheduling: str) -> None:
    shots = run_race(scheduling=scheduling)
    # The exact number of snapshots depends on timing.
    assert len(shots) > 1
    assert [shot["done"] for shot in shots] == [False] * (len(shots) - 1) + [True]
    for shot in shots:
        assert set(shot) - {"comparison"} == {
            "phase", "done", "scheduling", "elapsed_ms", "lanes", "device",
        }  # fmt: skip
        assert ("comparison" in shot) == shot["done"]
        assert shot["scheduling"] == scheduling and set(shot["lanes"]) == set(DEFAULT_LANES)
        assert set(shot["device"]) >= DEVICE
        for lane in shot["lanes"].values():
            check_lane(lane)
    for before, after in pairwise(shots):
        assert before["elapsed_ms"] <= after["elapsed_ms"]
        for method in DEFAULT_LANES:
            check_growth(before["lanes"][method], after["lanes"][method])
    for method, lane in shots[-1]["lanes"].items():
        expected = generate(PAIR, ROWS, method=method, max_new_tokens=14, draft_length=3)
        assert lane["finished"] and lane["error"] is None
        assert [s["token_ids"] for s in lane["sequences"]] == texts_of(expected)
        assert [s["text"] for s in lane["sequences"]] == [s.text for s in expected.sequences]


def check_lane(lane: dict[str, Any]) -> None:
    assert set(lane) == {
        "sequences", "metrics", "rounds", "clock_ms", "finished", "error", "reading", "cache",
    }  # fmt: skip
    assert set(lane["metrics"]) >= METRICS
    assert len(lane["sequences"]) == len(ROWS)
    for sequence in lane["sequences"]:
        assert set(sequence) == SEQUENCE
        count = len(sequence["token_ids"])
        assert len(sequence["pieces"]) == len(sequence["origins"]) == len(sequence["times_ms"]) == count
        assert "".join(sequence["pieces"]) == sequence["text"]
        assert sequence["times_ms"] == sorted(sequence["times_ms"])
        assert all(time <= lane["clock_ms"] for time in sequence["times_ms"])
        assert set(sequence["origins"]) <= {"sampled", "accepted", "recovered", "bonus"}
        assert sequence["finish_reason"] in (None, "length")
    assert lane["finished"] == all(sequence["finish_reason"] for sequence in lane["sequences"])
    assert lane["metrics"]["new_tokens"] == sum(len(sequence["token_ids"]) for sequence in lane["sequences"])


def check_growth(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before["clock_ms"] <= after["clock_ms"]
    for old, new in zip(before["sequences"], after["sequences"], strict=True):
        assert new["text"].startswith(old["text"])
        for name in ("token_ids", "origins", "times_ms"):
            assert new[name][: len(old[name])] == old[name]
        if old["finish_reason"]:
            assert new == old


def test_figures_that_do_not_apply_are_none() -> None:
    first, *_, last = run_race(lanes=("bass", "regular"))
    regular = last["lanes"]["regular"]["metrics"]
    assert first["lanes"]["bass"]["metrics"]["ptl_last_ms"] is None
    for name in ("acceptance_rate", "token_acceptance", "mean_acceptance_length", "per_position_acceptance"):
        assert regular[name] is None and last["lanes"]["bass"]["metrics"][name] is not None
    assert regular["speedup"] == pytest.approx(1)
    bass = last["lanes"]["bass"]["metrics"]
    assert bass["speedup"] == pytest.approx(regular["ms_per_token"] / bass["ms_per_token"])
    without_regular = run_race(lanes=("bass",))[-1]["lanes"]["bass"]["metrics"]
    assert without_regular["speedup"] is None


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, float]]]:
    """List, for each step, its lane and the clocks of all unfinished lanes before it.

    Each lane has a fixed time per step.
    """
    cost = {"regular": 10.0, "speculative": 4.0, "bass": 25.0}
    seen: list[tuple[str, dict[str, float]]] = []
    lanes: list[lane_module.Lane] = []

    class ClockedLane(lane_module.Lane):
        def __init__(self, pair: ModelPair, request: Any, method: str) -> None:
            super().__init__(pair, request, method)
            self.clock.running = self.running  # type: ignore[method-assign]
            lanes.append(self)

        @contextmanager
        def running(self) -> Iterator[None]:
            seen.append((self.method, {lane.method: lane.clock.ms for lane in lanes if not lane.finished}))
            yield
            self.clock.ms += cost[self.method]

    monkeypatch.setattr(race_module, "Lane", ClockedLane)
    return seen


def test_fair_scheduling_steps_the_lane_that_is_furthest_behind(steps: list[tuple[str, dict[str, float]]]) -> None:
    run_race(scheduling="fair")
    assert {method for method, _ in steps} == set(DEFAULT_LANES)
    for method, clocks in steps:
        assert clocks[method] == min(clocks.values())


def test_a_waiting_snapshot_gets_the_lane_next() -> None:
    """A thread that steps a lane again and again must let a waiting snapshot go first."""
    for _ in range(20):
        lane: Any = SimpleNamespace(turn=threading.Lock(), held=threading.Lock(), finished=False)
        order: list[str] = []

        def look(lane: Any = lane, order: list[str] = order) -> None:
            with lane.turn, lane.held:
                order.append("look")

        thread = threading.Thread(target=look)

        def first(lane: Any = lane, thread: threading.Thread = thread) -> None:
            thread.start()
            for _ in range(5000):
                if lane.turn.locked():
                    break
                time.sleep(0.001)

        _guarded(lane, first)
        _guarded(lane, partial(order.append, "step"))
        thread.join()
        assert order == ["look", "step"]


def test_in_turn_runs_one_lane_to_its_end(steps: list[tuple[str, dict[str, float]]]) -> None:
    shots = run_race(scheduling="in_turn", lanes=("bass", "regular"))
    order = [method for method, _ in steps]
    assert order == sorted(order, key=("bass", "regular").index)
    waiting = [s["lanes"]["regular"]["clock_ms"] for s in shots if not s["lanes"]["bass"]["finished"]]
    assert waiting and set(waiting) == {0.0}


@pytest.mark.parametrize(("scheduling", "known"), zip(SCHEDULINGS, (True, False, False), strict=True))
def test_a_lane_that_fails_does_not_stop_the_others(
    scheduling: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bass = METHODS["bass"]
    failing = replace(bass, build=lambda *arguments: Failing(bass.build(*arguments), known))
    monkeypatch.setitem(METHODS, "bass", failing)
    last = run_race(scheduling=scheduling)[-1]
    failed = last["lanes"]["bass"]
    assert failed["finished"]
    assert failed["error"] == "Choose less." if known else "RuntimeError" in failed["error"]
    assert {s["finish_reason"] for s in failed["sequences"]} == {"error"}
    assert all(s["token_ids"] for s in failed["sequences"])
    for method in ("regular", "speculative"):
        lane = last["lanes"][method]
        assert lane["error"] is None and {s["finish_reason"] for s in lane["sequences"]} == {"length"}


class Failing:
    """A decoder that fails at its fourth step."""

    finished = False
    timeline = None

    def __init__(self, decoder: Any, known: bool) -> None:
        self.decoder, self.known, self.left = decoder, known, 3
        self.prepare, self.pause, self.close = decoder.prepare, decoder.pause, decoder.close

    @property
    def target_forwards(self) -> int:
        return int(self.decoder.target_forwards)

    def step(self) -> Any:
        self.left -= 1
        if self.left < 0:
            raise RequestError("Choose less.") if self.known else RuntimeError("secret detail")
        return self.decoder.step()


@pytest.mark.parametrize(
    ("scheduling", "taken"), [*((name, 6) for name in SCHEDULINGS), ("fair", 1), ("overlap", None)]
)
def test_closing_frees_everything_at_once(scheduling: str, taken: int | None) -> None:
    with frees_at_once(lanes=True) as before:
        running = race(PAIR, ROWS, scheduling=scheduling, max_new_tokens=14 if taken is None else 400)
        assert taken or [snapshot["done"] for snapshot in running][-1]
        for _ in range(taken or 0):
            assert not next(running)["done"]
        assert not taken or alive(lanes=True) >= before + 2 * len(DEFAULT_LANES)
        running.close()


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """List the decoders that are built for warm-ups."""
    decoders: list[Any] = []
    build = warmup.build_bass

    def recording(*arguments: Any) -> Any:
        decoders.append(build(*arguments))
        return decoders[-1]

    monkeypatch.setattr(warmup, "build_bass", recording)
    return decoders


@pytest.mark.parametrize("draft", [None, perturbed(TARGET, 0.02)])
def test_each_pair_warms_up_once(built: list[Any], draft: Any) -> None:
    pair, other, row = ModelPair(TARGET, draft), ModelPair(TARGET, draft), prompts(1)[0]
    for _ in range(2):
        assert generate(pair, row, max_new_tokens=9).sequences[0].token_ids == reference(TARGET, row, 9)
    assert len(built) == 1
    first = next(race(other, row, max_new_tokens=9))
    assert len(built) == 2
    # These are the warm-up's prefill and its one round, which no lane counts.
    assert [decoder.target_forwards for decoder in built] == [2, 2]
    assert all(lane["metrics"]["target_forwards"] <= 9 for lane in first["lanes"].values())


def test_a_failed_warm_up_does_not_stop_the_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("cold")

    monkeypatch.setattr(warmup, "build_bass", fail)
    row = prompts(1)[0]
    assert generate(ModelPair(TARGET), row, max_new_tokens=5).sequences[0].token_ids == reference(TARGET, row, 5)


class PanicException(BaseException):
    """Like pyo3's, which libraries written in Rust raise: no Exception."""


@pytest.mark.parametrize("scheduling", SCHEDULINGS)
def test_a_panic_ends_only_its_lane(scheduling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = lane_module.Lane.step

    def panic(lane: Any) -> Any:
        if lane.method == "bass":
            raise PanicException
        return step(lane)

    monkeypatch.setattr(lane_module.Lane, "step", panic)
    last = list(race(PAIR, ROWS, lanes=["regular", "bass"], scheduling=scheduling, max_new_tokens=4))[-1]
    assert last["done"] and last["lanes"]["regular"]["error"] is None
    assert "internal error (PanicException)" in str(last["lanes"]["bass"]["error"])


@pytest.mark.parametrize("expected", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("scheduling", SCHEDULINGS)
def test_an_interrupt_is_raised_also_if_it_arrives_as_a_runtime_error(
    scheduling: str, expected: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(lane: Any) -> Any:
        try:
            raise KeyboardInterrupt
        finally:
            if expected is RuntimeError:
                threading.Condition().notify()  # it does not hold the lock

    monkeypatch.setattr(lane_module.Lane, "step", interrupted)
    with pytest.raises(expected):
        list(race(PAIR, ROWS, lanes=["regular"], scheduling=scheduling, max_new_tokens=4))


def test_an_error_in_stopped_is_raised_if_lanes_overlap() -> None:
    def stopped() -> bool:
        if threading.current_thread() is not threading.main_thread():
            raise PanicException
        return False

    with pytest.raises(PanicException):
        list(race(PAIR, ROWS, lanes=["regular"], scheduling="overlap", stopped=stopped, max_new_tokens=4))
