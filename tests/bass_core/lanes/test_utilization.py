"""Peak rates by GPU name, and the FLOPs and bytes behind the utilization figures, counted by hand."""

from __future__ import annotations

import pytest
import torch

from bass_core.decode.request import make_request
from bass_core.lanes.lane import Lane
from bass_core.lanes.utilization import Work
from bass_core.machine.hardware import Peaks, dense_peak
from bass_core.model.base import CausalModel
from bass_core.model.weights.cost import ModelCost
from bass_core.sequence import Round, RowRound, Sequence
from tests.support.models import prompts, tiny, tiny_pair


def test_peak_flops_by_gpu_name() -> None:
    for name, teraflops in (
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA A10G", 70.0),
        ("Tesla T4", 65.0),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 503.8),
        ("NVIDIA L40", None),
        ("Some CPU", None),
    ):
        assert dense_peak(name, torch.bfloat16) == (None if teraflops is None else pytest.approx(1e12 * teraflops))
    # The A100 of the paper.
    assert dense_peak("NVIDIA A100-SXM4-80GB", torch.float32) == pytest.approx(19.5e12)


def test_flops_and_bytes_of_a_round() -> None:
    """A row of 10 tokens drafts 3 and writes 2; another of 4 tokens drafts 1 and writes 2."""
    target, draft = ModelCost(100, 200, 8, 5), ModelCost(10, 20, 2, 1)
    sequences = [Sequence(i, i, [1] * n, 9, frozenset()) for i, n in enumerate((10, 4))]
    rows = []
    for index, drafted in ((0, 3), (1, 1)):
        sequences[index].write([1, 1], ["accepted", "recovered"])
        zeros = [0.0] * drafted
        rows.append(RowRound(index, [1] * drafted, zeros, zeros, zeros, 1, [1, 1], ["", ""], None))
    work = Work(target, draft)
    work.add(Round("prefill"), sequences)
    assert work.flops == 0
    work.add(Round("verify", 3, rows, draft_forwards=3, draft_tokens=4), sequences)
    # In the target's attention, the 4 queries of one row read 11 + 12 + 13 + 14 columns, and the 2 of the other
    # read 5 + 6. The draft's attention is counted as 2 rows of the mean length, 7 tokens: in each, 2 queries read
    # 8 + 9 columns.
    assert work.flops == 2 * 100 * 6 + 5 * (50 + 11) + 2 * 10 * 4 + 2 * (8 + 9)
    assert work.useful_flops == 2 * 100 * 4 + 5 * (23 + 11)
    # The target's weights are read once and the draft's three times; the target's keys and values once, and the
    # draft's for each token.
    assert work.bytes_read == 200 + 3 * 20 + 8 * (13 + 5) + 2 * 2 * (7 + 8)


@pytest.mark.parametrize(("drawn", "forwards"), [(0, 0), (9, 3)])
def test_the_draft_model_is_billed_for_the_tokens_that_it_drew(drawn: int, forwards: int) -> None:
    """A row of 10 tokens gets 4 drafts. Copying costs nothing; every drawn token costs, even if thrown away."""
    target, draft = ModelCost(0, 0, 0, 0), ModelCost(10, 20, 2, 1)
    sequence = Sequence(0, 0, [1] * 10, 9, frozenset())
    sequence.write([1], ["recovered"])
    row = RowRound(0, [1] * 4, [0.0] * 4, [0.0] * 4, [0.0] * 4, 0, [1], ["recovered"], None)
    work = Work(target, draft)
    work.add(Round("verify", 4, [row], draft_forwards=forwards, draft_tokens=drawn), [sequence])
    assert work.flops == 2 * 10 * drawn + sum(10 + i for i in range(1, drawn + 1))
    # Nine tokens drawn for one row cost nine forwards, whatever `draft_forwards` is.
    assert work.bytes_read == drawn * 20 + 2 * sum(10 + i for i in range(drawn))


def test_shares_of_the_peaks() -> None:
    """A lane's 300 FLOPs (120 useful) and 50 bytes in 2 s are given as shares of the peaks, None if unknown."""
    work = Work(ModelCost(0, 0, 0, 0), None, Peaks(bandwidth=100.0, flops=1000.0), 300.0, 120.0, 50.0)
    names = ("flops_utilization", "useful_flops_utilization", "bandwidth_utilization")
    assert work.utilization(2000.0) == dict(zip(names, (0.15, 0.06, 0.25), strict=True))
    assert work.utilization(0.0) == dict.fromkeys(names)
    work.peaks = Peaks(bandwidth=100.0)
    assert work.utilization(2000.0) == {**dict.fromkeys(names), "bandwidth_utilization": 0.25}
    work.peaks = Peaks(flops=1000.0)
    assert work.utilization(2000.0)["bandwidth_utilization"] is None


def test_a_lane_counts_its_work() -> None:
    model = tiny("llama")
    pair = tiny_pair(0.02, target=model)
    lane = Lane(pair, make_request(pair, prompts(2), max_new_tokens=6, draft_length=2), "bass")
    while not lane.finished:
        lane.step()
    metrics = lane.metrics()
    # The tests measure nothing (BASS_MEASURE=0).
    assert metrics.flops_utilization is None and metrics.bandwidth_utilization is None
    assert lane.work.flops > lane.work.useful_flops > 0 and lane.work.bytes_read > 0
    cost = CausalModel(model).cost
    assert (
        cost.parameters == sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    )
    assert cost.weight_bytes == 4 * cost.parameters and cost.kv_bytes == 2 * 2 * 2 * 16 * 4
