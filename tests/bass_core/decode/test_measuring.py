"""Costs are measured after the request is admitted and before any lane exists, or not at all."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from bass_core import ModelPair, SamplingParams, generate, measure_ahead, race, stream
from bass_core.decode import calibrate
from bass_core.decode import measuring as budgets
from bass_core.decode.cost_store import CostCheck, Doubts, costs_path
from bass_core.decode.measuring import Measuring, policy_of_request, with_costs
from bass_core.decode.request import Request, make_request
from bass_core.draft.lookup import PromptLookupDrafter
from bass_core.lanes.lane import Lane
from bass_core.length.acceptance import PastDrafts
from bass_core.length.cost_aware import CostAware
from bass_core.length.costs import CostTable, read_table, write_table
from bass_core.length.options import AUTO, COST_AWARE
from bass_core.length.policies import Algorithm1, FixedLength
from bass_core.sequence import Forward, Round
from kernels import support
from tests.support.models import prompts, tiny, tiny_pair

PAIR = tiny_pair()
TARGET = PAIR.target
ROWS = prompts(8)
# Drafting is almost free for one row; with eight rows every token costs as much as the first.
COSTS = CostTable({1: [(1, 10.0), (17, 11.0)], 8: [(8, 80.0), (136, 1360.0)]}, {1: 0.01, 8: 5.0}, padded=False)


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("BASS_MEASURE")
    monkeypatch.setattr(budgets, "_attempts", Counter())
    # test_peaks.py tests the CPU's peaks, which are measured along with the costs.
    monkeypatch.setattr("bass_core.decode.peaks.peaks_path", lambda dtype: None)


def stored_table(request: Request) -> CostTable:
    table = read_table(costs_path(PAIR, request.kind, request.backend, request.sampling))
    assert table is not None
    return table


@pytest.mark.parametrize("option", [AUTO, COST_AWARE])
def test_with_costs_auto_is_cost_aware(option: str) -> None:
    request = replace(make_request(PAIR, ROWS, draft_length=option), costs=COSTS)
    assert isinstance(policy_of_request(request), CostAware)


@pytest.mark.parametrize("method", ["speculative", "bass"])
def test_a_call_adds_its_drafts_to_those_of_earlier_calls(method: str) -> None:
    earlier: PastDrafts = {"model": np.array([20.0, 10.0])}
    request = replace(make_request(PAIR, ROWS[:2], max_new_tokens=16), costs=COSTS, past_drafts=earlier)
    lane = Lane(PAIR, request, method)
    while not lane.finished:
        lane.step()
    rows = [row for round_ in lane.trace.records for row in round_["rows"]]
    # Accepted drafts, and the first one after them.
    tested = sum(min(row["accepted"] + 1, len(row["drafted"])) for row in rows)
    assert tested and earlier["model"].tolist() == [20 + tested, 10 + sum(row["accepted"] for row in rows)]


@pytest.mark.parametrize(
    ("options", "remembers"),
    [
        ({}, True),
        ({"sampling": SamplingParams(1.0)}, False),
        ({"sampling": SamplingParams(1.0), "verification": "coupled"}, False),
        ({"synthetic_acceptance": 0.5}, False),
    ],
)
def test_only_greedy_drafts_are_remembered(
    options: dict[str, Any], remembers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second sampled call with one seed would take its lengths from the noise that judges its drafts."""
    monkeypatch.setattr(budgets, "_past_drafts", defaultdict(dict))
    monkeypatch.setattr(budgets.MeasuredCosts, "_read_stored", lambda costs: COSTS)
    monkeypatch.setattr(budgets, "missing_sizes", lambda *_, **__: [])
    generate(PAIR, ROWS[:1], max_new_tokens=8, eos_token_id=None, **options)
    assert any(map(len, budgets._past_drafts.values())) == remembers


def test_without_costs_auto_is_algorithm_1_and_cost_aware_is_refused() -> None:
    request = make_request(PAIR, ROWS)
    assert request.draft_length == AUTO and isinstance(policy_of_request(request), Algorithm1)
    with pytest.raises(ValueError, match="with_costs"):
        policy_of_request(replace(request, draft_length=COST_AWARE))
    fixed = FixedLength(3)
    policy = policy_of_request(replace(request, draft_length=fixed))
    assert policy == fixed and policy is not fixed


