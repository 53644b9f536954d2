"""The attention backends that run on a CPU equal a float64 reference that computes one query at a time.

Contract: holds for any lengths, head counts, numbers of queries, windows and soft-caps. Cache columns past a row's
own tokens, filled with huge numbers here, never reach a result.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.backends import BACKENDS, why_backend_unavailable
from kernels.plan import AttentionPlan

DIM = 8
HUGE = 1e30
HERE = [name for name in sorted(BACKENDS) if why_backend_unavailable(name, torch.device("cpu")) is None]


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[int],
    scaling: float,
    window: int | None,
    cap: float | None,
) -> Tensor:
    """[B, S, Hq, D] in float64, from the definition: query s of row b attends up to column lengths[b] + s."""
    batch, heads, queries, dim = query.shape
    group = heads // key.shape[1]
    out = torch.empty(batch, queries, heads, dim, dtype=torch.float64)
    for b in range(batch):
        for s in range(queries):
            last = lengths[b] + s
            first = 0 if window is None else max(0, last - window + 1)
            for h in range(heads):
                keys = key[b, h // group, first : last + 1].double()
                scores = keys @ query[b, h, s].double() * scaling
                if cap is not None:
                    scores = cap * torch.tanh(scores / cap)
                out[b, s, h] = scores.softmax(0) @ value[b, h // group, first : last + 1].double()
    return out


@st.composite
def problems(draw: st.DrawFn) -> dict:
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 4), (2, 3)]))
    return {
        "lengths": draw(st.lists(st.integers(0, 20), min_size=1, max_size=5)),
        "kv_heads": kv_heads,
        "heads": kv_heads * group,
        "queries": draw(st.integers(1, 6)),
        "window": draw(st.sampled_from([None, 1, 2, 7, 64])),
        "softcap": draw(st.sampled_from([None, 1.5, 30.0])),
        "scaling": draw(st.sampled_from([DIM**-0.5, 1.0])),
        "seed": draw(st.integers(0, 2**16)),
    }


def tensors(problem: dict) -> tuple[Tensor, Tensor, Tensor, AttentionPlan]:
    """query, key, value and plan of a step; past each row's own tokens, the cache holds huge numbers."""
    torch.manual_seed(problem["seed"])
    lengths, queries = problem["lengths"], problem["queries"]
    step = AttentionPlan(torch.tensor(lengths), lengths, queries)
    query = torch.randn(len(lengths), problem["heads"], queries, DIM)
    key, value = torch.randn(2, len(lengths), problem["kv_heads"], max(lengths) + queries, DIM)
    for b, length in enumerate(lengths):
        key[b, :, length + queries :] = -HUGE
        value[b, :, length + queries :] = HUGE
    return query, key, value, step


@pytest.mark.parametrize("backend", HERE)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(problem=problems())
def test_equals_the_reference(backend: str, problem: dict) -> None:
    query, key, value, step = tensors(problem)
    window, cap, scaling = problem["window"], problem["softcap"], problem["scaling"]
    out = BACKENDS[backend](query, key, value, step, scaling=scaling, window=window, softcap=cap)
    expected = reference(query, key, value, step.host, scaling, window, cap)
    assert out.shape == expected.shape and out.dtype == query.dtype
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("window", [None, 3])
def test_what_a_query_may_not_see_changes_not_one_bit(backend: str, window: int | None) -> None:
    """Rejected drafts and padding past a row's end, later queries, and columns that left the window."""
    problem = {"lengths": [9, 2, 5], "kv_heads": 2, "heads": 4, "queries": 3, "seed": 1}
    query, key, value, step = tensors(problem)
    run = BACKENDS[backend]
    clean = run(query, key, value, step, scaling=0.3, window=window)
    for s in range(3):
        soiled_key, soiled_value = key.clone(), value.clone()
        for b, length in enumerate(step.host):
            soiled_key[b, :, length + s + 1 :] = 7.0
            soiled_value[b, :, length + s + 1 :] = -HUGE
            if window is not None:
                soiled_key[b, :, : max(0, length + s + 1 - window)] = 7.0
                soiled_value[b, :, : max(0, length + s + 1 - window)] = HUGE
        soiled = run(query, soiled_key, soiled_value, step, scaling=0.3, window=window)
        assert torch.equal(soiled[:, s], clean[:, s])


@pytest.mark.parametrize("backend", HERE)
def test_keys_kept_in_another_dtype(backend: str) -> None:
    problem = {"lengths": [4, 0, 7], "kv_heads": 2, "heads": 4, "queries": 2, "seed": 2}
    query, key, value, step = tensors(problem)
    out = BACKENDS[backend](query.bfloat16(), key, value, step, scaling=0.3)
    assert out.dtype == torch.bfloat16
    expected = reference(query.bfloat16().float(), key, value, step.host, 0.3, None, None)
    torch.testing.assert_close(out.double(), expected, atol=0.02, rtol=0.02)


def test_a_window_as_wide_as_the_text_is_none() -> None:
    problem = {"lengths": [4, 6], "kv_heads": 1, "heads": 2, "queries": 1, "seed": 3}
    query, key, value, step = tensors(problem)
    for run in (BACKENDS[name] for name in HERE):
        wide = run(query, key, value, step, scaling=math.sqrt(DIM), window=100)
        torch.testing.assert_close(wide, run(query, key, value, step, scaling=math.sqrt(DIM)))
