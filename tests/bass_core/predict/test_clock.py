"""Another machine's clock: what it takes and refuses, the roofline behind it, and rounds and speed-ups on paper.

Contract: nothing here reads a clock.
"""

from __future__ import annotations

import json
import pickle
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bass_core import (
    HARDWARE,
    PAIRS,
    Assumptions,
    CostTable,
    Hardware,
    ModelPair,
    ModelSize,
    RequestError,
    SimulatedClock,
    predict_speedups,
    stream,
)
from bass_core.length.cost_aware import CostAware
from bass_core.length.options import make_policy
from bass_core.machine.hardware import dense_peak
from bass_core.predict.roofline import Roofline
from bass_core.predict.rounds import Acceptance, predict, rounds
from bass_core.predict.shapes import MODELS, shape, shapes
from tests.support.models import tiny_pair

PERFECT = Assumptions(1.0, 1.0, 1.0, 0.0, 0.0)
TABLE = CostTable({1: [(1.0, 10.0), (9.0, 18.0)], 4: [(4.0, 12.0), (36.0, 60.0)]}, {1: 1.0, 4: 2.0}, padded=False)
OWN = Hardware("mine", bandwidth=500.0, flops=50e12, memory=48.0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"hardware": "h800"},
            "hardware must be one of a100, h100, h200, b200, laptop, or your own Hardware",
        ),
        (
            {"target": "9b"},
            "target must be one of 7.8b, 310m, 1.7b, 135m, 70b, 8b, 1b, or your own ModelSize",
        ),
        ({"draft": 310}, "draft must be one of"),
        ({"hardware": replace(OWN, bandwidth=0)}, "bandwidth of hardware must be a number above 0; got 0"),
        ({"hardware": replace(OWN, flops=float("nan"))}, "flops of hardware must be a number above 0"),
        ({"hardware": replace(OWN, nvlink=-1.0)}, "nvlink of hardware must be a number 0 or more"),
        ({"target": ModelSize(-1)}, "parameters of target must be a number above 0"),
        ({"draft": ModelSize(1e9, layers=0)}, "layers of draft must be a number above 0"),
        ({"assumed": {"bandwidth": 0.5}}, "assumed must be Assumptions"),
        ({"assumed": Assumptions(bandwidth=1.5)}, "bandwidth of assumed must be at most 1"),
        ({"gpus": 3}, "gpus must be None or one of 1, 2, 4, 8; got 3"),
        ({"hardware": "laptop", "gpus": 2}, "RTX 5090 Laptop has no link to others of its kind"),
        ({"hardware": "laptop", "target": "70b"}, "70B and 310M do not fit 1 x RTX 5090 Laptop of 24 GB"),
        ({"target": ModelSize(1e12)}, "1e\\+03B and 310M do not fit 8 x H100 of 80 GB"),
    ],
)
def test_what_it_cannot_be_is_refused_in_one_sentence(given, said):
    with pytest.raises(RequestError, match=said) as refused:
        SimulatedClock(**given)
    assert str(refused.value).count(". ") == 0 and str(refused.value).endswith(".")


def test_names_stand_for_the_tables() -> None:
    assert PAIRS["7.8B"] == "310M" and PAIRS["1.7B"] == "135M"
    for name in HARDWARE:
        clock = SimulatedClock(name.lower(), target="1.7b", draft="135m").fitted(4, 600)
        assert clock.costs(512) == Roofline(HARDWARE[name], *shapes("1.7B"), 512)


def test_it_takes_the_fewest_gpus_that_hold_models_and_texts():
    large = SimulatedClock("a100", target="70b", draft="8b")
    assert large.gpus is None and large.fitted(8, 1000).gpus == 4
    assert SimulatedClock("b200", target="70b", draft="8b").fitted(1, 100).gpus == 1
    # 8 rows of 100,000 tokens of 131,072 bytes are 105 GB.
    assert [SimulatedClock("a100").fitted(*asked).gpus for asked in ((8, 100), (8, 100_000))] == [1, 2]
    with pytest.raises(RequestError, match="with 8 rows of 100000 tokens do not fit 1 x A100 of 80 GB"):
        SimulatedClock("a100", gpus=1).fitted(8, 100_000)
    wide = large.fitted(8, 1000)
    assert wide.costs(512).gpus == 4 and wide.peaks.flops == 4 * HARDWARE["A100"].flops