def test_auto_measures_the_ends_logs_it_once_and_stores_the_costs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request(PAIR, ROWS[:3])
    table = with_costs(PAIR, request, 3).costs
    assert table == stored_table(request) and list(table.verify) == list(table.draft) == [1, 4]
    (message,) = caplog.messages
    assert "at most 5 s" in message and "BASS_MEASURE=0" in message
    with monkeypatch.context() as patch:
        patch.setattr(calibrate, "_RoundTimer", None)
        assert with_costs(PAIR, make_request(PAIR, ROWS[:2]), 2).costs == table
    assert len(caplog.messages) == 1
    # For a larger batch, "auto" measures only the missing row counts. COST_AWARE measures those in between too.
    wider = with_costs(PAIR, request, 8).costs
    assert wider is not None and list(wider.verify) == [1, 4, 8] and wider.verify[4] == table.verify[4]
    full = with_costs(PAIR, replace(request, draft_length=COST_AWARE), 8).costs
    assert full == stored_table(request) and list(full.verify) == [1, 2, 4, 8]
    assert wider.verify.items() <= full.verify.items()


class UserDrafter(PromptLookupDrafter):
    """A user's drafter, whose cost is unknown."""


@pytest.mark.parametrize("obstacle", ["switched off", "ZeroGPU", "a user's drafter", "no cache folder", "no lane"])
def test_auto_measures_nothing_if_costs_are_unavailable(
    obstacle: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(calibrate, "_RoundTimer", None)
    request = make_request(PAIR, ROWS)
    if obstacle == "switched off":
        monkeypatch.setenv("BASS_MEASURE", "0")
    elif obstacle == "ZeroGPU":
        monkeypatch.setenv("SPACES_ZERO_GPU", "1")
        assert support.on_zero_gpu()
    elif obstacle == "no cache folder":
        (tmp_path / "bass").write_text("a file where the folder should be")
    elif obstacle == "a user's drafter":
        request = make_request(PAIR, ROWS, drafter=UserDrafter())
    assert with_costs(PAIR, request, 0 if obstacle == "no lane" else 8).costs is None


def test_costs_are_measured_without_the_requests_penalties() -> None:
    shaped = SamplingParams(0.7, 5, 0.9, 0.1, repetition_penalty=1.5, logit_bias={3: 1.0}, bad_words=((4, 5),))
    request = make_request(PAIR, ROWS[:1], sampling=shaped)
    measured = calibrate.MeasuredCosts(PAIR, request.kind, request.backend, request.sampling).sampling
    assert measured == SamplingParams(0.7, 5, 0.9, 0.1) and request.sampling.shapes


def test_a_model_too_slow_to_measure_is_tried_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    request, steps = make_request(PAIR, ROWS), []
    monkeypatch.setattr(budgets, "AUTO_SECONDS", -1.0)
    for _ in range(4):
        measuring = Measuring(PAIR, request, 8)
        steps.append(len(list(measuring)))
        assert measuring.request.costs is None
    assert steps == [1, 1, 0, 0]


@pytest.mark.slow
def test_batch_sizes_timed_before_the_time_ran_out_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is read before the first step and after each step, and advances by a second per reading."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(
        calibrate, "time", SimpleNamespace(monotonic=lambda: next(ticks), perf_counter=lambda: 0.0)
    )
    request, measured_rows = make_request(PAIR, ROWS), {}
    for seconds in range(8, 87, 6):
        monkeypatch.setattr(budgets, "AUTO_SECONDS", seconds)
        costs = with_costs(PAIR, request, 8).costs
        measured_rows[seconds] = () if costs is None else tuple(costs.verify)
        for path in Path(str(costs_path(PAIR, request.kind, request.backend, request.sampling))).parent.iterdir():
            path.unlink()
        budgets._attempts.clear()
    assert set(measured_rows.values()) == {(), (1,), (1, 8)} and list(measured_rows.values()) == sorted(
        measured_rows.values()
    )


