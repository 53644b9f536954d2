"""Lanes on a simulated clock: this run's texts, another machine's times.

Contract: nothing here reads a clock, and that is what most of it shows: each figure is computed a second time from
the rounds.
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
from bass_core.decode import measuring as budgets
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
MODEL: dict[str, Any] = {"drafter": "model", "eos_token_id": None}


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever would measure this machine's rounds fails; with BASS_MEASURE=0 "auto" would only do without."""
    monkeypatch.delenv("BASS_MEASURE")
    monkeypatch.setattr(budgets, "may_measure", lambda: pytest.fail("asked whether to measure"))
    monkeypatch.setattr(budgets, "MeasuredCosts", lambda *_: pytest.fail("measured"))


def last(**arguments: Any) -> dict[str, Any]:
    """The last snapshot, as a client would get it."""
    *_, shot = race(PAIR, ROWS, **MODEL | arguments)
    made: dict[str, Any] = json.loads(json.dumps(shot, allow_nan=False))
    return made


def played(rounds: list[Round]) -> list[Played]:
    """The rounds as bench simulate's."""
    return [
        Played(
            one.draft_length,
            [row.sequence for row in one.rows],
            [len(row.drafted) for row in one.rows],
            [row.accepted for row in one.rows],
        )
        for one in rounds
        if one.kind != "prefill"
    ]


@pytest.mark.parametrize("method", ["regular", "speculative", "bass"])
def test_a_lanes_time_is_that_of_bench_simulate_for_its_rounds(method: str) -> None:
    """Each round takes Played.ms on a roofline at its rows' mean cached length, which is followed here anew."""
    told = list(
        stream(PAIR, ROWS, method=method, draft_length=Algorithm1(), max_new_tokens=24, clock=H100, **MODEL)
    )
    cached = {index: len(prompt) for index, prompt in enumerate(ROWS)}
    before, simulated = 0.0, iter(played(told))
    for one in told:
        if one.kind == "prefill":
            assert one.draft_ms is one.verify_ms is None
        else:
            context = fmean(cached[row.sequence] for row in one.rows)
            costs = Roofline(HARDWARE["H100"], *shapes("7.8B"), context)
            assert one.time_ms - before == pytest.approx(next(simulated).ms(costs))
            assert one.draft_ms is not None and one.verify_ms is not None
            assert one.draft_ms + one.verify_ms == pytest.approx(one.time_ms - before)
            for row in one.rows:
                cached[row.sequence] += len(row.tokens)
        before = one.time_ms
    assert next(simulated, None) is None


def test_the_figures_are_those_of_bench_simulate() -> None:
    """On a table, whose times depend on no context: per-token latency of all kinds, tokens and rounds."""
    asked: dict[str, Any] = dict(
        draft_length=Algorithm1(), max_new_tokens=24, clock=SimulatedClock(TABLE), **MODEL
    )
    rounds = played(list(stream(PAIR, ROWS, **asked)))
    made, expected = generate(PAIR, ROWS, **asked).metrics, timed(TABLE, [rounds], 24)
    for name in ("ms_per_token", "ptl_first_ms", "ptl_last_ms", "ptl_all_ms", "mean_acceptance_length", "rounds"):
        assert getattr(made, name) == pytest.approx(getattr(expected, name)), name
    assert made.ttft_ms is not None and made.ttft_ms > 0


def test_the_same_seed_writes_the_same_texts_as_on_this_machines_clock() -> None:
    """Under a recorded policy. The lengths of a simulated run, one a row, are recorded."""
    ways: dict[str, Any] = dict(sampling=SamplingParams(0.8), seed=5, max_new_tokens=24, **MODEL)
    first = list(stream(PAIR, ROWS, draft_length="auto", clock=H100, **ways))
    entries = [one.lengths for one in first if one.kind != "prefill"]
    assert any(map(any, entries))
    texts: dict[int, list[int]] = {index: [] for index in range(len(ROWS))}
    for one in first:
        for row in one.rows:
            texts[row.sequence] += row.tokens
    for clock in (None, H100, SimulatedClock("laptop", target="1.7b", draft="135m")):
        made = generate(PAIR, ROWS, draft_length=RecordedLengths(entries), clock=clock, **ways)
        assert {index: one.token_ids for index, one in enumerate(made.sequences)} == texts


