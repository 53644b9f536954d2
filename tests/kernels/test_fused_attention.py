"""What only the fused kernel has: columns in parts, blocks of query rows, each with a causal end of its own.

Contract: equal to the float64 reference at any number of parts; no block reads behind the last token that one of
its rows may see, nor before the first; a single part is written in one launch.
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
    """39 queries x 3 heads are eight blocks of rows; rows of 0 and 70 tokens before them."""
    problem = {"lengths": [0, 70], "kv_heads": 1, "heads": 3, "queries": 39, "seed": 4}
    query, key, value, step = tensors(problem)
    out = fused_attention.fused(query, key, value, step, scaling=0.3, window=window, softcap=9.0, splits=splits)
    expected = reference(query, key, value, step.host, 0.3, window, 9.0)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_written_in_its_own_dtype(dtype: torch.dtype) -> None:
    """One part: from float32 sums straight to the result, as by way of two parts but for one rounding."""
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
    """NaN among the values reaches whatever reads it, at a weight of 0 as well.

    One head of 64 queries is four blocks of 16. Columns are visited by 32 from the start of the first one seen.
    """
    torch.manual_seed(6)
    query, key, value = torch.randn(1, 1, 64, 16), *torch.randn(2, 1, 1, 164, 16)
    step = AttentionPlan(torch.tensor([100]), [100], 64)
    clean = fused_attention.fused(query, key, value, step, scaling=0.3, splits=splits)
    value[0, 0, 116:] = torch.nan
    out = fused_attention.fused(query, key, value, step, scaling=0.3, splits=splits)
    assert torch.allclose(out[0, :16], clean[0, :16]) and out[0, 16:].isnan().any()
    value[0, 0, 116:], value[0, 0, :96] = 0.0, torch.nan
    # Row 48 sees 129..148 through a window of 20: its block begins at column 128.
    out = fused_attention.fused(query, key, value, step, scaling=0.3, splits=splits, window=20)
    assert out[0, 48:].isfinite().all() and out[0, :16].isnan().any()


def test_one_part_takes_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_attention, "merge", None)
    query, key, value, step = tensors({"lengths": [9], "kv_heads": 1, "heads": 2, "queries": 3, "seed": 7})
    fused_attention.fused(query, key, value, step, scaling=0.3, splits=1)
    with pytest.raises(TypeError):
        fused_attention.fused(query, key, value, step, scaling=0.3, splits=2)
