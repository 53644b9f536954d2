"""Every attention backend that runs on a CPU equals the float64 reference, also in captured steps.

A window over a tree counts positions, not columns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.backends import BACKENDS, flash
from kernels.plan import PREFIX_UNIT, AttentionPlan, SharedPart
from tests.support.models import slow_but

from .steps import HERE, HUGE, make_step, make_tree_step, problems

TORCH = [name for name in HERE if name != "fused"]
SOME = settings(max_examples=12, deadline=None, derandomize=True)
# (length, prefix length, prefix index). Prefixes are longer than the window after the gap, shorter, or empty.
LONG = [(600, 512, 0), (520, 512, 0), (90, 64, 1), (400, 0, 0)]


@pytest.mark.parametrize("backend", slow_but(TORCH, HERE))
@SOME
@given(
    problem=problems(),
    capture=st.booleans(),
    window=st.sampled_from([None, 1, 2, 7, 64]),
    softcap=st.sampled_from([None, 1.5, 30.0]),
    scaling=st.sampled_from([0.3, 1.0]),
)
def test_equals_the_reference(backend: str, problem: dict[str, Any], capture: bool, **options: Any) -> None:
    step = make_step(**problem)
    step.check(step.run_whole(BACKENDS[backend], **options), **options)
    step = step.captured() if capture and backend != "split" else step
    step.check(step.run(BACKENDS[backend], **options), **options)


@pytest.mark.parametrize("backend", TORCH)
@SOME
@given(
    problem=problems(trees=True),
    window=st.sampled_from([None, 1, 3, 40]),
    softcap=st.sampled_from([None, 1.5]),
)
def test_trees_equal_the_reference(backend: str, problem: dict[str, Any], **options: Any) -> None:
    step = make_tree_step(**problem)
    step.check(step.run(BACKENDS[backend], scaling=0.3, **options), scaling=0.3, **options)


@pytest.mark.slow
@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("backend", HERE)
def test_a_gap_in_long_rows_equals_the_reference(backend: str, capture: bool) -> None:
    step = make_step(LONG, 3, gap=100)
    step.check(step.run_whole(BACKENDS[backend], scaling=0.3), scaling=0.3)
    step = step.captured() if capture and backend != "split" else step
    step.check(step.run(BACKENDS[backend], scaling=0.3), scaling=0.3)


@pytest.mark.parametrize("backend", HERE)
def test_hidden_columns_never_change_a_bit(backend: str) -> None:
    """Hidden columns are past the end of a row (rejected drafts), of later queries, or before the window."""
    step, run = make_step([(9, 0, 0), (2, 0, 0), (5, 0, 0)], 3), BACKENDS[backend]
    for window in (None, 3):
        clean = step.run_whole(run, scaling=0.3, window=window)
        for s in range(3):
            key, value = (cache.clone() for cache in step.whole)
            for b, length in enumerate(step.plan.host):
                key[b, :, length + s + 1 :], value[b, :, length + s + 1 :] = 7.0, -HUGE
                if window is not None:
                    first = max(0, length + s + 1 - window)
                    key[b, :, :first], value[b, :, :first] = 7.0, HUGE
            changed = replace(step, whole=(key, value)).run_whole(run, scaling=0.3, window=window)
            assert torch.equal(changed[:, s], clean[:, s])


@pytest.mark.parametrize("backend", HERE)
def test_low_precision_and_mixed_dtypes_are_close_to_the_reference(backend: str) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        step = make_step(LONG[2:], 2, dtype=dtype)
        step.check(step.run(BACKENDS[backend], scaling=0.3), 0.02, scaling=0.3)
    step = make_step([(4, 0, 0), (0, 0, 0), (7, 0, 0)], 2)
    step = replace(step, query=step.query.bfloat16())
    step.check(step.run_whole(BACKENDS[backend], scaling=0.3), 0.02, scaling=0.3)


@pytest.mark.parametrize("backend", HERE)
def test_mismatched_arguments_are_refused(backend: str) -> None:
    step = make_step([(20, 16, 0)], 1)
    with pytest.raises(ValueError, match="both or neither"):
        BACKENDS[backend](step.query, *step.suffix, step.plan, scaling=0.3)
    plan = replace(step.plan, shared=None, _cached={})
    with pytest.raises(ValueError, match="both or neither"):
        BACKENDS[backend](step.query, *step.whole, plan, scaling=0.3, prefix=step.prefix)
    with pytest.raises(ValueError, match="choose another backend"):
        step.run(flash, scaling=0.3)


def test_a_plan_computes_window_starts_and_whether_it_needs_a_mask() -> None:
    """A gap ends at SINKS or a later multiple of 64. Rows of equal length after their prefix need no mask."""

    def plan(lengths: list[int], starts: list[int], groups: list[int], gap: int | None = None) -> AttentionPlan:
        part = SharedPart(torch.tensor(starts), torch.tensor(groups), starts, groups, max(starts))
        return AttentionPlan(torch.tensor(lengths), lengths, 1, shared=part, gap=gap)

    lengths = [300, 64, 150, 7]
    assert plan(lengths, [128, 64, 0, 0], [0] * 4).window_starts(100).tolist() == [192, 64, 64, 64]
    assert plan(lengths, [0] * 4, [0] * 4).window_starts(172).tolist() == [128, 64, 64, 64]
    assert plan(lengths, [0] * 4, [0] * 4).window_starts(173).tolist() == [64, 64, 64, 64]
    equal = [40, 24, 8], [32, PREFIX_UNIT, 0], [0, 1, 0]
    assert not plan(*equal).needs_mask and plan(*equal, gap=512).needs_mask
    assert AttentionPlan(torch.tensor(equal[0]), equal[0], 1).needs_mask
    # Rows are sorted by prefix, with those without one last.
    shared = plan([40] * 5, [0, 16, 32, 0, 16], [0, 2, 0, 3, 2]).shared
    assert shared is not None and shared.order.tolist() == [2, 1, 4, 0, 3]