@pytest.mark.parametrize("length", ["auto", "cost-aware"])
def test_policies_ask_the_simulated_machine_and_measure_nothing(length: str) -> None:
    """Where multiplying costs nothing they draft; where only multiplying costs, and a draft a step, they don't."""
    wide = SimulatedClock(Hardware("wide", 1000, 1e18, 80), target=ModelSize(7e9), draft=ModelSize(1e6, layers=1))
    slow = SimulatedClock(Hardware("slow", 1e6, 1e12, 80), target=ModelSize(7e9), draft=ModelSize(7e9))
    found = []
    for clock in (wide, slow):
        shot = last(draft_length=length, clock=clock, max_new_tokens=24, lanes=["bass"], synthetic_acceptance=0.9)
        assert shot["lanes"]["bass"]["error"] is None
        found.append(shot["lanes"]["bass"]["metrics"]["drafted"])
    assert found[0] > 40 and found[1] < 12


def test_a_time_budget_counts_on_that_clock() -> None:
    """A plain step takes about 6 ms on an H100, so 50 ms are eight of them, however long they take here."""
    made = generate(PAIR, ROWS, method="regular", max_new_tokens=64, time_budget_ms=50, clock=H100, **MODEL)
    counts = {len(one.token_ids) for one in made.sequences}
    assert {one.finish_reason for one in made.sequences} == {"budget"} and counts <= {8, 9}
    assert all(one.times_ms[-1] >= 50 > one.times_ms[-2] for one in made.sequences)


def test_utilisation_is_that_of_the_hardware_and_the_shape() -> None:
    """Plain steps: 2 x parameters x rows, and the weights, over the predicted time and the datasheet's peaks."""
    found = generate(PAIR, ROWS, method="regular", max_new_tokens=24, clock=H100, **MODEL).metrics
    (target, _), gpu = shapes("7.8B"), HARDWARE["H100"]
    assert found.ms_per_token is not None and found.flops_utilization is not None
    flops = 2 * target.cost.parameters * 4 / (found.ms_per_token / 1000) / gpu.flops
    assert found.flops_utilization == pytest.approx(flops, rel=0.01)
    assert found.bandwidth_utilization is not None and 0.75 < found.bandwidth_utilization <= 0.8
    table = last(max_new_tokens=6, draft_length=2, clock=SimulatedClock(TABLE))["lanes"]["bass"]
    assert table["cache"] is not None


def test_snapshots_wear_it_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = last(max_new_tokens=6, draft_length=2)
    assert "clock" not in measured and measured["lanes"]["bass"]["cache"] is not None
    monkeypatch.setattr(LaneClock, "__init__", lambda *_: pytest.fail("a clock of this machine"))
    shots = list(race(PAIR, ROWS, max_new_tokens=6, clock=H100, draft_length=2, **MODEL))
    assert all(shot["clock"]["kind"] == "predicted" and shot["clock"]["hardware"] == "H100" for shot in shots)
    assert all(lane["cache"] is None for lane in shots[-1]["lanes"].values())
    made = generate(PAIR, ROWS, max_new_tokens=6, clock=H100, draft_length=2, **MODEL)
    assert made.clock == shots[-1]["clock"] and repr(made).endswith("predicted for H100)")


def test_what_can_not_run_on_it_is_refused_at_the_call() -> None:
    small = SimulatedClock("a100", target=ModelSize(35.6e9), gpus=1)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"lanes": ["regular", "amusd"], "clock": H100}, "amusd can't run on a simulated clock"),
        ({"clock": "h100"}, "clock must be None or a SimulatedClock"),
        ({"clock": small}, "do not fit 1 x A100 of 80 GB"),
    ]
    for asked, said in refused:
        with pytest.raises(RequestError, match=said):
            race(PAIR, prompts(4, longest=400), max_new_tokens=100, **asked)