def test_a_size_of_ones_own_needs_parameters_alone():
    """7.8B parameters in a guessed shape are as fast as in ours to within a tenth."""
    guessed, ours = ModelSize(7.8e9).shape(), shape("7.8B")
    assert guessed.name == "7.8B" and guessed.cost.weight_bytes == 15.6e9
    assert guessed.layers == 34 and guessed.cost.kv_bytes == 2 * 34 * 8 * 128 * 2
    own = SimulatedClock("h100", target=ModelSize(7.8e9)).costs(512)
    assert own.verify_ms(8, 40) == pytest.approx(SimulatedClock("h100").costs(512).verify_ms(8, 40), rel=0.1)
    small = ModelSize(7.8e9, bytes_per_weight=0.5, layers=32, kv_bytes=1000, name="int4").shape()
    assert (small.name, small.layers, small.cost.kv_bytes) == ("int4", 32, 1000)
    assert (
        small.held_bytes == small.cost.weight_bytes == 3.9e9
        and small.parameters == ours.parameters // 10**7 * 10**7 + 10**7
    )
    assert ModelSize(0.31e9).shape().name == "310M"


def test_it_crosses_processes_and_says_what_it_is() -> None:
    keys = {"kind", "hardware", "gpus", "target", "draft", "assumptions", "source"}
    for clock in (SimulatedClock("laptop").fitted(1, 50), SimulatedClock(OWN), SimulatedClock(TABLE)):
        assert pickle.loads(pickle.dumps(clock)) == clock
        record = json.loads(json.dumps(clock.record()))
        assert record["kind"] == "predicted" and record.keys() == keys
    record = SimulatedClock("h100", assumed=Assumptions(bandwidth=0.7)).fitted(1, 50).record()
    assert (record["hardware"], record["gpus"], record["target"], record["draft"]) == ("H100", 1, "7.8B", "310M")
    assert record["assumptions"] == {
        "bandwidth": 0.7, "compute": 0.6, "link": 0.7, "layer_us": 5.0, "allreduce_us": 10.0,
    }  # fmt: skip
    assert record["source"].startswith("datasheet: NVIDIA H100")
    measured = SimulatedClock(TABLE)
    assert measured.costs(10) is measured.costs(1000) is TABLE and measured.fitted(100, 10**6) is measured
    assert measured.record()["hardware"] == "this machine" and measured.record()["assumptions"] == {}


SIZES = {"7.8B": 7.79, "310M": 0.3086, "1.7B": 1.711, "135M": 0.1345, "70B": 70.55, "8B": 8.03, "1B": 1.236}


def test_shapes_have_the_sizes_of_their_names():
    assert {name: shape(name).parameters / 1e9 for name in MODELS} == pytest.approx(SIZES, rel=1e-3)
    target, draft = shapes("7.8B")
    assert (target.name, draft.name) == ("7.8B", "310M") and target.cost.kv_bytes == 2 * 32 * 8 * 128 * 2
    small, tied = shapes("1.7B")
    assert small.cost.kv_bytes == 2 * 24 * 32 * 64 * 2 and tied.cost.parameters == tied.parameters


def test_a_laptops_gpu_is_no_desktops():
    """16 sparse FP4 operations stand for one dense bfloat16 FLOP on both; alone, for there is no NVLink."""
    laptop, target, draft = HARDWARE["laptop"], *shapes("1.7B")
    assert laptop.flops == 1824e12 / 16
    assert dense_peak("NVIDIA GeForce RTX 5090", torch.bfloat16) == pytest.approx(3352e12 / 16)
    assert dense_peak("NVIDIA GeForce RTX 5090 Laptop GPU", torch.bfloat16) == laptop.flops
    costs = Roofline(laptop, target, draft, context=512)
    assert costs.fits(8) and not replace(costs, gpus=2).fits(8)
    assert not costs.windowed(1024).fits(512) and not replace(costs, gpus=2).windowed(1024).fits(8)


