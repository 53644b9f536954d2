"""Attention steps with ragged rows, shared prefixes, gaps and trees, and their float64 reference.

`make_step` and `make_tree_step` build each step twice: over shared prefixes and over whole rows. Columns past
the end of a row or of a prefix hold huge numbers, which must never reach a result.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels.backends import BACKENDS, why_backend_unavailable
from kernels.plan import MAX_TREE_TOKENS, PREFIX_UNIT, SINKS, AttentionPlan, SharedPart, TreeMask

DIM, HUGE = 8, 1e30
HERE = [name for name in sorted(BACKENDS) if why_backend_unavailable(name, torch.device("cpu")) is None]
# For each row and token, the ascending tree columns that the token sees. The last column is the token's own.
Paths = list[list[list[int]]]


@dataclass
class Step:
    """A step over rows that share prefixes, and the same step over whole rows.

    Attributes:
        suffix: Keys and values of each row's columns after its prefix.
        prefix: Keys and values of the prefixes.
        whole: Keys and values of entire rows, including their prefixes.
    """

    query: Tensor
    suffix: tuple[Tensor, Tensor]
    prefix: tuple[Tensor, Tensor]
    whole: tuple[Tensor, Tensor]
    plan: AttentionPlan
    paths: Paths | None = None

    def run(self, backend: Callable[..., Tensor], **options: object) -> Tensor:
        """Return a backend's output, over as many columns as the plan covers."""
        assert self.plan.shared is not None
        suffix = (cache[:, :, : self.plan.extent] for cache in self.suffix)
        prefix = tuple(cache[:, :, : self.plan.shared.extent] for cache in self.prefix)
        return backend(self.query, *suffix, self.plan, prefix=prefix, **options)

    def run_whole(self, backend: Callable[..., Tensor], **options: object) -> Tensor:
        """Return a backend's output over whole rows, without a prefix."""
        host = self.plan.lengths.tolist()
        plan = replace(self.plan, host=host, shared=None, captured_extent=None, _cached={})
        return backend(self.query, *self.whole, plan, **options)

    def with_tree(self, paths: Paths, before: list[int]) -> Step:
        """Return the step with trees, whose tensors are views of one tensor, as in the runner.

        `before` has the number of tree columns that each row was fed in earlier steps.
        """
        packed = [
            [*(sum(1 << column for column in path) for path in row), *(len(path) - 1 for path in row), first]
            for row, first in zip(paths, before, strict=True)
        ]
        tensor, width = torch.tensor(packed), len(paths[0])
        tree = TreeMask(tensor[:, :width], tensor[:, width:-1], tensor[:, -1])
        return replace(self, plan=replace(self.plan, tree=tree, _cached={}), paths=paths)

    def captured(self) -> Step:
        """Return the step as in a capture: it has no lengths on the host and covers all columns of both caches."""
        shared = self.plan.shared
        assert shared is not None
        part = replace(shared, host_starts=[], host_groups=[], extent=self.prefix[0].shape[2])
        plan = replace(self.plan, host=[], captured_extent=self.suffix[0].shape[2], shared=part, _cached={})
        return replace(self, plan=plan)

    def expected(self, scaling: float, window: int | None = None, softcap: float | None = None) -> Tensor:
        """Return the attention [B, S, Hq, D] in float64, computed query by query over whole rows."""
        batch, heads, queries, dim = self.query.shape
        keys, values = (cache.double().repeat_interleave(heads // cache.shape[1], 1) for cache in self.whole)
        out = torch.empty(batch, queries, heads, dim, dtype=torch.float64)
        gap, tree = self.plan.gap, self.plan.tree
        for b, length in enumerate(self.plan.lengths.tolist()):
            for s in range(queries):
                text = list(range(length + s + 1))
                if tree is not None and self.paths is not None:
                    # A token's text: the text before the tree, its ancestors and itself.
                    base = length - int(tree.before[b])
                    text = [*range(base), *(base + column for column in self.paths[b][s])]
                seen = torch.tensor(text if window is None else text[-window:])
                if gap is not None:
                    seen = seen[(seen < SINKS) | (seen >= max(SINKS, (length - gap) // 64 * 64))]
                scores = (keys[b, :, seen] @ self.query[b, :, s, :, None].double())[..., 0] * scaling
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                out[b, s] = (scores.softmax(-1)[:, None] @ values[b, :, seen])[:, 0]
        return out

    def check(self, out: Tensor, close: float = 1e-5, **options: Any) -> None:
        """Assert that a result equals the reference."""
        expected = self.expected(**options)
        assert out.shape == expected.shape and out.dtype == self.query.dtype
        torch.testing.assert_close(out.double(), expected, atol=close, rtol=close)


def make_step(
    rows: list[tuple[int, int, int]],
    queries: int,
    heads: tuple[int, int] = (4, 2),
    dim: int = DIM,
    gap: int | None = None,
    dtype: torch.dtype = torch.float32,
    spare: int = 5,
) -> Step:
    """Build a step for rows (length, prefix length, prefix index). Prefixes have `spare` unused columns."""
    torch.manual_seed(len(rows) + queries)
    lengths, starts, groups = (list(column) for column in zip(*rows, strict=True))
    batch, longest, shared = len(rows), max(lengths) + queries, max(starts) + spare
    query = torch.randn(batch, heads[0], queries, dim).to(dtype)
    prefixes = torch.randn(2, max(groups) + 1, heads[1], shared, dim).to(dtype)
    whole = torch.randn(2, batch, heads[1], longest, dim).to(dtype)
    suffix = torch.full_like(whole, HUGE if dtype != torch.float16 else 6e4)
    for b, (length, start, group) in enumerate(rows):
        whole[:, b, :, :start] = prefixes[:, group, :, :start]
        suffix[:, b, :, : length + queries - start] = whole[:, b, :, start : length + queries]
        whole[:, b, :, length + queries :] = suffix.max()
    for group in range(prefixes.shape[1]):
        used = max((start for _, start, of in rows if of == group), default=0)
        prefixes[:, group, :, used:] = suffix.max()
    part = SharedPart(torch.tensor(starts), torch.tensor(groups), starts, groups, max(starts))
    plan = AttentionPlan(torch.tensor(lengths), lengths, queries, shared=part, gap=gap)
    return Step(query, tuple(suffix), tuple(prefixes), tuple(whole), plan)


def make_tree_step(
    rows: list[tuple[int, int, int]],
    before: list[int],
    queries: int,
    seed: int,
    real: list[int] | None = None,
    **rest: Any,
) -> Step:
    """Build a step with random trees after rows (length before the tree, prefix length, prefix index).

    `before` has the number of tree columns fed earlier, and `real` the number of tokens that are not padding, for
    each row. A padding token sees only itself.
    """
    dice, trees = random.Random(seed), []
    for row, first in enumerate(before):
        count = queries if real is None else real[row]
        paths: list[list[int]] = []
        for column in range(first + queries):
            parent = dice.randrange(-1, column) if dice.random() < 0.5 else column - 1
            is_root = parent < 0 or column >= first + count
            paths.append([column] if is_root else [*paths[parent], column])
        trees.append(paths[first:])
    ends = [(base + first, start, group) for (base, start, group), first in zip(rows, before, strict=True)]
    return make_step(ends, queries, **rest).with_tree(trees, before)


@st.composite
def problems(draw: st.DrawFn, trees: bool = False) -> dict[str, Any]:
    """Draw arguments for `make_step`, or for `make_tree_step`."""
    starts = st.sampled_from([0, 0, PREFIX_UNIT, 2 * PREFIX_UNIT, 5 * PREFIX_UNIT])
    row = st.tuples(st.integers(0, 90 if trees else 40), starts, st.integers(0, 2))
    rows = draw(st.lists(row.map(lambda r: (r[0] + r[1], r[1], r[2])), min_size=1, max_size=5))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 4), (2, 3)]))
    queries = draw(st.sampled_from([1, 2, 3, 5, 9]) if trees else st.integers(1, 6))
    arguments = {"rows": rows, "queries": queries, "heads": (kv_heads * group, kv_heads)}
    if not trees:
        return arguments | {"gap": draw(st.sampled_from([None, None, 0, 3, 200]))}

    def each(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=len(rows), max_size=len(rows)))

    return arguments | {
        "before": each(0, MAX_TREE_TOKENS - queries),
        "real": each(1, queries),
        "seed": draw(st.integers(0, 999)),
    }
