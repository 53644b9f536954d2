"""A step's plan says of each query which columns it sees, in the columns of its own row behind a shared prefix.

Contract: own column c of row b is the row's token starts[b] + c, and each of a plan's masks hides what the
definition hides: later tokens, those before a window, and those between the first and the last of a windowed step.
"""

from __future__ import annotations

import pytest
import torch

from kernels.plan import SHARE, SINKS, AttentionPlan, SharedPart

LENGTHS, STARTS, QUERIES = [300, 64, 150, 7], [128, 64, 0, 0], 3


def shared(starts: list[int], groups: list[int]) -> SharedPart:
    return SharedPart(torch.tensor(starts), torch.tensor(groups), starts, groups, max(starts))


def plan(starts: list[int] | None, gap: int | None = None) -> AttentionPlan:
    part = None if starts is None else shared(starts, [0] * len(starts))
    return AttentionPlan(torch.tensor(LENGTHS), LENGTHS, QUERIES, shared=part, gap=gap)


def sees(length: int, query: int, token: int, window: int | None, gap: int | None) -> bool:
    last = length + query
    skipped = gap is not None and SINKS <= token < max(SINKS, (length - gap) // 64 * 64)
    return token <= last and (window is None or token > last - window) and not skipped


@pytest.mark.parametrize("starts", [None, STARTS])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("gap", [None, 0, 70, 500])
def test_a_mask_hides_what_the_definition_hides(
    starts: list[int] | None, window: int | None, gap: int | None
) -> None:
    step, firsts = plan(starts, gap), starts or [0] * len(LENGTHS)
    own = [length - first for length, first in zip(LENGTHS, firsts, strict=True)]
    assert step.extent == max(own) + QUERIES and step.own_host == step.own_lengths.tolist() == own
    assert step.new_lengths.tolist() == [length + QUERIES for length in own]
    assert step.new_lengths.dtype == torch.int32
    expected = [
        [[not sees(length, s, first + c, window, gap) for c in range(step.extent)] for s in range(QUERIES)]
        for length, first in zip(LENGTHS, firsts, strict=True)
    ]
    assert step.mask(window).tolist() == expected
    bias = step.bias(window, 2, torch.float32, 3)
    assert bias.shape == (len(LENGTHS) * 3, 2 * QUERIES, step.extent)
    assert torch.equal(bias.isinf().view(len(LENGTHS), 6, QUERIES, -1)[:, 4], step.mask(window))


def test_positions_count_the_prefix() -> None:
    assert plan(STARTS).positions[:, 0].tolist() == LENGTHS


def test_where_the_window_starts() -> None:
    """At a multiple of 64, at SINKS or beyond; the window holds at least its tokens."""
    assert plan(STARTS).window_starts(100).tolist() == [192, 64, 64, 64]
    assert plan(None).window_starts(172).tolist() == [128, 64, 64, 64]
    assert plan(None).window_starts(173).tolist() == [64, 64, 64, 64]


def test_rows_of_the_same_own_length_need_no_mask() -> None:
    lengths, starts = [40, 24, 8], [32, SHARE, 0]
    part = shared(starts, [0, 1, 0])
    assert not AttentionPlan(torch.tensor(lengths), lengths, 1, shared=part).needs_mask
    assert AttentionPlan(torch.tensor(lengths), lengths, 1).needs_mask
    assert AttentionPlan(torch.tensor(lengths), lengths, 1, shared=part, gap=512).needs_mask


def test_rows_are_ordered_by_prefix_and_those_without_one_are_last() -> None:
    assert shared([0, 16, 32, 0, 16], [0, 2, 0, 3, 2]).order.tolist() == [2, 1, 4, 0, 3]


def test_a_captured_plan_knows_only_the_device_s_lengths() -> None:
    part = SharedPart(torch.tensor([16, 0]), torch.tensor([0, 0]), [], [], 64)
    step = AttentionPlan(torch.tensor([20, 9]), [], 2, captured_extent=32, shared=part)
    assert step.extent == 32 and step.needs_mask and step.own_host == []
    assert (~step.mask(None)).sum(-1).tolist() == [[5, 6], [10, 11]]
