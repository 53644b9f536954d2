"""Attention over trees of tokens: each backend equals a float64 reference that walks each token's ancestors.

Contract: holds for ragged rows, trees that earlier steps began (`before`), prefixes that rows share, sliding
windows (measured in positions), soft-caps and captured steps. What a token does not see of its tree, filled with
huge numbers here, changes not one bit; a tree that is a chain has the bits of a plain step.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.backends import BACKENDS
from kernels.plan import MOST_TREE, SHARE, TokenTree
from kernels.triton import attention as fused_attention
from kernels.triton.attention import fused
from tests.kernels.test_ragged_attention import HERE, HUGE
from tests.kernels.test_shared_prefix import Step, captured, make

Paths = list[list[list[int]]]


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few hundred columns make several."""
    monkeypatch.setattr(fused_attention, "SEGMENT", 64)
    monkeypatch.setattr(fused_attention, "UNROLLED", 2)


def random_trees(before: list[int], queries: int, seed: int, real: list[int] | None = None) -> Paths:
    """paths[b][s]: the columns of its row's tree that token s sees, ascending, its own last.

    real: how many of each row's tokens are real; padding sees itself alone.
    """
    dice, trees = random.Random(seed), []
    for row, first in enumerate(before):
        count = queries if real is None else real[row]
        paths: list[list[int]] = []
        for column in range(first + queries):
            parent = dice.randrange(-1, column) if dice.random() < 0.5 else column - 1
            alone = parent < 0 or column >= first + count
            paths.append([column] if alone else [*paths[parent], column])
        trees.append(paths[first:])
    return trees


def token_tree(paths: Paths, before: list[int]) -> TokenTree:
    """As the runner makes it: views of one tensor, whose rows do not lie side by side."""
    packed = [
        [*(sum(1 << column for column in path) for path in row), *(len(path) - 1 for path in row), first]
        for row, first in zip(paths, before, strict=True)
    ]
    whole, width = torch.tensor(packed), len(paths[0])
    return TokenTree(whole[:, :width], whole[:, width:-1], whole[:, -1])


def grown(
    rows: list[tuple[int, int, int]],
    before: list[int],
    queries: int,
    seed: int,
    real: list[int] | None = None,
    **rest,
) -> tuple[Step, Paths]:
    """A step over rows (base, start, group), whose trees have `before` columns behind the base."""
    ends = [(base + first, start, group) for (base, start, group), first in zip(rows, before, strict=True)]
    paths = random_trees(before, queries, seed, real)
    step = make(ends, queries, **rest)
    return replace(step, plan=replace(step.plan, tree=token_tree(paths, before), _made={})), paths


def reference(step: Step, paths: Paths, scaling: float, window: int | None, softcap: float | None) -> Tensor:
    """[B, S, Hq, D] in float64, from the definition."""
    batch, heads, queries, dim = step.query.shape
    keys, values = (one.double().repeat_interleave(heads // one.shape[1], 1) for one in step.whole)
    out = torch.empty(batch, queries, heads, dim, dtype=torch.float64)
    assert step.plan.tree is not None
    for b, length in enumerate(step.plan.lengths.tolist()):
        base = length - int(step.plan.tree.before[b])
        for s, path in enumerate(paths[b]):
            # A token's text: all before the tree, then its ancestors and itself.
            text = [*range(base), *(base + column for column in path)]
            seen = torch.tensor(text if window is None else text[-window:])
            scores = (keys[b, :, seen] @ step.query[b, :, s, :, None].double())[..., 0] * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[b, s] = (scores.softmax(-1)[:, None] @ values[b, :, seen])[:, 0]
    return out


@st.composite
def problems(draw: st.DrawFn) -> dict:
    starts = st.sampled_from([0, 0, SHARE, 5 * SHARE])
    row = st.tuples(st.integers(0, 90), starts, st.integers(0, 2)).map(lambda r: (r[0] + r[1], r[1], r[2]))
    rows = draw(st.lists(row, min_size=1, max_size=4))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 4), (2, 3)]))
    queries = draw(st.sampled_from([1, 2, 3, 5, 9]))
    return {
        "rows": rows,
        "before": draw(st.lists(st.integers(0, MOST_TREE - queries), min_size=len(rows), max_size=len(rows))),
        "queries": queries,
        "real": draw(st.lists(st.integers(1, queries), min_size=len(rows), max_size=len(rows))),
        "heads": (kv_heads * group, kv_heads),
        "seed": draw(st.integers(0, 999)),
    }


