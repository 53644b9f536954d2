"""What only the fused kernel has: columns split into parts, and blocks of query rows with their own causal end.

Contract: equal to the float64 reference for any number of parts. A block reads no column past the
last that one of its rows may attend to, and no tile before the first. A single part takes one launch, without a
merge.
"""

from __future__ import annotations

import pytest
import torch

from kernels.plan import AttentionPlan
from kernels.triton import attention as fused_attention
from tests.kernels.test_ragged_attention import reference, tensors


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("window", [None, 1, 20])
def test_a_prefill_in_blocks_and_parts(splits: int, window: int | None) -> None:
    """39 queries x 3 heads make eight blocks of query rows; the cache holds 0 and 70 tokens before them."""
    problem = {"lengths": [0, 70], "kv_heads": 1, "heads": 3, "queries": 39, "seed": 4}
    query, key, value, step = tensors(problem)
    out = fused_attention.fused(query, key, value, step, scaling=0.3, window=window, softcap=9.0, splits=splits)
    expected = reference(query, key, value, step.host, 0.3, window, 9.0)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_written_in_its_own_dtype(dtype: torch.dtype) -> None:
    """One part is written straight from its float32 sums; the result via two parts differs by one rounding."""
    problem = {"lengths": [3, 90], "kv_heads": 1, "heads": 4, "queries": 20, "seed": 5}
    query, key, value, step = tensors(problem)
    query, key, value = query.to(dtype), key.clamp(-9, 9).to(dtype), value.clamp(-9, 9).to(dtype)
    whole, parts = (
        fused_attention.fused(query, key, value, step, scaling=0.3, splits=splits) for splits in (1, 2)
    )
    assert whole.dtype == dtype
    torch.testing.assert_close(whole, parts, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("splits", [1, 3])
def test_no_block_visits_what_none_of_its_rows_sees(splits: int) -> None:
    """A NaN value reaches every block that reads it, since 0 x NaN is NaN.

    One head with 64 queries makes four blocks of 16 rows. A block reads columns 32 at a time, from the tile that
    holds the first visible one.
    """
    torch.manual_seed(6)
    query, key, value = torch.randn(1, 1, 64, 16), *torch.randn(2, 1, 1, 164, 16)
    step = AttentionPlan(torch.tensor([100]), [100], 64)
    clean = fused_attention.fused(query, key, value, step, scaling=0.3, splits=splits)
    value[0, 0, 116:] = torch.nan
    out = fused_attention.fused(query, key, value, step, scaling=0.3, splits=splits)
    assert torch.allclose(out[0, :16], clean[0, :16]) and out[0, 16:].isnan().any()
    value[0, 0, 116:], value[0, 0, :96] = 0.0, torch.nan
    # With a window of 20, row 48 sees columns 129..148: its block starts at column 128.
    out = fused_attention.fused(query, key, value, step, scaling=0.3, splits=splits, window=20)
    assert out[0, 48:].isfinite().all() and out[0, :16].isnan().any()


def test_one_part_takes_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_attention, "merge", None)
    query, key, value, step = tensors({"lengths": [9], "kv_heads": 1, "heads": 2, "queries": 3, "seed": 7})
    fused_attention.fused(query, key, value, step, scaling=0.3, splits=1)
    with pytest.raises(TypeError):
        fused_attention.fused(query, key, value, step, scaling=0.3, splits=2)
