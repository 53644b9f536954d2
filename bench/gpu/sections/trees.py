"""Trees of tokens on a GPU: attention, rotation, captured steps and the walk, each against its reference.

Contract: cases for checks.py; attention.py times the same plans. References: kernels/reference on the device, and
the torch walk on CPU copies.
"""

from __future__ import annotations

import itertools
import random
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bass_core.engine.cuda_graphs import GraphRunner, record_calls
from bass_core.engine.runner import ModelRunner
from bass_core.models.forward import BatchTree, ForwardBatch, token_tree
from bass_core.models.llama_cuda import LlamaCuda
from bass_core.sampling.distribution import probabilities
from bass_core.sampling.draw import draw
from bass_core.sampling.noise import NoiseKeys, Role, place_node
from bass_core.sampling.params import SamplingParams
from bass_core.verification.table import VERIFICATIONS
from bass_core.verification.tree import DraftTree, verify_tree
from kernels.plan import MOST_TREE, AttentionPlan
from kernels.reference import cache as cache_reference
from kernels.reference.attention import pad

from .. import shapes
from ..context import Context
from .rules import DTYPES, Cases, compare


def random_parents(dice: random.Random, count: int) -> list[int]:
    """A tree of `count` tokens, half of which follow the one before them; -1: the text."""
    return [token - 1 if dice.random() < 0.5 else dice.randrange(-1, token) for token in range(count)]


def batch_tree(dice: random.Random, before: list[int], width: int) -> BatchTree:
    """Random trees whose last `width` tokens are new, behind `before` that were fed."""
    tree = BatchTree([], [], before)
    for first in before:
        seen: list[int] = []
        for token, parent in enumerate(random_parents(dice, first + width)):
            seen.append((seen[parent] if parent >= 0 else 0) | 1 << token)
        tree.sees.append(seen[first:])
        tree.depths.append([bin(one).count("1") - 1 for one in seen[first:]])
    return tree


def grown(ctx: Context, lengths: list[int], before: list[int], width: int) -> AttentionPlan:
    """The plan of a step of random trees."""
    tree = token_tree(batch_tree(random.Random(ctx.seed + width), before, width), ctx.device)
    return AttentionPlan(torch.tensor(lengths, device=ctx.device), lengths, width, tree=tree)


def tree_cases(ctx: Context) -> Cases:
    """Attention, rotation, a captured step, and the walk."""
    yield from _attention_cases(ctx)
    yield ("rotate", 0), "trees: rotation by position", lambda: _rotation(ctx)
    yield ("captured", 0), "trees: captured steps", lambda: _captured(ctx)
    for temperature, top_p, drawn in ((1.0, 1.0, True), (0.7, 0.95, True), (1.0, 1.0, False)):
        params = SamplingParams(temperature, top_p=top_p)
        label = f"trees: walk {temperature} {top_p} drawn={drawn}"
        yield ("walk", 0), label, partial(_walk, ctx, params, drawn)


def _attention_cases(ctx: Context) -> Cases:
    dims = (64,) if ctx.dry else (64, 128) if ctx.short else (64, 80, 128, 256)
    widths = (3,) if ctx.dry else (1, 9, 17, MOST_TREE)
    extras: list[dict[str, Any]] = [{}] if ctx.dry else [{}, {"window": 20, "softcap": 20.0}]
    longest = 30 if ctx.dry else 1500
    for dim, dtype, width, extra in itertools.product(dims, DTYPES[:1] if ctx.dry else DTYPES, widths, extras):

        def case(dim: int = dim, dtype: torch.dtype = dtype, width: int = width, extra: Any = extra) -> None:
            from kernels.triton.attention import fused

            before = torch.randint(0, MOST_TREE - width + 1, (4,)).tolist()
            lengths = [
                first + base for first, base in zip(before, torch.randint(0, longest, (4,)).tolist(), strict=True)
            ]
            step = grown(ctx, lengths, before, width)
            query = torch.randn(4, 8, width, dim, device=ctx.device).to(dtype)
            key, value = torch.randn(2, 4, 2, step.extent, dim, device=ctx.device).to(dtype)
            exact = pad(query.double(), key.double(), value.double(), step, scaling=0.1, **extra)
            plain = pad(query, key, value, step, scaling=0.1, **extra)
            for parts in (False, True):
                compare(fused(query, key, value, step, scaling=0.1, parts=parts, **extra), plain, exact)

        yield (dim, dtype, "tree"), f"trees: D={dim} S={width} {dtype} {extra}", case