@pytest.mark.parametrize("backend", [name for name in HERE if name != "fused"])
@settings(max_examples=8, deadline=None, derandomize=True)
@given(problem=problems(), window=st.sampled_from([None, 1, 3, 40]), softcap=st.sampled_from([None, 1.5]))
def test_the_torch_backends_equal_the_reference(
    backend: str, problem: dict, window: int | None, softcap: float | None
) -> None:
    step, paths = grown(**problem)
    out = step.run(BACKENDS[backend], scaling=0.3, window=window, softcap=softcap)
    expected = reference(step, paths, 0.3, window, softcap)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


# (base, start, group), and columns of each tree that were fed before. A tree lies across the end of a segment, and
# a row begins with its tree; segments lie in a prefix, in a row and across the end of a prefix.
ROWS, BEFORE = [(140, 80, 0), (84, 80, 0), (30, 0, 2), (0, 0, 1)], [0, 7, 30, 57]


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize(
    ("window", "softcap", "queries", "heads"),
    [
        (None, None, 5, (4, 2)),
        (None, 1.5, 1, (4, 1)),
        (1, None, 3, (3, 1)),
        (3, None, 5, (1, 1)),
        (70, 1.5, 5, (3, 1)),
    ],
)
def test_the_kernel_equals_the_reference(
    capture: bool, parts: bool, window: int | None, softcap: float | None, queries: int, heads: tuple[int, int]
) -> None:
    for seed, rows in enumerate((slice(0, 4), slice(1, 2))):
        real = [1 + (row + seed) % queries for row in range(len(ROWS[rows]))]
        step, paths = grown(ROWS[rows], BEFORE[rows], queries, seed, real, heads=heads)
        step = captured(step) if capture else step
        expected = reference(step, paths, 0.3, window, softcap)
        out = step.run(fused, scaling=0.3, window=window, softcap=softcap, parts=parts)
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("parts", [False, True])
def test_the_deepest_and_widest_tree(parts: bool) -> None:
    """63 tokens a row: all 63 bits are used, on both sides of a word's end."""
    step, paths = grown([(70, 64, 0)], [0], MOST_TREE, 1, heads=(1, 1))
    chain = [list(range(column + 1)) for column in range(MOST_TREE)]
    flat = [[column] for column in range(MOST_TREE)]
    for trees in (paths, [chain], [flat]):
        plan = replace(step.plan, tree=token_tree(trees, [0]), _made={})
        one = replace(step, plan=plan)
        out = one.run(fused, scaling=0.3, parts=parts)
        torch.testing.assert_close(out.double(), reference(one, trees, 0.3, None, None), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("parts", [False, True])
def test_what_a_token_does_not_see_changes_not_one_bit(parts: bool) -> None:
    step, paths = grown(ROWS[1:], BEFORE[1:], 3, 3, heads=(2, 1))
    clean = step.run_whole(fused, scaling=0.3, parts=parts)
    assert step.plan.tree is not None
    for s in range(3):
        soiled = [one.clone() for one in step.whole]
        for b, length in enumerate(step.plan.host):
            first = BEFORE[1 + b]
            hidden = [length - first + column for column in range(first + 3) if column not in paths[b][s]]
            soiled[0][b, :, hidden], soiled[1][b, :, hidden] = 7.0, HUGE
        out = replace(step, whole=tuple(soiled)).run_whole(fused, scaling=0.3, parts=parts)
        assert torch.equal(out[:, s], clean[:, s])


@pytest.mark.parametrize("masks", [{}, {"window": 30}])
def test_a_tree_that_is_a_chain_is_a_plain_step(masks: dict) -> None:
    """Also where earlier steps began the tree: the same tokens, split into other steps."""
    step = make([(base + 4, start, group) for base, start, group in ROWS[1:]], 3, heads=(2, 1), dim=20)
    plain = step.run(fused, scaling=0.2, **masks)
    for before in (0, 4):
        paths = [[list(range(before + s + 1)) for s in range(3)] for _ in ROWS[1:]]
        plan = replace(step.plan, tree=token_tree(paths, [before] * len(paths)), _made={})
        out = replace(step, plan=plan).run(fused, scaling=0.2, **masks)
        torch.testing.assert_close(out, plain, atol=1e-6, rtol=1e-6)


def test_a_step_without_trees_reads_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(fused_attention, "_tree", refuse)
    make(ROWS[:1], 1, heads=(1, 1)).run(fused, scaling=0.3)


def test_trees_with_a_gap_or_of_another_width_are_refused() -> None:
    step, paths = grown(ROWS, BEFORE, 5, 3)
    with pytest.raises(ValueError, match="gap"):
        replace(step, plan=replace(step.plan, gap=64, _made={})).run(fused, scaling=0.3)
    short = token_tree([row[:4] for row in paths], BEFORE)
    with pytest.raises(ValueError, match="4"):
        replace(step, plan=replace(step.plan, tree=short, _made={})).run(fused, scaling=0.3)
