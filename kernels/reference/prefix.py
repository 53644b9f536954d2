"""Ragged attention in plain torch, for rows that share a prefix or see only the ends of their text.

`attend_in_parts` returns what `pad` (attention.py) does, for a plan with shared prefixes or a gap. Attention over
a prefix is computed once for all rows and queries that read it, as one matrix product per key-value head, and then
merged with attention over the rows' own columns (bifurcated attention, arXiv 2403.08845). For a plan with a gap,
the few visible columns are gathered first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..plan import SINKS, AttentionPlan, SharedPart, Window

Pair = tuple[Tensor, Tensor]


@dataclass
class _Part:
    """Columns that n rows see.

    Attributes:
        keys, values: [n, Hkv, N, D], or [1, Hkv, N, D] if all n rows see the same.
        hidden: bool [n, S, N], true if a query must not see the column; None if all queries see all columns.
    """

    rows: slice | Tensor
    keys: Tensor
    values: Tensor
    hidden: Tensor | None


def in_parts(plan: AttentionPlan, prefix: Pair | None) -> bool:
    """Return whether a step is computed here: it has a prefix, or a gap that leaves few visible columns."""
    return plan.shared is not None or prefix is not None or (plan.gap is not None and _sees_few(plan))


def attend_in_parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan,
    prefix: Pair | None,
    *,
    scaling: float,
    window: Window | None,
    softcap: float | None,
    padded: bool = True,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention as `pad` does, computed part by part. All other arguments are those of `pad`.

    Args:
        padded: whether own columns are padded to the longest row; otherwise each row stops at its exact length.
        sinks: float [Hq], an extra score in each head's softmax (a model's attention sinks).
    """
    if (prefix is None) != (plan.shared is None):
        raise ValueError("a prefix and the plan's shared part belong together: give both or neither.")
    batch, heads, queries, dim = query.shape
    folded = query.to(key.dtype).reshape(batch, key.shape[1], -1, dim)
    if _sees_few(plan):
        parts = [_visible_part(key, value, plan, window, prefix)]
    else:
        parts = [*_own_parts(key, value, plan, window, padded), *_prefix_parts(plan, window, prefix)]
    # A row's own part contains its newest token, so the highest score over all its parts is finite.
    highest = torch.full((*folded.shape[:3], 1), float("-inf"), device=query.device)
    if sinks is not None:
        extra = sinks.float().view(1, key.shape[1], -1, 1).repeat_interleave(queries, 2)
        highest = highest.maximum(extra)
    scores = []
    for part in parts:
        scores.append(_scores(folded[part.rows], part, queries, scaling, softcap))
        highest[part.rows] = torch.maximum(highest[part.rows], scores[-1].amax(-1, keepdim=True))
    total, sums = torch.zeros_like(highest), torch.zeros_like(folded, dtype=torch.float32)
    if sinks is not None:
        total += torch.exp(extra - highest)
    for part, score in zip(parts, scores, strict=True):
        weights = torch.exp(score - highest[part.rows])
        total[part.rows] += weights.sum(-1, keepdim=True)
        sums[part.rows] += _product(weights.to(value.dtype), part.values).float()
    return (sums / total).view(batch, heads, queries, dim).transpose(1, 2).to(query.dtype)


def _sees_few(plan: AttentionPlan) -> bool:
    """Return whether a gap leaves so few columns that gathering them pays."""
    prefix = 0 if plan.shared is None else plan.shared.extent
    return plan.gap is not None and SINKS + _tail(plan) < prefix + plan.extent


def _tail(plan: AttentionPlan) -> int:
    """Return the most tokens that a row sees after the first SINKS; its window begins up to 63 tokens early."""
    return (plan.gap or 0) + 63 + plan.queries