def test_a_roofline_is_bytes_or_flops():
    for hardware in HARDWARE.values():
        target, draft = shapes("7.8B")
        costs = Roofline(hardware, target, draft, context=0, assumed=PERFECT)
        read = 1000 * (target.cost.weight_bytes + target.cost.kv_bytes) / (hardware.bandwidth * 1e9)
        assert costs.verify_ms(1, 1) == pytest.approx(read, rel=1e-6)
        flops = 2 * target.cost.parameters * 4096 / hardware.flops * 1000
        assert costs.verify_ms(4096, 4096) == pytest.approx(flops, rel=0.1)
        assert replace(costs, assumed=replace(PERFECT, bandwidth=0.5)).verify_ms(1, 1) == pytest.approx(2 * read)
        longer = replace(costs, context=10_000).verify_ms(8, 8) - costs.verify_ms(8, 8)
        assert longer == pytest.approx(1000 * 8 * 10_000 * target.cost.kv_bytes / (hardware.bandwidth * 1e9))
        assert hardware.source.startswith("datasheet: NVIDIA")


def test_a_roofline_over_several_gpus():
    target, draft = shapes("70B")
    one = Roofline(HARDWARE["B200"], target, draft, context=512, assumed=PERFECT)
    two, eight = replace(one, gpus=2), replace(one, gpus=8)
    reduce = 2 * 80 * (2 * (1 / 2) * 2 * 8 * 8192) / (1800e9 / 2) * 1000
    assert two.verify_ms(8, 8) == pytest.approx(one.verify_ms(8, 8) / 2 + reduce)
    assert eight.draft_ms(8) <= one.draft_ms(8)
    slow = replace(eight, assumed=replace(PERFECT, allreduce_us=1000.0))
    assert slow.verify_ms(8, 8) == pytest.approx(eight.verify_ms(8, 8) + 160)
    assert slow.draft_ms(8) == one.draft_ms(8)
    a100 = replace(one, hardware=HARDWARE["A100"])
    assert [replace(a100, gpus=n).fits(8) for n in (1, 2, 4)] == [False, False, True]


# Drafting pays here whatever the draft has to read, of which the rounds on paper know nothing.
CHEAP = CostTable({1: [(1.0, 10.0), (9.0, 10.5)], 4: [(4.0, 12.0), (36.0, 13.0)]}, {1: 0.1, 4: 0.1}, padded=False)


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return tiny_pair(0.05)


class Replay:
    """An acceptance model that replays recorded counts of accepted drafts for each row."""

    def __init__(self, counts):
        self.counts = {row: deque(mine) for row, mine in counts.items()}

    def draw(self, rng, rows, drafted):
        return [self.counts[row].popleft() for row in rows]


@pytest.mark.parametrize("policy", ["bass", 3, CostAware(CHEAP, timed=False)])
def test_rounds_are_those_of_the_decoder(pair, policy):
    """Given the decoder's accepted counts, the simulator asks for the same draft lengths and drafts as much."""
    prompts = [[1, 2, 3], [7, 5], [11, 3, 9, 4], [2]]
    asked = dict(draft_length=policy, drafter="model", max_new_tokens=24, eos_token_id=None)
    real = [one for one in stream(pair, prompts, **asked) if one.kind != "prefill"]
    counts = {row: [r.accepted for one in real for r in one.rows if r.sequence == row] for row in range(4)}
    played = list(rounds(make_policy(policy), Replay(counts), 4, 23, np.random.default_rng(0)))
    assert [one.draft_length for one in real] == [one.asked for one in played]
    assert [{r.sequence: len(r.drafted) for r in one.rows} for one in real] == [
        dict(zip(one.rows, one.drafted, strict=True)) for one in played
    ]
    assert len({tuple(mine) for mine in counts.values()}) > 1


