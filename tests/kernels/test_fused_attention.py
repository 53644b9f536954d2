"""What only the fused kernel has: columns in segments, blocks of query rows with their own causal end, and bits.

Contract: equal to the float64 reference with segments joined in a program or by a further launch. A row's result
has the same bits whatever is stored in a prefix, whichever rows stand beside it and however many launches there
are. A block reads no column past the last that one of its rows may attend to, and no tile before the first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import TensorHandle, interpreter_builder

from kernels.plan import AttentionPlan
from kernels.triton import attention as fused_attention
from kernels.triton.attention import fused
from tests.kernels.test_ragged_attention import reference, tensors
from tests.kernels.test_shared_prefix import Step, captured, make


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few hundred columns make several."""
    monkeypatch.setattr(fused_attention, "SEGMENT", 64)
    monkeypatch.setattr(fused_attention, "UNROLLED", 2)


@pytest.fixture
def exact_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products whose sums have the same order in every row, as on a GPU; numpy's depend on the row's place."""

    def dot(a: Any, b: Any, d: Any, *_: Any) -> TensorHandle:
        sums = d.data.copy()
        for column, row in zip(a.data.T.astype(np.float32), b.data.astype(np.float32), strict=True):
            sums += column[:, None] * row
        return TensorHandle(sums, d.dtype.scalar)

    monkeypatch.setattr(interpreter_builder, "create_dot", dot)


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("window", [None, 1, 20])
def test_a_prefill_in_blocks_and_parts(parts: bool, window: int | None) -> None:
    """39 queries x 3 heads make eight blocks of query rows; the cache holds 0 and 70 tokens before them."""
    problem = {"lengths": [0, 70], "kv_heads": 1, "heads": 3, "queries": 39, "seed": 4}
    query, key, value, step = tensors(problem)
    out = fused(query, key, value, step, scaling=0.3, window=window, softcap=9.0, parts=parts)
    expected = reference(query, key, value, step.host, 0.3, window, 9.0)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


# (length, start, group). Segments lie in a prefix, in a row and across the end of a prefix; a row ends with one.
ROWS = [(300, 208, 0), (210, 208, 0), (90, 64, 2), (190, 0, 0), (5, 0, 1)]


def alone(step: Step, row: int) -> Step:
    """One row of the step; its own prefix is the only one."""
    shared, one = step.plan.shared, slice(row, row + 1)
    assert shared is not None
    start, group = shared.host_starts[row], shared.host_groups[row]
    part = replace(
        shared, starts=shared.starts[one], groups=torch.tensor([0]), host_starts=[start], host_groups=[0],
        extent=start, _order=None,
    )  # fmt: skip
    lengths = {"lengths": step.plan.lengths[one], "host": step.plan.host[one]}
    own, whole = ((keys[one], values[one]) for keys, values in (step.own, step.whole))
    prefix = tuple(kept[group : group + 1] for kept in step.prefix)
    plan = replace(step.plan, **lengths, shared=part, _made={})
    return Step(step.query[one], own, prefix, whole, plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masks", [{}, {"window": 100}, {"gap": 20}, {"gap": 20, "window": 250, "softcap": 2.0}])
@pytest.mark.usefixtures("exact_order")
def test_the_bits_of_a_row_depend_on_that_row_alone(dtype: torch.dtype, masks: dict) -> None:
    step = make(ROWS, 3, heads=(6, 2), dim=20, gap=masks.get("gap"), dtype=dtype)
    given = {"scaling": 0.2, **{name: masks[name] for name in masks if name != "gap"}}
    out = step.run(fused, parts=True, **given)
    for other in (step.run(fused, parts=False, **given), captured(step).run(fused, **given)):
        assert torch.equal(other, out)
    for parts in (False, True):
        assert torch.equal(step.run_whole(fused, parts=parts, **given), out)
    for row in (1, 2):
        assert torch.equal(alone(step, row).run(fused, **given)[0], out[row])
        assert torch.equal(alone(step, row).run_whole(fused, **given)[0], out[row])


@pytest.mark.usefixtures("exact_order")
def test_the_bits_of_a_query_are_the_same_in_a_longer_step() -> None:
    step = make(ROWS, 3, heads=(6, 2), dim=20)
    out = step.run(fused, parts=True, scaling=0.2)
    lengths = [length + 2 for length in step.plan.host]
    plan = replace(step.plan, lengths=torch.tensor(lengths), host=lengths, queries=1, _made={})
    last = replace(step, query=step.query[:, :, 2:], plan=plan)
    assert torch.equal(last.run(fused, scaling=0.2)[:, 0], out[:, 2])


@pytest.mark.usefixtures("exact_order")
def test_a_block_serves_rows_of_several_prefixes() -> None:
    """A block of 16 query rows holds eight rows of four prefixes, one of which no row of it reads whole."""
    rows = [(130 + row, (128, 64, 16, 192)[row % 4], (3, 0, 4, 1)[row % 4]) for row in range(8)]
    rows = [(max(length, start), start, group) for length, start, group in rows]
    step = make(rows, 1, heads=(2, 1))
    out = step.run(fused, parts=True, scaling=0.3)
    assert torch.equal(out, step.run_whole(fused, parts=True, scaling=0.3))


def test_a_prefix_whose_scores_all_overflow_weighs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scores are -inf, and memory that was not written would be NaN."""
    step = make([(70, 64, 0), (66, 64, 0)], 1, spare=0)
    step.query.fill_(1e25)
    step.own[0].zero_()
    step.prefix[0].fill_(-1e25)
    step.whole[0].zero_()[:, :, :64] = -1e25
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: torch.full(shape, torch.nan, **options))
    out = step.run(fused, parts=True, scaling=1.0)
    assert out.isfinite().all() and torch.equal(out, step.run_whole(fused, parts=True, scaling=1.0))


