"""Lanes on a simulated clock have the texts of this run and the times of another machine.

Nothing here reads a real clock; most tests compute each figure a second time from the rounds.
"""

from __future__ import annotations

import json
from statistics import fmean
from typing import Any

import pytest

from bass_core import (
    Algorithm1,
    CostTable,
    Hardware,
    ModelSize,
    RecordedLengths,
    RequestError,
    SamplingParams,
    SimulatedClock,
    generate,
    race,
    stream,
)
from bass_core.decode import measuring
from bass_core.lanes.clock import LaneClock
from bass_core.predict.hardware import HARDWARE
from bass_core.predict.roofline import Roofline
from bass_core.predict.rounds import Played, timed
from bass_core.predict.shapes import shapes
from bass_core.sequence import Round
from tests.support.models import prompts, tiny_pair

PAIR = tiny_pair()
TARGET = PAIR.target
ROWS = prompts(4)
TABLE = CostTable({1: [(1.0, 10.0), (9.0, 18.0)], 4: [(4.0, 12.0), (36.0, 60.0)]}, {1: 1.0, 4: 2.0}, padded=False)
H100 = SimulatedClock("h100", target="7.8b", draft="310m")
REQUEST: dict[str, Any] = {"drafter": "model", "eos_token_id": None}


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail on any measurement of this machine.

    BASS_MEASURE=0 would hide one, because with it "auto" skips measurements.
    """
    monkeypatch.delenv("BASS_MEASURE")
    monkeypatch.setattr(measuring, "may_measure", lambda: pytest.fail("asked whether to measure"))
    monkeypatch.setattr(measuring, "MeasuredCosts", lambda *_: pytest.fail("measured"))


def last_snapshot(**arguments: Any) -> dict[str, Any]:
    """The last snapshot, passed through JSON."""
    *_, shot = race(PAIR, ROWS, **REQUEST | arguments)
    snapshot: dict[str, Any] = json.loads(json.dumps(shot, allow_nan=False))
    return snapshot


def as_played(rounds: list[Round]) -> list[Played]:
    """Convert the rounds to the type that bench simulate uses."""
    return [
        Played(
            round_.draft_length,
            [row.sequence for row in round_.rows],
            [len(row.drafted) for row in round_.rows],
            [row.accepted for row in round_.rows],
        )
        for round_ in rounds
        if round_.kind != "prefill"
    ]


@pytest.mark.parametrize("method", ["regular", "speculative", "bass"])
def test_lane_time_equals_that_of_bench_simulate(method: str) -> None:
    """Each round takes the time of Played.ms at the rows' mean cached length, which the test tracks itself."""
    rounds = list(
        stream(PAIR, ROWS, method=method, draft_length=Algorithm1(), max_new_tokens=24, clock=H100, **REQUEST)
    )
    cached = {index: len(prompt) for index, prompt in enumerate(ROWS)}
    before, simulated = 0.0, iter(as_played(rounds))
    for round_ in rounds:
        if round_.kind == "prefill":
            assert round_.draft_ms is round_.verify_ms is None
        else:
            context = fmean(cached[row.sequence] for row in round_.rows)
            costs = Roofline(HARDWARE["H100"], *shapes("7.8B"), context)
            assert round_.time_ms - before == pytest.approx(next(simulated).ms(costs))
            assert round_.draft_ms is not None and round_.verify_ms is not None
            assert round_.draft_ms + round_.verify_ms == pytest.approx(round_.time_ms - before)
            for row in round_.rows:
                cached[row.sequence] += len(row.tokens)
        before = round_.time_ms
    assert next(simulated, None) is None


def test_figures_equal_those_of_bench_simulate() -> None:
    """The clock uses a cost table, whose times don't depend on the context."""
    arguments: dict[str, Any] = dict(
        draft_length=Algorithm1(), max_new_tokens=24, clock=SimulatedClock(TABLE), **REQUEST
    )
    rounds = as_played(list(stream(PAIR, ROWS, **arguments)))
    metrics, expected = generate(PAIR, ROWS, **arguments).metrics, timed(TABLE, [rounds], 24)
    for name in ("ms_per_token", "ptl_first_ms", "ptl_last_ms", "ptl_all_ms", "mean_acceptance_length", "rounds"):
        assert getattr(metrics, name) == pytest.approx(getattr(expected, name)), name
    assert metrics.ttft_ms is not None and metrics.ttft_ms > 0


