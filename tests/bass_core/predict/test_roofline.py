"""Step times follow from bytes and FLOPs, and shapes have the sizes that they are named for.

Contract: nothing here reads a clock.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bass_core.machine.hardware import dense_peak
from bass_core.predict.hardware import HARDWARE, Assumptions
from bass_core.predict.roofline import Roofline
from bass_core.predict.shapes import MODELS, shape, shapes

PERFECT = Assumptions(1.0, 1.0, 1.0, 0.0, 0.0)


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


@pytest.mark.parametrize("name", HARDWARE)
def test_a_roofline_is_bytes_or_flops(name):
    hardware, (target, draft) = HARDWARE[name], shapes("7.8B")
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