def _rotation(ctx: Context) -> None:
    from kernels.triton.cache_write import rotate_write

    step = grown(ctx, [13, 4, 40], [3, 0, 9], 5)
    qkv = torch.randn(3, 5, 12, 64, device=ctx.device)
    cache = torch.randn(2, 4, 2, 64, 64, device=ctx.device)
    angles = torch.outer(torch.arange(64.0), 1.0 / torch.arange(1, 33)).to(ctx.device)
    expected, expected_cache, turns = qkv.clone(), cache.clone(), (angles.cos(), angles.sin())
    rotate_write(qkv, cache, step.lengths, *turns, positions=step.positions)
    cache_reference.rotate_write(expected, expected_cache, step.lengths, *turns, positions=step.positions)
    torch.testing.assert_close(qkv, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(cache, expected_cache, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def _captured(ctx: Context) -> None:
    """Different trees of one shape, with a chain between them, in a capture and eagerly."""
    target = shapes.build(shapes.small_config(ctx.dry), ctx.device, torch.float32, ctx.seed, scale=6.0)
    model, dice = LlamaCuda(target), random.Random(ctx.seed)
    runner = GraphRunner(model, 4, 64, model.vocab, ctx.backend, record=record_calls if ctx.dry else None)
    eager, lengths = ModelRunner(model, 4, 64, model.vocab, ctx.backend), [0, 0, 0]
    for is_tree in (False, True, True, False, True):
        ids = torch.randint(1, model.vocab, (3, 7), device=ctx.device)
        tree = batch_tree(dice, [0, 0, 0], 7) if is_tree else None
        mine, theirs = (one.forward(ForwardBatch(ids, lengths, tree=tree)).logits for one in (runner, eager))
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)
        lengths = [length + 2 + row for row, length in enumerate(lengths)]
    if len(runner.slot.steps) != 2:
        raise AssertionError(f"{len(runner.slot.steps)} captures for trees and chains of one shape")


def _walk(ctx: Context, params: SamplingParams, with_drawn: bool) -> None:
    """Trees in which every node's last child was drawn, if any was, and the others are likely tokens."""
    from bass_core.verification.tree_triton import walk_on_device

    vocab, rows, nodes = (50, 6, 7) if ctx.dry else (32000, 48, 16)
    dice, logits = random.Random(ctx.seed), torch.randn(rows, nodes + 1, vocab) * 4
    keys = NoiseKeys(2**40 + 7, torch.arange(rows) * 2**33, torch.randint(0, 9999, (rows,)))
    likely = logits.topk(3, dim=-1).indices.tolist()
    q = probabilities(logits + torch.randn_like(logits), params)
    tokens: list[list[int]] = []
    parents: list[list[int]] = []
    drawn: list[list[int]] = []
    taken: list[Tensor] = []
    for r in range(rows):
        follows = random_parents(dice, nodes)
        last = {parent: draft for draft, parent in enumerate(follows)}
        lives: list[int] = []
        places: list[int] = []
        for draft, parent in enumerate(follows):
            beside = [token for token, other in zip(lives, follows, strict=False) if other == parent]
            if with_drawn and last[parent] == draft:
                rest = q[r, parent + 1].index_fill(0, torch.tensor(beside, dtype=torch.long), 0.0)
                at = place_node(keys.positions[r : r + 1], torch.tensor([parent + 1]))
                one = slice(r, r + 1)
                drew = draw(rest[None], keys.seed, keys.sequence_ids[one], at, keys.stream(Role.DRAFT)[one])
                places.append(len(taken))
                taken.append(rest / rest.sum())
                lives.append(int(drew))
            else:
                places.append(-1)
                lives.append(likely[r][parent + 1][len(beside) % 3])
        tokens.append(lives)
        parents.append(follows)
        drawn.append(places)
    tree = DraftTree(tokens, parents, drawn, torch.stack(taken) if taken else None)
    theirs = verify_tree(logits, tree, keys, params, VERIFICATIONS["rejection"])
    here = NoiseKeys(keys.seed, keys.sequence_ids.to(ctx.device), keys.positions.to(ctx.device))
    probs = None if tree.probs is None else tree.probs.to(ctx.device)
    ours = walk_on_device(logits.to(ctx.device), tokens, parents, drawn, probs, here, params)
    wrong = 0
    for row, ((last_draft, token, _, _), reference) in enumerate(zip(ours, theirs, strict=True)):
        # Where u q is within rounding of p, both answers are right.
        clear = all(not abs(test.u * test.q - test.p) < 1e-5 for test in reference.tests)
        wrong += clear and (tree.path(row, last_draft), token) != (reference.path, reference.next_token)
    if wrong:
        raise AssertionError(f"{wrong} of {rows} rows decide differently")