def _scores(query: Tensor, part: _Part, queries: int, scaling: float, softcap: float | None) -> Tensor:
    """Return float32 scores [n, Hkv, group x S, N] of queries [n, Hkv, group x S, D], -inf if hidden."""
    scores = _product(query, part.keys.mT).float() * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if part.hidden is None:
        return scores
    hidden = part.hidden[:, None, None].expand(-1, 1, query.shape[2] // queries, -1, -1).flatten(2, 3)
    return scores.masked_fill(hidden, float("-inf"))


def _product(x: Tensor, y: Tensor) -> Tensor:
    """Return x [n, Hkv, M, K] times y [n, Hkv, K, N].

    If y is [1, Hkv, K, N], it is used for all n rows of x, and each head needs only one product.
    """
    if x.shape[0] == y.shape[0]:
        return x @ y
    joined = x.transpose(0, 1).flatten(1, 2) @ y[0]
    return joined.unflatten(1, (x.shape[0], x.shape[2])).transpose(0, 1)


def _own_parts(
    key: Tensor, value: Tensor, plan: AttentionPlan, window: Window | None, padded: bool
) -> Iterator[_Part]:
    """Yield the rows' own columns, in one part for all rows or in one part per row."""
    mask = plan.mask(window) if plan.needs_mask or window is not None else None
    if padded or not plan.host:
        yield _Part(slice(None), key, value, mask)
        return
    for row, own_length in enumerate(plan.own_host):
        this_row, end = slice(row, row + 1), own_length + plan.queries
        hidden = None if mask is None else mask[this_row, :, :end]
        yield _Part(this_row, key[this_row, :, :end], value[this_row, :, :end], hidden)


def _prefix_parts(plan: AttentionPlan, window: Window | None, prefix: Pair | None) -> Iterator[_Part]:
    """Yield a part for each prefix that is read."""
    if plan.shared is None or prefix is None:
        return
    shared, prefixes = plan.shared, prefix[0].shape[0]
    for group, rows, columns in plan.once("readers", lambda: list(readers(plan, prefixes))):
        keys, values = (stored[group : group + 1, :, :columns] for stored in prefix)
        hidden = plan.once(("prefix", group, window), partial(_hidden, plan, shared, group, rows, columns, window))
        yield _Part(rows, keys, values, hidden)


def readers(plan: AttentionPlan, prefixes: int) -> Iterator[tuple[int, slice | Tensor, int]]:
    """Yield (prefix, its rows, the columns that they see) for each prefix.

    For a captured step, yield all rows and all columns with each prefix.
    """
    shared = plan.shared
    assert shared is not None
    if not plan.host:
        yield from ((group, slice(None), shared.extent) for group in range(prefixes))
        return
    for group in sorted(set(shared.host_groups)):
        pairs = zip(shared.host_starts, shared.host_groups, strict=True)
        starts = {row: start for row, (start, other) in enumerate(pairs) if start and other == group}
        if starts:
            every = len(starts) == len(plan.host)
            yield group, slice(None) if every else plan.lengths.new_tensor(list(starts)), max(starts.values())


def _hidden(
    plan: AttentionPlan, shared: SharedPart, group: int, rows: slice | Tensor, columns: int, window: Window | None
) -> Tensor | None:
    """Return bool [n, S, columns], true if a query of `rows` must not see the prefix; None if all see it whole."""
    pairs = zip(shared.host_starts, shared.host_groups, strict=True)
    if (
        window is None
        and plan.gap is None
        and {start for start, of in pairs if start and of == group} == {columns}
    ):
        return None
    places = torch.arange(columns, device=plan.lengths.device)
    absent = (places >= shared.starts[:, None]) | (shared.groups[:, None] != group)
    return (plan.hidden(places, window) | absent[:, None])[rows]


def _visible_part(
    key: Tensor, value: Tensor, plan: AttentionPlan, window: Window | None, prefix: Pair | None
) -> _Part:
    """Gather the columns that a gap leaves: the first SINKS, and those from the window's start to the end."""
    tail = torch.arange(_tail(plan), device=key.device)
    starts = plan.window_starts(plan.gap or 0)[:, None]
    sinks = torch.arange(SINKS, device=key.device).expand(len(starts), -1)
    columns = plan.once("seen", lambda: torch.cat((sinks, starts + tail), 1))
    hidden = plan.once(("seen", window), lambda: plan.hidden(columns[:, None], window))
    gathered = [_gather(cache, columns, plan.shared, prefix and prefix[i]) for i, cache in enumerate((key, value))]
    return _Part(slice(None), gathered[0], gathered[1], hidden)


def _gather(own: Tensor, columns: Tensor, shared: SharedPart | None, prefix: Tensor | None) -> Tensor:
    """Gather each row's tokens `columns`, int64 [B, N], as [B, Hkv, N, D].

    For a column after the row's end, the result has an arbitrary token of the row.
    """
    rows = torch.arange(len(columns), device=own.device)[:, None]
    starts = 0 if shared is None else shared.starts[:, None]
    tokens = own[rows, :, (columns - starts).clamp(0, own.shape[2] - 1)]
    if shared is not None and prefix is not None:
        stored = prefix[shared.groups[:, None], :, columns.clamp(max=prefix.shape[2] - 1)]
        tokens = torch.where((columns < starts)[:, :, None, None], stored, tokens)
    return tokens.transpose(1, 2)
