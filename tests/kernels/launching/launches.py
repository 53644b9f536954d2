"""A launch of each kernel at sizes that fill no block, for tests of memory accesses and of program order.

`LAUNCHES[name](place)` makes inputs, always the same, passes each through `place`, runs the kernel and returns the
tensors that it wrote. Rows end at the end of their cache, so one column further is out of bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.plan import AttentionPlan, Rotation, SharedPart, TreeMask
from kernels.triton import accept, block, cache_write, linear, nucleus, pointer, pointwise, walk
from kernels.triton import attention as fused_attention

Place = Callable[[Tensor], Tensor]


def _counters(place: Place) -> Tensor:
    """For 2 rows, 2 heads and two blocks of query rows."""
    return place(torch.zeros(8, dtype=torch.int32))


def _attention(place: Place, dtype: torch.dtype, parts: bool, window: int | None) -> tuple[Tensor, ...]:
    """Rows have 3 and 41 tokens. 7 queries x 3 heads per KV head make 21 query rows, in blocks of 16."""
    torch.manual_seed(1)
    lengths = [3, 41]
    query = torch.randn(2, 7, 6, 20).to(dtype).transpose(1, 2)
    keys, values = torch.randn(2, 2, 2, 48, 20).to(dtype)
    step = AttentionPlan(place(torch.tensor(lengths)), lengths, 7, counters=_counters(place))
    placed = place(query), place(keys), place(values)
    return (fused_attention.fused(*placed, step, scaling=0.2, parts=parts, window=window),)


def _shared_attention(place: Place, parts: bool, gap: int | None) -> tuple[Tensor, ...]:
    """One row has 3 tokens.

    The other has 1041, of which 1024 are in the second of two prefixes, so it has three segments.
    """
    torch.manual_seed(1)
    lengths, starts, groups = [3, 1041], [0, 1024], [0, 1]
    query = torch.randn(2, 7, 6, 20).transpose(1, 2)
    (keys, values), stored = torch.randn(2, 2, 2, 24, 20), torch.randn(2, 2, 2, 1024, 20)
    placed = [place(torch.tensor(numbers)) for numbers in (lengths, starts, groups)]
    part = SharedPart(placed[1], placed[2], starts, groups, 1024)
    part._order = place(part.order)
    step = AttentionPlan(placed[0], lengths, 7, shared=part, gap=gap, counters=_counters(place))
    step.once(("window starts", gap), lambda: place(step.window_starts(gap or 0)))
    prefix = place(stored[0]), place(stored[1])
    out = fused_attention.fused(
        place(query), place(keys), place(values), step, scaling=0.2, parts=parts, prefix=prefix
    )
    return (out,)


def _tree_attention(place: Place, parts: bool, window: int | None) -> tuple[Tensor, ...]:
    """Like `_attention`, with 512 more columns in the longer row. A token sees every second token of its tree."""
    torch.manual_seed(1)
    lengths, before = [3, 553], [3, 41]
    query = torch.randn(2, 7, 6, 20).transpose(1, 2)
    keys, values = torch.randn(2, 2, 2, 560, 20)
    paths = [[range((first + s) % 2, first + s + 1, 2) for s in range(7)] for first in before]
    sees = torch.tensor([[sum(1 << column for column in path) for path in row] for row in paths])
    depths = torch.tensor([[len(path) - 1 for path in row] for row in paths])
    tree = TreeMask(place(sees), place(depths), place(torch.tensor(before)))
    step = AttentionPlan(place(torch.tensor(lengths)), lengths, 7, tree=tree, counters=_counters(place))
    step.once("bases", lambda: place(step.lengths - tree.before))
    step.once("dense positions", lambda: place(step.positions))
    placed = place(query), place(keys), place(values)
    return (fused_attention.fused(*placed, step, scaling=0.2, parts=parts, window=window),)


def _rotated_attention(place: Place, parts: bool, kind: str, norm: bool = False) -> tuple[Tensor, ...]:
    """Attention that also rotates, and writes the last columns of its rows, after 3 and 553 tokens.

    The 7 new tokens of the longer row lie in one segment, or after 508 tokens in two ("crossing"). The last
    positions are past the end of cos and sin.
    """
    torch.manual_seed(1)
    longer, start = (508, 0) if kind == "crossing" else (553, 512 if kind == "prefix" else 0)
    qkv = place(torch.randn(2, 7, 6 + 2 * 2, 20))
    cache = place(torch.randn(2, 2, 2, longer + 7 - start, 20))
    angles = torch.outer(torch.arange(longer + 5.0), torch.rand(10))
    norms = (place(torch.rand(20)), place(torch.rand(20))) if norm else None
    rotation = Rotation(qkv, cache, place(angles.cos()), place(angles.sin()), norms, 1e-6)
    step = AttentionPlan(place(torch.tensor([3, longer])), [3, longer], 7, counters=_counters(place))
    prefix = None
    if kind == "prefix":
        step.shared = SharedPart(place(torch.tensor([0, 512])), place(torch.tensor([0, 0])), [0, 512], [0, 0], 512)
        step.shared._order = place(step.shared.order)
        prefix = place(torch.randn(1, 2, 512, 20)), place(torch.randn(1, 2, 512, 20))
    if kind == "tree":
        sees = torch.tensor([[1 << s for s in range(7)], [1 | 1 << s for s in range(7)]])
        step.tree = TreeMask(
            place(sees), place((torch.arange(14).view(2, 7) > 7).long()), place(torch.zeros(2).long())
        )
        step.once("bases", lambda: place(step.lengths))
        step.once("dense positions", lambda: place(step.positions))
    query = qkv[:, :, :6].transpose(1, 2)
    out = fused_attention.fused(query, *cache, step, scaling=0.2, parts=parts, rotation=rotation, prefix=prefix)
    return out, cache


def _product(place: Place, rows: int, k_size: int, gate: bool, bare: bool = False) -> tuple[Tensor, ...]:
    """A product with 13 output features."""
    torch.manual_seed(2)
    x, weight = torch.randn(rows, k_size), torch.randn(26 if gate else 13, k_size)
    norm, residual = torch.rand(k_size), torch.randn(rows, 13)
    extra = {} if bare else {"norm": place(norm), "residual": place(residual)}
    return (linear.linear(place(x), place(weight), gate=gate, eps=1e-5, **extra),)


def _norm(place: Place, residual: bool) -> tuple[Tensor, ...]:
    torch.manual_seed(9)
    x, other = place(torch.randn(3, 70)), place(torch.randn(3, 70))
    return pointwise.add_norm(x, place(torch.rand(70)), 1e-5, other if residual else None)


def _gate(place: Place) -> tuple[Tensor, ...]:
    """Rows of 1030 outputs make two blocks."""
    torch.manual_seed(9)
    return (pointwise.gated(place(torch.randn(3, 2 * 1030))),)


def _put(place: Place, start: int = 0) -> tuple[Tensor, ...]:
    """Write strided states of 3 tokens per row to a cache of 9 columns. The last row writes the last columns."""
    torch.manual_seed(3)
    states = place(torch.randn(2, 3, 2, 4, 20))  # [B, S, keys and values, Hkv, D]
    cache = place(torch.zeros(2, 2, 4, 9, 20))
    keys, values = (states[:, :, i].transpose(1, 2) for i in range(2))
    starts = place(torch.tensor([0, start])) if start else None
    cache_write.write(keys, values, cache, place(torch.tensor([0, 6 + start])), starts)
    return (cache,)


def _rotate(place: Place, norm: bool, tree: bool = False) -> tuple[Tensor, ...]:
    """Like `_put`, with rotary embedding. The last positions are past the end of cos and sin."""
    torch.manual_seed(4)
    qkv, cache = place(torch.randn(2, 3, 8, 20)), place(torch.zeros(2, 2, 2, 9, 20))
    angles = torch.outer(torch.arange(7.0), torch.rand(10))
    norms = (place(torch.rand(20)), place(torch.rand(20))) if norm else None
    lengths = place(torch.tensor([0, 6]))
    positions = place(torch.tensor([[0, 1, 1], [6, 7, 7]])) if tree else None
    cos_sin = place(angles.cos()), place(angles.sin())
    cache_write.rotate_write(qkv, cache, lengths, *cos_sin, norms, 1e-6, positions=positions)
    return qkv, cache


def _decide(place: Place, verification: accept.AcceptRule, soft: bool, drawn: bool) -> tuple[Tensor, ...]:
    """19 rows of 0 to 3 drafts are more than one interpreted program takes. 2500 tokens make two blocks."""
    torch.manual_seed(5)
    p, q = torch.rand(19, 4, 2500).softmax(-1), torch.rand(19, 3, 2500).softmax(-1)
    drafts = torch.randint(0, 2500, (19, 3))
    # All drafts of the last row are accepted, so that the last values of p are read.
    q[-1], drafts[-1, -1] = p[-1, :3], 2499
    counts, choices = (torch.arange(19) + 1) % 4, torch.cat((drafts, drafts[:, :1]), 1)
    chances = place(torch.rand(19, 3)), place(torch.rand(19, 4))
    return accept.accept(
        place(p) if drawn or verification == accept.AcceptRule.REJECTION else None,
        place(q) if soft else None,
        place(drafts), place(counts), None if drawn else place(choices),
        place(torch.arange(19)), place(torch.arange(19) * 3), place(torch.tensor([7])),
        begins=place(torch.arange(19)), verification=verification, chance=0.5, block=chances,
    )  # fmt: skip


def _weigh(place: Place, soft: bool) -> tuple[Tensor, ...]:
    """Like `_decide`.

    The last row's last draft is the highest token id, so that the kernel reads q up to its end.
    """
    torch.manual_seed(5)
    p, q = torch.rand(19, 4, 2500).softmax(-1), torch.rand(19, 3, 2500).softmax(-1)
    drafts, counts = torch.randint(0, 2500, (19, 3)), (torch.arange(19) + 1) % 4
    drafts[-1, -1], counts[-1] = 2499, 3
    known = (torch.arange(3) < counts[:, None]).float()
    h, reach = block.chances(place(p), place(q) if soft else None, place(drafts), place(counts))
    # Set the results of padding to zero.
    return h * known.to(h.device), reach[:, 1:] * known.to(h.device)


def _draw(place: Place, named: bool) -> tuple[Tensor, ...]:
    torch.manual_seed(6)
    weights, keys = torch.rand(5, 2500), torch.arange(5)
    ids = place(torch.randperm(5000)[:2500]) if named else None
    placed = place(weights), place(keys), place(keys * 3), place(torch.ones_like(keys))
    return (accept.draw(*placed, place(torch.tensor([7])), ids),)


def _least_kept(place: Place, vocab: int) -> tuple[Tensor, ...]:
    torch.manual_seed(7)
    return (nucleus.threshold(place(torch.randn(3, vocab).softmax(-1)), 0.9),)


def _point(place: Place) -> tuple[Tensor, ...]:
    """Row 0 has a match near its end, row 1 a text of one token."""
    torch.manual_seed(4)
    text = torch.tensor([[5, 6, 7, 8, 5, 6], [3, 0, 0, 0, 0, 0]])
    last = torch.full((2, 8), -1)
    last[0, :6], last[1, 0] = text[0].flip(0), 3
    logits = place(torch.randn(2, 13))
    numbers = [place(torch.randn(size)) for size in (2 * 20, 20, 7)]
    columns = place(torch.arange(11) % 13)
    pointer.add(
        logits, numbers[0].view(2, 20), place(last), place(text), place(torch.tensor([6, 1])), columns,
        numbers[1], numbers[2], 2,
    )  # fmt: skip
    return (logits,)


def _walk(place: Place, soft: bool) -> tuple[Tensor, ...]:
    """5 trees of 7 drafts, every second of them drawn. 2500 tokens make two blocks."""
    torch.manual_seed(8)
    p, q = (10 * torch.rand(5, 8, 2500)).softmax(-1), (10 * torch.rand(20, 2500)).softmax(-1)
    tokens = torch.randint(0, 2500, (5, 7))
    # The last row accepts all its drafts, so that the last values of p and q are read.
    tokens[:, -1], p[-1] = 2499, p[-1, :1]
    parents = (torch.arange(7) - 1).expand(5, 7).clone()
    parents[:-1] = (torch.arange(7) - 1) // 2
    drawn = torch.full((5, 7), -1)
    if soft:
        drawn[:, 1::2] = torch.arange(15).view(5, 3)
        drawn[-1] = torch.arange(13, 20)
        q[13:] = 1e-9
    placed = [place(tensor) for tensor in (tokens, parents, drawn, torch.arange(5), torch.arange(5) * 3)]
    rest = place(torch.arange(5)), place(torch.tensor([7]))
    return walk.walk_trees(place(p), place(q) if soft else None, *placed, *rest)


LAUNCHES: dict[str, Callable[[Place], tuple[Any, ...]]] = {
    "attend, whole": partial(_attention, dtype=torch.float32, parts=False, window=None),
    "attend, a window": partial(_attention, dtype=torch.bfloat16, parts=False, window=5),
    "attend, parts": partial(_attention, dtype=torch.float32, parts=True, window=None),
    "attend, a prefix": partial(_shared_attention, parts=False, gap=None),
    "attend_prefix, parts": partial(_shared_attention, parts=True, gap=None),
    "attend_prefix, parts, a gap": partial(_shared_attention, parts=True, gap=100),
    "attend, trees": partial(_tree_attention, parts=False, window=None),
    "attend, parts, trees and a window": partial(_tree_attention, parts=True, window=30),
    "attend, rotating": partial(_rotated_attention, parts=False, kind="crossing", norm=True),
    "attend, rotating, parts": partial(_rotated_attention, parts=True, kind="crossing"),
    "attend, rotating, trees": partial(_rotated_attention, parts=True, kind="tree"),
    "attend_prefix, rotating, parts": partial(_rotated_attention, parts=True, kind="prefix", norm=True),
    "gemv": partial(_product, rows=1, k_size=70, gate=True),
    "gemv, full blocks": partial(_product, rows=1, k_size=512, gate=False),
    "skinny": partial(_product, rows=5, k_size=70, gate=True),
    "skinny, full blocks": partial(_product, rows=5, k_size=64, gate=False, bare=True),
    "norm": partial(_norm, residual=False),
    "norm, after a sum": partial(_norm, residual=True),
    "gate": _gate,
    "put": _put,
    "put, after a prefix": partial(_put, start=16),
    "rotate": partial(_rotate, norm=False),
    "rotate, heads normalised": partial(_rotate, norm=True),
    "rotate, trees": partial(_rotate, norm=False, tree=True),
    "decide": partial(_decide, verification=accept.AcceptRule.REJECTION, soft=True, drawn=True),
    "decide, point masses": partial(_decide, verification=accept.AcceptRule.REJECTION, soft=False, drawn=True),
    "decide, block": partial(_decide, verification=accept.AcceptRule.BLOCK, soft=True, drawn=True),
    "decide, block, point masses": partial(_decide, verification=accept.AcceptRule.BLOCK, soft=False, drawn=True),
    "weigh": partial(_weigh, soft=True),
    "weigh, point masses": partial(_weigh, soft=False),
    "decide, choices": partial(_decide, verification=accept.AcceptRule.CHOICES, soft=False, drawn=False),
    "decide, coin": partial(_decide, verification=accept.AcceptRule.COIN, soft=False, drawn=True),
    "decide, coin and choices": partial(_decide, verification=accept.AcceptRule.COIN, soft=False, drawn=False),
    "walk": partial(_walk, soft=True),
    "point": _point,
    "walk, no draft drawn": partial(_walk, soft=False),
    "gumbel": partial(_draw, named=False),
    "gumbel, named": partial(_draw, named=True),
    "least_kept": partial(_least_kept, vocab=2500),
    "least_kept, in blocks": partial(_least_kept, vocab=9000),
}
