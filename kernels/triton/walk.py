"""Verify trees of drafts in one launch: the sampled walk of bass_core/verify/tree.py.

One program walks one row from its newest token to the token that ends the round; nothing is read on the host. At
each node it tests the child that was drawn, if there is one, in float64 like the reference. If that child is
rejected or missing, it makes one pass over the vocabulary for the target's draw. Invariant: given the same
probabilities and noise, a row's decisions are those of the torch reference.

Greedy and coupled trees need no kernel. Temperature, top-k and top-p are applied before
(bass_core/sample/distribution.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..support import why_unavailable
from .launch import launch
from .noise import exponential, to_uniform, token_uniforms, words

BLOCK_V = 2048
WARPS = 8
# The most drafts of a row: its tree has up to 63 tokens, including the newest one (MAX_TREE_TOKENS in plan.py).
MAX_DRAFTS = 62
BLOCK_N: tl.constexpr = tl.constexpr(64)


# The outputs lie one after another in one tensor, so their alignment depends on the batch. Don't compile a variant
# for each alignment.
@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["p_out", "q_out", "u_out"])
def walk(
    p, q, tokens, parents, drawn, sequences, positions, begins, seed, ends, chances, p_out, q_out, u_out,
    width, vocab, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Walk row b in program b.

    drawn: as in `walk_trees`, but any value below -1 marks a lane whose draft is not a child.
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_N)
    draft_exists = lane < width
    token_of = tl.load(tokens + row * width + lane, mask=draft_exists, other=-1)
    parent_of = tl.load(parents + row * width + lane, mask=draft_exists, other=-2)
    q_row_of = tl.load(drawn + row * width + lane, mask=draft_exists, other=-2)
    seed_low = tl.load(seed).to(tl.uint32)
    seed_high = (tl.load(seed) >> 32).to(tl.uint32)
    sequence = tl.load(sequences + row)
    first_position = tl.load(positions + row)
    begin = 8 * tl.load(begins + row)
    p_tests = tl.full([BLOCK_N], float("nan"), tl.float32)
    q_tests, u_tests = p_tests, p_tests
    node = tl.full((), -1, tl.int64)
    end = node
    depth = tl.full((), 0, tl.int64)
    end_chance = tl.full((), 0.0, tl.float32)
    going = node < 0
    while going:
        position = first_position + depth
        p_at = p + (row * (width + 1) + node + 1) * vocab
        children = parent_of == node
        drawn_child = tl.max(tl.where(children & (q_row_of >= 0), lane, -1), 0)
        here = lane == drawn_child
        drawn_draft = tl.sum(tl.where(here, token_of, 0), 0)
        q_at = q + tl.sum(tl.where(here, q_row_of, 0), 0) * vocab
        tested = drawn_child >= 0
        chance = tl.load(p_at + drawn_draft, mask=tested, other=0.0)
        proposed = tl.load(q_at + drawn_draft, mask=tested, other=0.0)
        word, _, _, _ = words(seed_low, seed_high, sequence, position, begin + 2)
        coin = to_uniform(word)
        p_tests = tl.where(here, chance, p_tests)
        q_tests = tl.where(here, proposed, q_tests)
        u_tests = tl.where(here, coin, u_tests)
        if tested & (coin.to(tl.float64) * proposed.to(tl.float64) < chance.to(tl.float64)):
            node = drawn_child.to(tl.int64)
        else:
            stream = tl.where(tested, begin + 3, 0)
            first, second, _, _ = words(seed_low, seed_high, sequence, position, stream)
            token = drawn_token(p_at, q_at, tested, vocab, first, second, BLOCK_V)
            chance = tl.load(p_at + token)
            others = children & (q_row_of == -1)
            p_tests = tl.where(others, tl.load(p_at + token_of, mask=others, other=0.0), p_tests)
            q_tests = tl.where(others, 1.0, q_tests)
            following = tl.min(tl.where(others & (token_of == token), lane, BLOCK_N), 0)
            if (following < BLOCK_N) & (chance > 0.0):
                node = following.to(tl.int64)
            else:
                end = token.to(tl.int64)
                end_chance = chance
                going = node < -1
        depth += 1
    tl.store(ends + row * 2, node)
    tl.store(ends + row * 2 + 1, end)
    tl.store(chances + row, end_chance)
    tl.store(p_out + row * width + lane, p_tests, mask=draft_exists)
    tl.store(q_out + row * width + lane, q_tests, mask=draft_exists)
    tl.store(u_out + row * width + lane, u_tests, mask=draft_exists)


@triton.jit
def drawn_token(p_at, q_at, rejected, vocab, first, second, BLOCK_V: tl.constexpr):
    """Draw a token by Gumbel-max: from p, or after a rejected draft from max(p - q, 0).

    If max(p - q, 0) is 0 everywhere, draw from p.
    """
    # Track both maxima in one pass, with the same noise.
    plain = tl.full([BLOCK_V], -1.0, tl.float32)
    best = plain
    plain_at = tl.zeros([BLOCK_V], tl.int32)
    best_at = plain_at
    # Read nothing of q if no draft was rejected.
    q_size = tl.where(rejected, vocab, 0)
    for start in range(0, vocab, BLOCK_V):
        token = start + tl.arange(0, BLOCK_V)
        exists = token < vocab
        weight = tl.load(p_at + token, mask=exists, other=0.0)
        taken = tl.load(q_at + token, mask=token < q_size, other=0.0)
        noise = exponential(token_uniforms(first, second, token))
        score = tl.where(exists, weight / noise, -1.0)
        plain_at = tl.where(score > plain, token, plain_at)
        plain = tl.maximum(score, plain)
        left = tl.where(exists, tl.maximum(weight - taken, 0.0) / noise, -1.0)
        best_at = tl.where(left > best, token, best_at)
        best = tl.maximum(left, best)
    top = tl.max(best, 0)
    # On ties take the lowest token, like argmax.
    chosen = tl.min(tl.where(best == top, best_at, 2147483647), 0)
    plain_choice = tl.min(tl.where(plain == tl.max(plain, 0), plain_at, 2147483647), 0)
    # If all scores are NaN, no token is best. The caller refuses such logits, but needs a valid id here.
    return tl.minimum(tl.where(rejected & (top > 0.0), chosen, plain_choice), vocab - 1)


def walk_trees(
    p: Tensor,
    q: Tensor | None,
    tokens: Tensor,
    parents: Tensor,
    drawn: Tensor,
    sequences: Tensor,
    positions: Tensor,
    begins: Tensor,
    seed: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Walk the trees of all rows.

    Args:
        p: float32 [B, 1 + N, V], the target's distributions after the newest token and after each draft.
        q: float32 [D, V], the distributions of the drawn drafts.
        tokens: int64 [B, N], the drafts.
        parents: int64 [B, N], each draft's parent, which precedes it; -1 is the newest token, -2 padding.
        drawn: int64 [B, N], each draft's row of q; -1 if it was not drawn, -2 for padding, and for drafts that are
            not to be treated as children.
        sequences, positions, begins: int64 [B], as in accept.py.
        seed: int64 [1].

    Returns:
        ends int64 [B, 2]: the last draft of each row's path (-1: none), and the token after it; chances float32
        [B]: the target's chance of that token; and p, q, u float32 [B, N] of the drafts, NaN for those that were
        not tested.

    Raises:
        ValueError: if shapes do not fit.
    """
    batch, width = tokens.shape
    reason = why_unavailable(tokens.device)
    if reason:
        raise ValueError(f"the kernel can't run: {reason}.")
    if p.shape[:2] != (batch, width + 1) or width > MAX_DRAFTS:
        raise ValueError(f"p of shape {tuple(p.shape)} does not fit {batch} rows of {width} drafts.")
    if parents.shape != tokens.shape or drawn.shape != tokens.shape:
        raise ValueError(
            f"{tuple(parents.shape)} parents or {tuple(drawn.shape)} rows of q do not fit the drafts."
        )
    if q is not None and q.shape[1:] != p.shape[2:]:
        raise ValueError(f"q has shape {tuple(q.shape)}, which does not fit p.")
    p = p.float().contiguous()
    ends = torch.empty(batch, 2, dtype=torch.int64, device=p.device)
    chances = torch.empty(batch, device=p.device)
    tests = torch.empty(3, batch, width, device=p.device).unbind(0)
    launch(walk, (batch,),
        p, p if q is None else q.float().contiguous(), tokens.contiguous(), parents.contiguous(),
        drawn.contiguous(), sequences, positions, begins, seed, ends, chances, *tests, width, p.shape[2],
        BLOCK_V=BLOCK_V, num_warps=WARPS,
    )  # fmt: skip
    p_drafts, q_drafts, coins = tests
    return ends, chances, p_drafts, q_drafts, coins