def test_a_gap_is_not_visited() -> None:
    """A NaN value reaches every block that reads it, since 0 x NaN is NaN."""
    step = make([(500, 320, 0), (400, 0, 0)], 2, gap=100)
    clean = step.run(fused, scaling=0.3)
    assert step.plan.window_starts(100).tolist() == [384, 256]
    step.prefix[1][0, :, 64:320] = torch.nan
    step.own[1][0, :, : 384 - 320] = torch.nan
    step.own[1][1, :, 64:256] = torch.nan
    assert torch.equal(step.run(fused, scaling=0.3), clean)
    step.own[1][1, :, 256] = torch.nan
    assert step.run(fused, scaling=0.3)[1].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_written_in_its_own_dtype(dtype: torch.dtype) -> None:
    """The result is written straight from float32 sums, in one launch or two."""
    problem = {"lengths": [3, 90], "kv_heads": 1, "heads": 4, "queries": 20, "seed": 5}
    query, key, value, step = tensors(problem)
    query, key, value = query.to(dtype), key.clamp(-9, 9).to(dtype), value.clamp(-9, 9).to(dtype)
    whole, parts = (fused(query, key, value, step, scaling=0.3, parts=parts) for parts in (False, True))
    assert whole.dtype == dtype and torch.equal(whole, parts)


@pytest.mark.parametrize("parts", [False, True])
def test_no_block_visits_what_none_of_its_rows_sees(parts: bool) -> None:
    """A NaN value reaches every block that reads it, since 0 x NaN is NaN.

    One head with 64 queries makes four blocks of 16 rows. A block reads columns 32 at a time, from the tile that
    holds the first visible one.
    """
    torch.manual_seed(6)
    query, key, value = torch.randn(1, 1, 64, 16), *torch.randn(2, 1, 1, 164, 16)
    step = AttentionPlan(torch.tensor([100]), [100], 64)
    clean = fused(query, key, value, step, scaling=0.3, parts=parts)
    value[0, 0, 116:] = torch.nan
    out = fused(query, key, value, step, scaling=0.3, parts=parts)
    assert torch.equal(out[0, :16], clean[0, :16]) and out[0, 16:].isnan().any()
    value[0, 0, 116:], value[0, 0, :96] = 0.0, torch.nan
    # With a window of 20, row 48 sees columns 129..148: its block starts at column 128.
    out = fused(query, key, value, step, scaling=0.3, parts=parts, window=20)
    assert out[0, 48:].isfinite().all() and out[0, :16].isnan().any()


def test_one_segment_takes_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_attention, "merge", None)
    query, key, value, step = tensors({"lengths": [61], "kv_heads": 1, "heads": 2, "queries": 3, "seed": 7})
    fused(query, key, value, step, scaling=0.3)
    query, key, value, step = tensors({"lengths": [62], "kv_heads": 1, "heads": 2, "queries": 3, "seed": 7})
    with pytest.raises(TypeError):
        fused(query, key, value, step, scaling=0.3)


def test_where_the_rows_fill_the_device_one_launch_is_enough() -> None:
    """On a CPU, four multiprocessors are assumed: 12 programs fill it."""
    device = torch.device("cpu")
    assert fused_attention.in_parts(device, programs=11, rows=12, segments=2, shares=False)
    assert not fused_attention.in_parts(device, programs=12, rows=12, segments=2, shares=False)
    assert fused_attention.in_parts(device, programs=12, rows=12, segments=2, shares=True)
    assert not fused_attention.in_parts(device, programs=1, rows=257, segments=2, shares=True)
