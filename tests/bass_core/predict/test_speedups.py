"""Predicted speed-ups: what they are made of, what doesn't fit, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bass_core import HARDWARE, Assumptions, CostTable, RequestError, SimulatedClock, predict_speedups
from bass_core.predict.shapes import shapes
from bench.machine import Machine

A100 = SimulatedClock("A100")
SMALL: dict[str, Any] = {"batches": (1, 8), "max_new_tokens": 24, "trials": 2}


def test_the_figures_are_plain_data_that_names_its_assumptions() -> None:
    found = predict_speedups(SimulatedClock("h100"), **SMALL)
    assert json.loads(json.dumps(found)) == found
    assert found["clock"] == SimulatedClock("h100", gpus=1).record()
    assert found["clock"]["assumptions"] == vars(Assumptions()) and "H100 SXM" in found["clock"]["source"]
    assert [(one["batch"], one["draft_length"]) for one in found["points"]] == [
        (batch, length) for batch in (1, 8) for length in ("bass", "auto", 4)
    ]
    for one in found["points"]:
        assert one["speedup"] == pytest.approx(one["regular_ms_per_token"] / one["ms_per_token"])
    assert found == predict_speedups(SimulatedClock("H100", "7.8b"), **SMALL), "the same arguments, other figures"


def test_without_drafts_nothing_is_won_and_with_hopeless_ones_time_is_lost() -> None:
    plain = predict_speedups(A100, draft_lengths=(0,), **SMALL)
    assert all(one["speedup"] == 1 and one["error"] == 0 for one in plain["points"])
    lost = predict_speedups(A100, acceptance=0, draft_lengths=(4,), **SMALL)
    assert all(one["tokens"] == 1 and one["speedup"] < 1 for one in lost["points"])
    won = predict_speedups(A100, acceptance=1, draft_lengths=(4,), **SMALL)
    # 23 tokens behind the prefill's: four rounds of 5, and one that ends short with the last 3.
    assert all(one["rounds"] == 5 and one["tokens"] == pytest.approx(23 / 5) for one in won["points"])


@pytest.mark.parametrize("name", ["A100", "laptop"])
def test_the_ridge_is_that_of_the_bench(name: str) -> None:
    """bench/machine.py computes it for measured peaks; here these are the assumed shares of the datasheet's."""
    hardware, assumed = HARDWARE[name], Assumptions(bandwidth=0.7, compute=0.5)
    peaks = Machine(0.7e9 * hardware.bandwidth, 0.5 * hardware.flops)
    found = predict_speedups(SimulatedClock(name, assumed=assumed), context=300, **SMALL)
    assert found["ridge_tokens"] == pytest.approx(peaks.ridge(shapes("7.8B")[0].cost, 1, 300))


def test_models_are_split_where_they_must_and_what_does_not_fit_has_no_figure() -> None:
    assert predict_speedups(SimulatedClock("A100", "70B", "8B"), **SMALL)["clock"]["gpus"] == 4
    # The 24 GB of a laptop hold the models and some rows.
    found = predict_speedups(SimulatedClock("laptop"), **(SMALL | {"batches": (8, 256)}))
    assert [one["speedup"] is None for one in found["points"]] == [False] * 3 + [True] * 3
    assert found["points"][-1]["ms_per_token"] is None and found["clock"]["gpus"] == 1


def test_step_times_of_one_s_own_give_figures_without_a_ridge() -> None:
    """A step takes 10 ms whatever it holds, a draft 1 ms: a round of 4 sure drafts writes 5 tokens in 14 ms."""
    table = CostTable({rows: [(1, 10.0), (96, 10.0)] for rows in (1, 8)}, {1: 1.0, 8: 1.0}, True)
    found = predict_speedups(
        SimulatedClock(table), acceptance=1, draft_lengths=(4,), batches=(1, 8), max_new_tokens=101
    )
    assert found["ridge_tokens"] is None
    assert all(one["speedup"] == pytest.approx(5 * 10 / 14) for one in found["points"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"clock": "h100"}, "clock must be a SimulatedClock"),
        ({"acceptance": 1.5}, "acceptance must be a number from 0 to 1"),
        ({"acceptance": float("nan")}, "acceptance must be"),
        ({"batches": ()}, "batches must be whole numbers"),
        ({"batches": (0,)}, "batches must be whole numbers from 1"),
        ({"draft_lengths": ("quick",)}, "draft_length must be one of"),
        ({"max_new_tokens": 1}, "max_new_tokens must be whole numbers from 2"),
        ({"trials": 0}, "trials must be"),
        ({"context": -1}, "context must be"),
    ],
)
def test_bad_arguments_are_refused_in_a_sentence(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        predict_speedups(**({"clock": A100} | arguments))