def test_a_prediction_of_plain_steps_and_of_a_perfect_draft():
    plain = predict(TABLE, make_policy(0), Acceptance.same(0.5), 4, 11, trials=1)
    assert plain.ptl_first_ms == plain.ptl_all_ms == plain.ptl_last_ms == pytest.approx(12.0)
    assert plain.ms_per_token == pytest.approx(12.0)
    assert plain.throughput_tps == pytest.approx(1000 * 4 * 11 / (12.0 * 10))
    perfect = predict(TABLE, make_policy(4), Acceptance.same(1.0), 1, 11, trials=1)
    assert perfect.rounds == 2 and perfect.mean_acceptance_length == 5
    assert perfect.ptl_all_ms == pytest.approx(2 * (14.0 + 4 * 1.0) / 10)
    rates = Acceptance(np.array([[0.95], [0.2]]))
    made = predict(TABLE, make_policy(4), rates, 2, 40)
    assert made.ptl_first_ms < made.ptl_all_ms < made.ptl_last_ms
    assert made == predict(TABLE, make_policy(4), rates, 2, 40)


A100 = SimulatedClock("A100")
SMALL: dict[str, Any] = {"batches": (1, 8), "max_new_tokens": 24, "trials": 2}


def test_the_figures_are_plain_data_that_names_its_assumptions() -> None:
    found, cost = predict_speedups(SimulatedClock("h100"), **SMALL), shapes("7.8B")[0].cost
    assert json.loads(json.dumps(found)) == found
    assert found["clock"] == SimulatedClock("h100", gpus=1).record()
    assert found["clock"]["assumptions"] == vars(Assumptions()) and "H100 SXM" in found["clock"]["source"]
    assert [(one["batch"], one["draft_length"]) for one in found["points"]] == [
        (batch, length) for batch in (1, 8) for length in ("bass", "auto", 4)
    ]
    for one in found["points"]:
        assert one["speedup"] == pytest.approx(one["regular_ms_per_token"] / one["ms_per_token"])
    assert found == predict_speedups(SimulatedClock("H100", "7.8b"), **SMALL), "the same arguments, other figures"
    read_s = (cost.weight_bytes + 512 * cost.kv_bytes) / (
        Assumptions().bandwidth * HARDWARE["H100"].bandwidth * 1e9
    )
    flops = 2 * cost.parameters + 512 * cost.attention_flops
    token_s = flops / (Assumptions().compute * HARDWARE["H100"].flops)
    assert found["ridge_tokens"] == pytest.approx(read_s / token_s, rel=0.01)


def test_without_drafts_nothing_is_won_and_with_hopeless_ones_time_is_lost() -> None:
    plain = predict_speedups(A100, draft_lengths=(0,), **SMALL)
    assert all(one["speedup"] == 1 and one["error"] == 0 for one in plain["points"])
    lost = predict_speedups(A100, acceptance=0, draft_lengths=(4,), **SMALL)
    assert all(one["tokens"] == 1 and one["speedup"] < 1 for one in lost["points"])
    won = predict_speedups(A100, acceptance=1, draft_lengths=(4,), **SMALL)
    # 23 tokens behind the prefill's: four rounds of 5, and one that ends short with the last 3.
    assert all(one["rounds"] == 5 and one["tokens"] == pytest.approx(23 / 5) for one in won["points"])


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


def test_bad_arguments_are_refused_in_a_sentence() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"clock": "h100"}, "clock must be a SimulatedClock"),
        ({"acceptance": 1.5}, "acceptance must be a number from 0 to 1"),
        ({"acceptance": float("nan")}, "acceptance must be"),
        ({"batches": ()}, "batches must be whole numbers"),
        ({"batches": (0,)}, "batches must be whole numbers from 1"),
        ({"draft_lengths": ("quick",)}, "draft_length must be one of"),
        ({"max_new_tokens": 1}, "max_new_tokens must be whole numbers from 2"),
        ({"trials": 0}, "trials must be"),
        ({"context": -1}, "context must be"),
    ]
    for arguments, says in refused:
        with pytest.raises(RequestError, match=says):
            predict_speedups(**({"clock": A100} | arguments))
