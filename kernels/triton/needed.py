"""Every launch that a model's shape needs on a card, for any request.

`launches(shape, card)` calls the kernels' own wrappers with tensors without data and lists their launches, each
variant once. The list serves both to compile ahead (ahead.py) and to test all cards. Launches that are left out
(launch.py) are replaced by those that take their place. A launch that is missing here is compiled on first use.

Strides beyond 2**31 elements are not covered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from .. import support
from ..plan import MAX_SPLIT_ROWS, AttentionPlan, Rotation, SharedPart, TreeMask
from ..shapes import LARGEST_WEIGHT, Card, Shape
from ..support import CompileFailed
from . import accept, attention, block, cache_write, linear, nucleus, pointer, pointwise, walk
from .launch import Launch, collected

Call = Callable[[], object]
# QUERIES: numbers of queries of one row and head. WIDTHS: numbers of drafts of one row. Each has one number for
# each tile size.
QUERIES, WIDTHS = (1, 17), (3, 17)
# Numbers of rows of a product: one for `gemv`, and one for each of the two tile sizes of `skinny`.
PRODUCT_ROWS = (1, 2, 17)
# Columns: enough for several segments of attention.
_COLUMNS = 4 * attention.SEGMENT
_META = torch.device("meta")
_BATCH = 2


def launches(shape: Shape, card: Card) -> list[Launch]:
    """Return the launches, each with a unique name."""
    support.set_meta_card(card)
    try:
        with collected() as collected_launches:
            for call in _calls(shape, card):
                with suppress(CompileFailed):
                    call()
    finally:
        support.set_meta_card(None)
    return list({launch.name: launch for launch in collected_launches}.values())


def _calls(shape: Shape, card: Card) -> Iterator[Call]:
    """Yield the calls of the kernels' wrappers, the most usual first."""
    own_forward = shape.hidden > 0
    yield from _attention(shape, own_forward)
    if own_forward:
        if card.capability >= 80:
            yield from _products(shape)
        yield from _around_products(shape)
    yield from _writes(shape, own_forward)
    yield from _draws(shape)
    if shape.verifies:
        yield from _decisions(shape.vocab)


