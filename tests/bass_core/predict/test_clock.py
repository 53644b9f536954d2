"""What a simulated clock takes, what it refuses, and what it says of itself.

Contract: no model runs here.
"""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest

from bass_core import HARDWARE, PAIRS, Assumptions, CostTable, Hardware, ModelSize, RequestError, SimulatedClock
from bass_core.predict.roofline import Roofline
from bass_core.predict.shapes import shape, shapes

OWN = Hardware("mine", bandwidth=500.0, flops=50e12, memory=48.0)
TABLE = CostTable({1: [(1.0, 10.0), (9.0, 18.0)]}, {1: 1.0}, padded=False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"hardware": "h800"},
            "hardware must be one of a100, h100, h200, b200, laptop, or a Hardware of your own",
        ),
        (
            {"target": "9b"},
            "target must be one of 7.8b, 310m, 1.7b, 135m, 70b, 8b, 1b, or a ModelSize of your own",
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


@pytest.mark.parametrize("name", HARDWARE)
def test_names_stand_for_the_tables_of_bench_simulate(name):
    for target, draft in {"7.8B": "310M", "1.7B": "135M"}.items():
        assert PAIRS[target] == draft
        clock = SimulatedClock(name.lower(), target=target.lower(), draft=draft).fitted(4, 600)
        assert clock.costs(512) == Roofline(HARDWARE[name], *shapes(target), 512)


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


def test_own_hardware_reaches_what_is_assumed():
    perfect = Assumptions(1.0, 1.0, 1.0, 0.0, 0.0)
    clock = SimulatedClock(OWN, target=ModelSize(1e9), draft=ModelSize(1e8), assumed=perfect)
    assert clock.costs(0).verify_ms(1, 1) == pytest.approx(1000 * 2e9 / 500e9, rel=1e-3)
    slower = replace(clock, assumed=replace(perfect, bandwidth=0.5))
    assert slower.costs(0).verify_ms(1, 1) == pytest.approx(2 * clock.costs(0).verify_ms(1, 1))


@pytest.mark.parametrize(
    "clock", [SimulatedClock("laptop").fitted(1, 50), SimulatedClock(OWN), SimulatedClock(TABLE)]
)
def test_it_crosses_processes_and_says_what_it_is(clock):
    assert pickle.loads(pickle.dumps(clock)) == clock
    record = json.loads(json.dumps(clock.record()))
    assert record["kind"] == "predicted" and record.keys() == {
        "kind", "hardware", "gpus", "target", "draft", "assumptions", "source",
    }  # fmt: skip


def test_the_record_of_a_gpu_and_of_a_table():
    record = SimulatedClock("h100", assumed=Assumptions(bandwidth=0.7)).fitted(1, 50).record()
    assert (record["hardware"], record["gpus"], record["target"], record["draft"]) == ("H100", 1, "7.8B", "310M")
    assert record["assumptions"] == {
        "bandwidth": 0.7, "compute": 0.6, "link": 0.7, "layer_us": 5.0, "allreduce_us": 10.0,
    }  # fmt: skip
    assert record["source"].startswith("datasheet: NVIDIA H100")
    measured = SimulatedClock(TABLE)
    assert measured.costs(10) is measured.costs(1000) is TABLE and measured.fitted(100, 10**6) is measured
    assert measured.record()["hardware"] == "this machine" and measured.record()["assumptions"] == {}
