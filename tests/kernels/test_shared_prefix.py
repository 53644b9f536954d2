"""Attention over rows that share a prefix equals the float64 reference over rows that own a copy of it.

Contract: holds for any lengths, groups, windows, soft-caps and gaps, for rows without a prefix beside rows with
one, and for a captured step, whose lengths only the device knows. Columns past a row's own tokens and past a
prefix, filled with huge numbers here, never reach a result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.backends import BACKENDS, flash
from kernels.plan import SHARE, SINKS, AttentionPlan, SharedPart
from tests.kernels.test_ragged_attention import DIM, HERE, HUGE

Attend = Callable[..., Tensor]


@dataclass
class Step:
    """A step over rows that share prefixes, and the same rows with all their columns as their own."""

    query: Tensor
    own: tuple[Tensor, Tensor]
    prefix: tuple[Tensor, Tensor]
    whole: tuple[Tensor, Tensor]
    plan: AttentionPlan

    def run(self, backend: Attend, **options: object) -> Tensor:
        """What a backend makes of the step, whose columns end where the plan says."""
        assert self.plan.shared is not None
        own = (one[:, :, : self.plan.extent] for one in self.own)
        prefix = tuple(one[:, :, : self.plan.shared.extent] for one in self.prefix)
        return backend(self.query, *own, self.plan, prefix=prefix, **options)

    def run_whole(self, backend: Attend, **options: object) -> Tensor:
        """The same over whole rows, without a prefix."""
        host = self.plan.lengths.tolist()
        plan = replace(self.plan, host=host, shared=None, captured_extent=None, _made={})
        return backend(self.query, *self.whole, plan, **options)


def make(
    rows: list[tuple[int, int, int]],
    queries: int,
    heads: tuple[int, int] = (4, 2),
    dim: int = DIM,
    gap: int | None = None,
    dtype: torch.dtype = torch.float32,
    spare: int = 5,
) -> Step:
    """rows: (length, start, group) of each; heads: of queries, of keys; spare: unused columns of the prefixes."""
    torch.manual_seed(len(rows) + queries)
    lengths, starts, groups = (list(column) for column in zip(*rows, strict=True))
    batch, longest, shared = len(rows), max(lengths) + queries, max(starts) + spare
    query = torch.randn(batch, heads[0], queries, dim).to(dtype)
    prefixes = torch.randn(2, max(groups) + 1, heads[1], shared, dim).to(dtype)
    whole = torch.randn(2, batch, heads[1], longest, dim).to(dtype)
    own = torch.full_like(whole, HUGE if dtype != torch.float16 else 6e4)
    for b, (length, start, group) in enumerate(rows):
        whole[:, b, :, :start] = prefixes[:, group, :, :start]
        own[:, b, :, : length + queries - start] = whole[:, b, :, start : length + queries]
        whole[:, b, :, length + queries :] = own.max()
    for group in range(prefixes.shape[1]):
        used = max((start for _, start, of in rows if of == group), default=0)
        prefixes[:, group, :, used:] = own.max()
    part = SharedPart(torch.tensor(starts), torch.tensor(groups), starts, groups, max(starts))
    plan = AttentionPlan(torch.tensor(lengths), lengths, queries, shared=part, gap=gap)
    return Step(query, tuple(own), tuple(prefixes), tuple(whole), plan)


def captured(step: Step) -> Step:
    """The same step as a capture sees it: nothing on the host, and all columns of both caches."""
    shared = step.plan.shared
    assert shared is not None
    part = replace(shared, host_starts=[], host_groups=[], extent=step.prefix[0].shape[2])
    plan = replace(step.plan, host=[], captured_extent=step.own[0].shape[2], shared=part, _made={})
    return replace(step, plan=plan)


def reference(step: Step, scaling: float, window: int | None = None, softcap: float | None = None) -> Tensor:
    """[B, S, Hq, D] in float64 over whole rows, one query at a time, from the definition."""
    batch, heads, queries, dim = step.query.shape
    keys, values = (one.double().repeat_interleave(heads // one.shape[1], 1) for one in step.whole)
    out = torch.empty(batch, queries, heads, dim, dtype=torch.float64)
    for b, length in enumerate(step.plan.lengths.tolist()):
        for s in range(queries):
            last, gap = length + s, step.plan.gap
            seen = torch.arange(last + 1)
            if window is not None:
                seen = seen[seen > last - window]
            if gap is not None:
                seen = seen[(seen < SINKS) | (seen >= max(SINKS, (length - gap) // 64 * 64))]
            scores = (keys[b, :, seen] @ step.query[b, :, s, :, None].double())[..., 0] * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[b, s] = (scores.softmax(-1)[:, None] @ values[b, :, seen])[:, 0]
    return out


@st.composite
def problems(draw: st.DrawFn) -> dict:
    starts = st.sampled_from([0, SHARE, 2 * SHARE, 5 * SHARE])
    row = st.tuples(st.integers(0, 40), starts, st.integers(0, 2)).map(lambda r: (r[0] + r[1], r[1], r[2]))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 4), (2, 3)]))
    return {
        "rows": draw(st.lists(row, min_size=1, max_size=5)),
        "queries": draw(st.integers(1, 6)),
        "heads": (kv_heads * group, kv_heads),
        "gap": draw(st.sampled_from([None, None, 0, 3, 200])),
    }


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("capture", [False, True])
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    problem=problems(),
    window=st.sampled_from([None, 1, 7, 64]),
    softcap=st.sampled_from([None, 1.5, 30.0]),
)
def test_equals_the_reference(
    backend: str, capture: bool, problem: dict, window: int | None, softcap: float | None
) -> None:
    step = make(**problem)
    step = captured(step) if capture and backend != "split" else step
    out = step.run(BACKENDS[backend], scaling=0.3, window=window, softcap=softcap)
    expected = reference(step, 0.3, window, softcap)
    assert out.dtype == step.query.dtype and out.shape == expected.shape
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


# (length, start, group): a prefix of four times the window, one within it, and a row of its own.
LONG = [(600, 512, 0), (520, 512, 0), (90, 64, 1), (400, 0, 0)]


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("capture", [False, True])
def test_a_gap_in_long_rows(backend: str, capture: bool) -> None:
    step = make(LONG, 3, gap=100)
    step = captured(step) if capture and backend != "split" else step
    expected = reference(step, 0.3)
    torch.testing.assert_close(step.run(BACKENDS[backend], scaling=0.3).double(), expected, atol=1e-5, rtol=1e-5)
    whole = step.run_whole(BACKENDS[backend], scaling=0.3)
    torch.testing.assert_close(whole.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(backend: str, dtype: torch.dtype) -> None:
    step = make(LONG, 2, dtype=dtype)
    out = step.run(BACKENDS[backend], scaling=0.3)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), reference(step, 0.3), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("backend", HERE)
def test_a_prefix_and_a_plan_that_do_not_fit(backend: str) -> None:
    step = make([(20, 16, 0)], 1)
    with pytest.raises(ValueError, match="both or neither"):
        BACKENDS[backend](step.query, *step.own, step.plan, scaling=0.3)
    plan = replace(step.plan, shared=None, _made={})
    with pytest.raises(ValueError, match="both or neither"):
        BACKENDS[backend](step.query, *step.whole, plan, scaling=0.3, prefix=step.prefix)


def test_flash_attn_shares_nothing() -> None:
    with pytest.raises(ValueError, match="choose another backend"):
        make([(20, 16, 0)], 1).run(flash, scaling=0.3)