def _empty(*sizes: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(*sizes, dtype=dtype, device=_META)


def _part() -> SharedPart:
    return SharedPart(_empty(_BATCH), _empty(_BATCH), [], [], _COLUMNS)


def _attention(shape: Shape, own_forward: bool) -> Iterator[Call]:
    """Yield calls for chains, trees and steps over a gap, with and without prefix, in parts and whole.

    In our own forward, attention rotates the queries of all steps but those of many queries, which are whole.
    """
    dim, number = shape.head_dim, shape.number
    # Attention rotates no more queries than these.
    few = MAX_SPLIT_ROWS // (shape.heads // shape.kv_heads)
    keys = _empty(_BATCH, shape.kv_heads, _COLUMNS, dim, dtype=number)
    kinds = [(False, False), (True, False)] + [(False, True)] * shape.verifies
    for (tree, gap), shared, most, parts, window in product(
        kinds, (False, True), QUERIES, (True, False), shape.windows
    ):
        queries = min(most, few) if own_forward and few else most
        tokens = TreeMask(_empty(_BATCH, queries), _empty(_BATCH, queries), _empty(_BATCH)) if tree else None
        plan = AttentionPlan(
            _empty(_BATCH), [], queries, captured_extent=_COLUMNS, shared=_part() if shared else None,
            gap=attention.SEGMENT if gap else None, tree=tokens,
        )  # fmt: skip
        qkv = _empty(_BATCH, queries, shape.heads + 2 * shape.kv_heads, dim, dtype=number)
        call = partial(
            attention.fused, qkv[:, :, : shape.heads].transpose(1, 2), keys, keys, plan, scaling=0.1,
            window=64 if window else None, softcap=20.0 if shape.capped else None,
            prefix=(keys, keys) if shared else None, parts=parts,
        )  # fmt: skip
        if own_forward and few:
            yield partial(call, rotation=_rotation(shape, qkv))
        if not own_forward or (most == QUERIES[-1] and not parts):
            yield call


def _rotation(shape: Shape, qkv: Tensor) -> Rotation:
    """Return the rotation of a layer's queries and keys in our own forward."""
    dim, number = shape.head_dim, shape.number
    angles = _empty(_COLUMNS, dim // 2, dtype=torch.float32)
    norms = (_empty(dim, dtype=number),) * 2 if shape.normed else None
    cache = _empty(2, _BATCH, shape.kv_heads, _COLUMNS, dim, dtype=number)
    return Rotation(qkv, cache, angles, angles, norms, 1e-5)


def _products(shape: Shape) -> Iterator[Call]:
    """Yield the products of a forward that our kernel computes, for each number of rows."""
    attended = shape.heads * shape.head_dim
    joined = attended + 2 * shape.kv_heads * shape.head_dim
    # For each product: its inputs, its outputs, and whether it has a norm, a gate and a residual.
    kinds = [
        (shape.hidden, joined, True, False, False), (attended, shape.hidden, False, False, True),
        (shape.hidden, shape.mlp, True, True, False), (shape.mlp, shape.hidden, False, False, True),
        (shape.hidden, shape.outputs, True, False, False),
    ]  # fmt: skip
    if shape.doubled:
        kinds.append((2 * shape.hidden, joined, False, False, False))
    for rows, (k, n, norm, gate, residual) in product(PRODUCT_ROWS, kinds):
        if rows > linear.MAX_ROWS[shape.number.itemsize]:
            continue
        x = _empty(rows, k, dtype=shape.number)
        weight = _empty(2 * n if gate else n, k, dtype=shape.number)
        if rows > 1 and weight.nbytes > LARGEST_WEIGHT:
            continue
        options: dict[str, Any] = {"norm": x[0] if norm else None, "eps": 1e-5, "gate": gate}
        options["residual"] = _empty(rows, n, dtype=shape.number) if residual else None
        yield partial(linear.linear, x, weight, **options)


def _around_products(shape: Shape) -> Iterator[Call]:
    """Yield the norms and the gate around torch's products: those of prompts, and of large weights."""
    x, wide = (_empty(_BATCH, 1, size, dtype=shape.number) for size in (shape.hidden, 2 * shape.mlp))
    yield from (partial(pointwise.add_norm, x, x[0, 0], 1e-5, residual) for residual in (x, None))
    yield partial(pointwise.gated, wide)


def _writes(shape: Shape, own_forward: bool) -> Iterator[Call]:
    """Yield writes of keys and values to the cache, rotated by our own forward or by transformers' code."""
    dim, number = shape.head_dim, shape.number
    for shared, tree in product((False, True), (False, True)):
        if own_forward:
            qkv = _empty(_BATCH, 3, shape.heads + 2 * shape.kv_heads, dim, dtype=number)
            tokens = TreeMask(_empty(_BATCH, 3), _empty(_BATCH, 3), _empty(_BATCH)) if tree else None
            plan = AttentionPlan(_empty(_BATCH), [], 3, shared=_part() if shared else None, tree=tokens)
            yield partial(_rotation(shape, qkv).apply, cache_write.rotate_write, plan)
        elif not tree:
            keys = _empty(_BATCH, shape.kv_heads, 3, dim, dtype=number)
            cache = _empty(2, _BATCH, shape.kv_heads, _COLUMNS, dim, dtype=number)
            yield partial(cache_write.write, keys, keys, cache, _empty(_BATCH), _empty(_BATCH) if shared else None)


def _draws(shape: Shape) -> Iterator[Call]:
    """Yield the calls that draw tokens, and the one that finds top-p's threshold."""
    weights = _empty(_BATCH, shape.vocab, dtype=torch.float32)
    keys = (_empty(_BATCH),) * 3
    yield partial(accept.draw, weights, *keys, _empty(1), _empty(shape.vocab) if shape.named else None)
    yield partial(nucleus.threshold, weights, 0.9)
    if shape.named and shape.hidden and not shape.doubled:
        # Our own draft head, which has a pointer.
        numbers = partial(_empty, dtype=shape.number)
        yield partial(
            pointer.add, numbers(_BATCH, shape.outputs), numbers(_BATCH, shape.hidden), _empty(_BATCH, 8),
            _empty(_BATCH, _COLUMNS), _empty(_BATCH), _empty(shape.vocab), numbers(shape.hidden), numbers(7), 2,
        )  # fmt: skip


def _decisions(vocab: int) -> Iterator[Call]:
    """Yield a call for each rule, with drawn drafts and with point masses, and one for trees."""
    keys, seed = _empty(_BATCH), _empty(1)
    for width, (rule, soft, drawn) in product(WIDTHS, _RULES):
        p = _empty(_BATCH, width + 1, vocab, dtype=torch.float32)
        q = _empty(_BATCH, width, vocab, dtype=torch.float32) if soft else None
        drafts, choices = _empty(_BATCH, width), None if drawn else _empty(_BATCH, width + 1)
        chances = None
        if rule == accept.AcceptRule.BLOCK:
            yield partial(block.chances, p, q, drafts, keys)
            chances = _empty(_BATCH, width, dtype=torch.float32), _empty(_BATCH, width + 1, dtype=torch.float32)
        yield partial(
            accept.accept, p if drawn else None, q, drafts, keys, choices, keys, keys, seed,
            begins=keys, verification=rule, chance=0.5, block=chances,
        )  # fmt: skip
    p, nodes = _empty(_BATCH, 8, vocab, dtype=torch.float32), _empty(_BATCH, 7)
    yield partial(walk.walk_trees, p, p[0], nodes, nodes, nodes, keys, keys, keys, seed)


# (rule, whether q is given, whether the next token is drawn), the most frequent first.
_RULES = [
    (accept.AcceptRule.CHOICES, False, False), (accept.AcceptRule.BLOCK, True, True),
    (accept.AcceptRule.BLOCK, False, True), (accept.AcceptRule.REJECTION, True, True),
    (accept.AcceptRule.REJECTION, False, True), (accept.AcceptRule.COIN, False, True),
    (accept.AcceptRule.COIN, False, False),
]  # fmt: skip