def test_the_clock_does_not_change_the_text() -> None:
    """Repeat a simulated run on other clocks, with its recorded lengths per row."""
    arguments: dict[str, Any] = dict(sampling=SamplingParams(0.8), seed=5, max_new_tokens=24, **REQUEST)
    first = list(stream(PAIR, ROWS, draft_length="auto", clock=H100, **arguments))
    entries = [round_.lengths for round_ in first if round_.kind != "prefill"]
    assert any(map(any, entries))
    texts: dict[int, list[int]] = {index: [] for index in range(len(ROWS))}
    for round_ in first:
        for row in round_.rows:
            texts[row.sequence] += row.tokens
    for clock in (None, H100, SimulatedClock("laptop", target="1.7b", draft="135m")):
        out = generate(PAIR, ROWS, draft_length=RecordedLengths(entries), clock=clock, **arguments)
        assert {index: sequence.token_ids for index, sequence in enumerate(out.sequences)} == texts


@pytest.mark.parametrize("length", ["auto", "cost-aware"])
def test_policies_use_the_simulated_costs_and_measure_nothing(length: str) -> None:
    """Both policies draft often if computing is free, but hardly at all if a draft costs as much as a step."""
    wide = SimulatedClock(Hardware("wide", 1000, 1e18, 80), target=ModelSize(7e9), draft=ModelSize(1e6, layers=1))
    slow = SimulatedClock(Hardware("slow", 1e6, 1e12, 80), target=ModelSize(7e9), draft=ModelSize(7e9))
    drafted = []
    for clock in (wide, slow):
        shot = last_snapshot(
            draft_length=length, clock=clock, max_new_tokens=24, lanes=["bass"], synthetic_acceptance=0.9
        )
        assert shot["lanes"]["bass"]["error"] is None
        drafted.append(shot["lanes"]["bass"]["metrics"]["drafted"])
    assert drafted[0] > 40 and drafted[1] < 12


def test_a_time_budget_is_in_simulated_time() -> None:
    """A plain step takes about 7.5 ms on an H100, so seven steps use up 50 ms, however slow this machine is."""
    out = generate(PAIR, ROWS, method="regular", max_new_tokens=64, time_budget_ms=50, clock=H100, **REQUEST)
    counts = {len(sequence.token_ids) for sequence in out.sequences}
    assert {sequence.finish_reason for sequence in out.sequences} == {"budget"} and counts <= {7, 8}
    assert all(sequence.times_ms[-1] >= 50 > sequence.times_ms[-2] for sequence in out.sequences)


def test_utilisation_uses_the_simulated_hardware_and_shape() -> None:
    """The utilisation is 2 x parameters x rows FLOPs per plain step, over the predicted time and the peak rate."""
    metrics = generate(PAIR, ROWS, method="regular", max_new_tokens=24, clock=H100, **REQUEST).metrics
    (target, _), gpu = shapes("7.8B"), HARDWARE["H100"]
    assert metrics.ms_per_token is not None and metrics.flops_utilization is not None
    flops = 2 * target.cost.parameters * 4 / (metrics.ms_per_token / 1000) / gpu.flops
    assert metrics.flops_utilization == pytest.approx(flops, rel=0.01)
    assert metrics.bandwidth_utilization is not None and 0.6 < metrics.bandwidth_utilization < 0.7
    table = last_snapshot(max_new_tokens=6, draft_length=2, clock=SimulatedClock(TABLE))["lanes"]["bass"]
    assert table["cache"] is not None


def test_only_snapshots_of_a_simulated_clock_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = last_snapshot(max_new_tokens=6, draft_length=2)
    assert "clock" not in measured and measured["lanes"]["bass"]["cache"] is not None
    monkeypatch.setattr(LaneClock, "__init__", lambda *_: pytest.fail("a clock of this machine"))
    shots = list(race(PAIR, ROWS, max_new_tokens=6, clock=H100, draft_length=2, **REQUEST))
    assert all(shot["clock"]["kind"] == "predicted" and shot["clock"]["hardware"] == "H100" for shot in shots)
    assert all(lane["cache"] is None for lane in shots[-1]["lanes"].values())
    out = generate(PAIR, ROWS, max_new_tokens=6, clock=H100, draft_length=2, **REQUEST)
    assert out.clock == shots[-1]["clock"] and repr(out).endswith("predicted for H100)")


def test_unsupported_races_are_refused_at_the_call() -> None:
    small = SimulatedClock("a100", target=ModelSize(35.6e9), gpus=1)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"lanes": ["regular", "amusd"], "clock": H100}, "amusd can't run on a simulated clock"),
        ({"clock": "h100"}, "clock must be None or a SimulatedClock"),
        ({"clock": small}, "do not fit 1 x A100 of 80 GB"),
    ]
    for arguments, message in refused:
        with pytest.raises(RequestError, match=message):
            race(PAIR, prompts(4, longest=400), max_new_tokens=100, **arguments)