@pytest.mark.parametrize("draft_length", [AUTO, COST_AWARE])
def test_a_failed_measurement_of_auto_is_only_logged(
    draft_length: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("no such layer")

    monkeypatch.setattr(calibrate._RoundTimer, "_step", broken)
    if draft_length == AUTO:
        output = generate(PAIR, ROWS[:2], max_new_tokens=10)
        assert len(output.sequences[1].token_ids) == 10 and "no such layer" in caplog.text
    else:
        with pytest.raises(KeyError):
            generate(PAIR, ROWS[:2], max_new_tokens=10, draft_length=draft_length)


@pytest.mark.parametrize(
    ("call", "draft_length"), [("generate", COST_AWARE), ("stream", AUTO), ("race", AUTO), ("race", COST_AWARE)]
)
def test_no_lane_exists_while_costs_are_measured(
    call: str, draft_length: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # If a lane existed, its clock could run and its caches take memory during the measurement.
    module = import_module("bass_core.lanes.race" if call == "race" else "bass_core.lanes.generate")
    order: list[str] = []
    make_lane, step = module.Lane, calibrate._RoundTimer._step
    monkeypatch.setattr(module, "Lane", lambda *arguments: order.append("lane") or make_lane(*arguments))
    monkeypatch.setattr(calibrate._RoundTimer, "_step", lambda *both: order.append("measure") or step(*both))
    monkeypatch.setattr(calibrate, "REPEATS", 1)
    options: dict[str, Any] = {"max_new_tokens": 8, "draft_length": draft_length}
    if call == "race":
        shots = list(race(PAIR, ROWS[:2], lanes=("regular", "speculative", "bass"), **options))
        phases = [shot["phase"] for shot in shots]
        assert phases[0] == "measuring" and phases[-1] == "running" and phases == sorted(phases)
        assert all(not shot["lanes"] and not shot["done"] for shot in shots if shot["phase"] == "measuring")
        assert shots[-1]["done"] and all(lane["error"] is None for lane in shots[-1]["lanes"].values())
    elif call == "stream":
        list(stream(PAIR, ROWS[:2], **options))
    else:
        generate(PAIR, ROWS[:2], **options)
    assert order.count("measure") > 10 and order == sorted(order, reverse=True)


@pytest.mark.parametrize("draft_length", [AUTO])
def test_a_race_reports_the_progress_of_its_measurements(
    draft_length: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("bass_core.lanes.race"), "SNAPSHOT_SECONDS", 0)
    monkeypatch.setattr(calibrate, "REPEATS", 1)
    monkeypatch.setattr(budgets, "AUTO_SECONDS", 1000.0)
    shots = list(race(PAIR, ROWS[:2], max_new_tokens=4, draft_length=draft_length))
    progress = [shot.get("measuring") for shot in shots if shot["phase"] == "measuring"]
    shares = [report["done"] for report in progress if report]
    assert len(shares) > 20 and shares == sorted(shares) and shares[-1] == 1.0
    # The first steps only read a prompt, so the remaining time cannot be estimated yet.
    assert progress[0] == {"done": pytest.approx(0, abs=0.01), "left_ms": None}
    assert progress[-1] and progress[-1]["left_ms"] == 0
    assert all(report["left_ms"] > 0 for report in progress if report and 0.01 < report["done"] < 1)
    assert not any("measuring" in shot for shot in shots if shot["phase"] == "running")


@pytest.mark.parametrize("lanes", [("regular", "amusd")])
def test_lanes_without_a_policy_need_no_costs(lanes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_RoundTimer", None)
    first = next(race(PAIR, ROWS[:2], lanes=lanes, max_new_tokens=8))
    assert first["phase"] == "running"


def test_a_race_closed_while_it_measures_stores_nothing() -> None:
    shots = race(PAIR, ROWS[:2], max_new_tokens=8)
    assert next(shots)["phase"] == "measuring"
    shots.close()
    request = make_request(PAIR, ROWS[:2])
    assert read_table(costs_path(PAIR, request.kind, request.backend, request.sampling)) is None
    assert not budgets._attempts, "a stopped race counted as a failed attempt"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hooked", ["target", "draft"])
def test_a_model_with_a_hook_has_separate_costs(hooked: str, dtype: torch.dtype) -> None:
    """A hook also means separate costs in float32, although there it does not change the class of the step."""
    target, draft = tiny("llama").to(dtype), tiny("llama", seed=1).to(dtype)
    pair = ModelPair(target, draft)
    request = make_request(pair, ROWS[:1])
    paths = [costs_path(pair, request.kind, request.backend, request.sampling)]
    model: Any = target if hooked == "target" else draft
    for _ in range(2):
        mlp = model.model.layers[0].mlp
        handle = mlp.register_forward_hook(lambda module, args, out: None)
        paths.append(costs_path(ModelPair(target, draft), request.kind, request.backend, request.sampling))
        handle.remove()
        paths.append(costs_path(ModelPair(target, draft), request.kind, request.backend, request.sampling))
    assert paths == [paths[0], paths[1]] * 2 + [paths[0]] and paths[0] != paths[1]


def costly(factor: float, *sizes: int) -> CostTable:
    """Return a table for these numbers of rows in which a draft costs so much that every round is plain."""
    each = dict.fromkeys(sizes, 1e9)
    verify = {rows: [(float(rows), factor * 1e6), (17.0 * rows, factor * 2e6)] for rows in sizes}
    return CostTable(verify, each, padded=False, proposal=each)


class ScriptedTimer:
    """Stands in for `_RoundTimer`: one step, and `costly` as the result. `scripted` lists the measurements."""

    scripted: ClassVar[list[int]] = []
    factor: ClassVar[float]
    timed = True

    def __init__(self, *arguments: Any) -> None:
        *_, self.rows = arguments

    def steps(self) -> Iterator[float]:
        yield 1.0

    def costs(self) -> CostTable:
        self.scripted.append(self.rows)
        return costly(self.factor, self.rows)


@pytest.mark.parametrize("when", ["before a call", "idle"])
@pytest.mark.parametrize("factor", [0.5, 1.5])
def test_costs_that_a_lane_beats_are_measured_again_once(
    factor: float, when: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The stored costs come from a busy machine. New ones replace them, unless the machine is even busier now."""
    scripted: list[int] = []
    monkeypatch.setattr(ScriptedTimer, "scripted", scripted)
    monkeypatch.setattr(ScriptedTimer, "factor", factor, raising=False)
    monkeypatch.setattr(calibrate, "_RoundTimer", ScriptedTimer)
    request = make_request(PAIR, ROWS[:2])
    path = costs_path(PAIR, request.kind, request.backend, request.sampling)
    sampled = costs_path(PAIR, request.kind, request.backend, SamplingParams(temperature=1.0))
    for file in (path, sampled):
        write_table(file, costly(1.0, 1, 2, 4))

    def measure() -> list[int]:
        scripted.clear()
        if when == "idle":
            list(measure_ahead(PAIR, 4))
        else:
            with_costs(PAIR, replace(request, prompts=ROWS[:4]), 4)
        return scripted

    assert measure() == []
    generate(PAIR, ROWS[:2], max_new_tokens=12, eos_token_id=None)
    assert measure() == [2]
    assert stored_table(request) == costly(1.0, 1, 2, 4).joined(costly(min(factor, 1.0), 2))
    assert read_table(sampled) == costly(1.0, 1, 2, 4)
    assert ("again" in caplog.text) == (when != "idle")
    generate(PAIR, ROWS[:2], max_new_tokens=12, eos_token_id=None)
    assert measure() == []


@pytest.mark.parametrize("method", ["regular", "bass"])
def test_only_a_lane_that_used_the_costs_doubts_them(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regular decoding's steps do less than the plain steps of a table."""
    request = replace(make_request(PAIR, ROWS[:1], max_new_tokens=12), costs=costly(1.0, 1))
    for path, doubts in ((None, False), (Path("stored"), method == "bass")):
        monkeypatch.setattr("bass_core.lanes.lane.DOUBTS", (raised := Doubts()))
        lane = Lane(PAIR, replace(request, costs_path=path), method)
        while not lane.finished:
            lane.step()
        assert ((path, 1) in raised) == doubts


@pytest.mark.parametrize(
    ("times", "counts", "padded", "too_high"),
    [
        ([7.0, 50.0, 7.0, 50.0, 7.0], [1], False, {1}),
        ([7.0, 50.0, 7.0, 50.0, 8.0], [1], False, set()),
        ([1.0] * 4, [1], False, set()),
        ([1.0] * 5, [18], False, set()),
        ([1.0] * 5, [1] * 3, False, set()),
        ([200.0] * 5, [9, 1] + [1] * 6, False, set()),
        ([200.0] * 5, [9, 1] + [1] * 6, True, {8}),
    ],
    ids=["faster", "as fast", "few rounds", "wider than measured", "rows not measured", "tokens", "padding"],
)
def test_costs_are_too_high_if_the_median_round_is_clearly_faster(
    times: list[float], counts: list[int], padded: bool, too_high: set[int]
) -> None:
    """Of each round, 3 ms of drafting are not part of the verification that the costs are of."""
    check = CostCheck(replace(COSTS, padded=padded))
    for ms in times:
        check.add(Round("verify", fed=Forward([9] * len(counts), counts), draft_ms=3.0), ms + 3.0)
        check.add(Round("prefill", fed=Forward([0], [1])), 0.1)
    assert check.too_high() == too_high
