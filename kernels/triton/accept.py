"""Verify the drafts of all rows in one launch, and draw tokens by Gumbel-max.

`accept` launches once per round, with one program per row: it tests the row's drafts, then makes one pass over the
vocabulary to draw the token after the accepted ones. For BLOCK, kernels/triton/block.py launches before it. `draw`
launches once, with one program per key. Nothing is read on the host. Invariant: given the same probabilities and
noise, results equal those of the torch references, bass_core/verify/rejection.py and bass_core/sample/draw.py.

Temperature, top-k and top-p are applied before (bass_core/sample/distribution.py).
"""

from __future__ import annotations

from enum import IntEnum

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..support import interpreting, why_unavailable
from .launch import launch
from .noise import exponential, to_uniform, token_uniforms, words

BLOCK_V = 2048
WARPS = 8
# Rows per program under Triton's interpreter, whose time grows with the number of programs; 1 on a GPU.
_ROWS_INTERPRETED = 16


class AcceptRule(IntEnum):
    """The condition for accepting a draft.

    REJECTION: u < p / q. CHOICES: the draft is the token that the target chose. COIN: u < chance, which is the
    same for all drafts. BLOCK: the draft or a later one has u < its chance, which kernels/triton/block.py
    computed.
    """

    REJECTION = 0
    CHOICES = 1
    COIN = 2
    BLOCK = 3


# The outputs lie one after another in one tensor, so their alignment depends on the batch. Don't compile a variant
# for each alignment.
@triton.jit(
    do_not_specialize=["batch", "width"],
    do_not_specialize_on_alignment=["next_out", "p_out", "q_out", "u_out"],
)
def decide(
    p, q, drafts, num_drafted, choices, chances, reach, sequences, positions, begins, seed,
    accepted_out, next_out, p_out, q_out, u_out,
    chance, batch, width, vocab,
    VERIFICATION: tl.constexpr, SOFT: tl.constexpr, DRAWN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Verify ROWS rows per program.

    SOFT: q is given. DRAWN: the next token is drawn; without DRAWN it is taken from choices. BLOCK: chances[i]
    tests draft i, and the p of a recovered token is multiplied by reach[accepted].

    The noise streams are those of bass_core/sample/noise.py: 0 for the target's draws, 8 * begin + 2 for
    acceptance, 8 * begin + 3 for residual draws, and 8 * begin + 4 for synthetic acceptance.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_exists = row < batch
    # One hash call serves both uses: the upper half of the lanes tests draft i, the lower half draws the token
    # after i accepted drafts.
    lane = tl.arange(0, BLOCK_L)[None, :]
    i = lane % (BLOCK_L // 2)
    tests = lane >= BLOCK_L // 2
    draft_exists = row_exists[:, None] & (i < width)
    is_test = draft_exists & tests
    count = tl.load(num_drafted + row, mask=row_exists, other=0)[:, None]
    seed_low = tl.load(seed).to(tl.uint32)
    seed_high = (tl.load(seed) >> 32).to(tl.uint32)
    at = row[:, None] * width + i
    draft = tl.load(drafts + at, mask=draft_exists, other=0)
    p_row = p + row[:, None] * (width + 1) * vocab
    q_row = q + row[:, None] * width * vocab
    begin = 8 * tl.load(begins + row, mask=row_exists, other=0)[:, None]
    JUDGED: tl.constexpr = VERIFICATION == 0 or VERIFICATION == 3
    draw_stream = tl.where((i < count) & JUDGED, begin + 3, 0)
    stream = tl.where(tests, begin + (4 if VERIFICATION == 2 else 2), draw_stream)
    sequence = tl.load(sequences + row, mask=row_exists, other=0)[:, None]
    position = tl.load(positions + row, mask=row_exists, other=0)[:, None] + i
    first, second, _, _ = words(seed_low, seed_high, sequence, position, stream)
    u = to_uniform(first)
    ones = u * 0.0 + 1.0
    p_draft = ones * chance
    q_draft = ones
    if SOFT:
        q_draft = tl.load(q_row + i * vocab + draft, mask=is_test, other=1.0)
    if VERIFICATION == 2:
        passes = u < p_draft
    elif VERIFICATION == 1:
        choice = tl.load(choices + row[:, None] * (width + 1) + i, mask=is_test, other=-1)
        passes = choice == draft
        u = ones * 0.5
        p_draft = passes.to(tl.float32)
    else:
        p_draft = tl.load(p_row + i * vocab + draft, mask=is_test, other=0.0)
        passes = u * q_draft < p_draft
    if VERIFICATION == 3:
        passes = u < tl.load(chances + at, mask=is_test, other=0.0)
        accepted = tl.max(tl.where(is_test & passes & (i < count), i + 1, 0), 1)
    else:
        # The accepted drafts end before the first position whose draft was rejected or that has no draft.
        accepted = tl.min(tl.where(is_test & ~(passes & (i < count)), i, width), 1)
    tl.store(accepted_out + row, accepted.to(tl.int64), mask=row_exists)
    tl.store(p_out + at, p_draft, mask=is_test)
    tl.store(q_out + at, q_draft, mask=is_test)
    tl.store(u_out + at, u, mask=is_test)
    if DRAWN:
        here = (i == accepted[:, None]) & ~tests
        first = tl.max(tl.where(here, first, 0), 1)[:, None]
        second = tl.max(tl.where(here, second, 0), 1)[:, None]
        rejected_draft = tl.max(tl.where(here, draft, 0), 1)[:, None]
        rejected = JUDGED & (accepted[:, None] < count)
        factor = tl.full([ROWS, 1], 1.0, tl.float32)
        if VERIFICATION == 3:
            factor = tl.load(reach + row * (width + 1) + accepted, mask=row_exists, other=1.0)[:, None]
        # If max(p - q, 0) is zero everywhere, the token is drawn from p with the same noise, so track both maxima.
        best = tl.full([ROWS, BLOCK_V], -1.0, tl.float32)
        best_at = tl.zeros([ROWS, BLOCK_V], tl.int32)
        plain = tl.full([ROWS, BLOCK_V], -1.0, tl.float32)
        plain_at = tl.zeros([ROWS, BLOCK_V], tl.int32)
        for start in range(0, vocab, BLOCK_V):
            token = start + tl.arange(0, BLOCK_V)[None, :]
            exists = row_exists[:, None] & (token < vocab)
            weight = tl.load(p_row + accepted[:, None] * vocab + token, mask=exists, other=0.0)
            noise = exponential(token_uniforms(first, second, token))
            score = tl.where(exists, weight / noise, -1.0)
            plain_at = tl.where(score > plain, token, plain_at)
            plain = tl.maximum(score, plain)
            if JUDGED:
                if SOFT:
                    taken = tl.load(q_row + accepted[:, None] * vocab + token, mask=exists & rejected, other=0.0)
                    left = tl.maximum(factor * weight - taken, 0.0)
                else:
                    left = tl.where(token == rejected_draft, 0.0, weight)
                score = tl.where(exists, left / noise, -1.0)
                best_at = tl.where(score > best, token, best_at)
                best = tl.maximum(score, best)
        top, token = first_best(plain, plain_at)
        if JUDGED:
            top, other = first_best(best, best_at)
            token = tl.where((accepted < tl.max(count, 1)) & (top > 0.0), other, token)
        # If all scores are NaN, no token is best. The caller refuses such logits, but needs a valid id here.
        tl.store(next_out + row, tl.minimum(token, vocab - 1).to(tl.int64), mask=row_exists)
    else:
        token = tl.load(choices + row * (width + 1) + accepted, mask=row_exists, other=0)
        tl.store(next_out + row, token, mask=row_exists)


@triton.jit
def first_best(scores, tokens):
    """Return the highest score of each row [R, V], and the lowest token id that has it, like argmax."""
    top = tl.max(scores, 1)
    return top, tl.min(tl.where(scores == top[:, None], tokens, 2147483647), 1)


@triton.jit
def gumbel(
    weights, sequences, positions, streams, seed, ids, out, vocab, NAMED: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    """Draw a column of row r of weights float32 [R, V] in program r. NAMED: column c is token ids[c]."""
    row = tl.program_id(0).to(tl.int64)
    seed_low = tl.load(seed).to(tl.uint32)
    seed_high = (tl.load(seed) >> 32).to(tl.uint32)
    position = tl.load(positions + row)
    stream = tl.load(streams + row)
    first, second, _, _ = words(seed_low, seed_high, tl.load(sequences + row), position, stream)
    best = tl.full([1, BLOCK_V], -1.0, tl.float32)
    best_at = tl.zeros([1, BLOCK_V], tl.int32)
    for start in range(0, vocab, BLOCK_V):
        token = start + tl.arange(0, BLOCK_V)[None, :]
        exists = token < vocab
        weight = tl.load(weights + row * vocab + token, mask=exists, other=0.0)
        name = token
        if NAMED:
            name = tl.load(ids + token, mask=exists, other=0).to(tl.int32)
        score = tl.where(exists, weight / exponential(token_uniforms(first, second, name)), -1.0)
        best_at = tl.where(score > best, token, best_at)
        best = tl.maximum(score, best)
    _, token = first_best(best, best_at)
    tl.store(out + row + tl.arange(0, 1), tl.minimum(token, vocab - 1).to(tl.int64))


def lanes(width: int) -> int:
    """Return BLOCK_L of `decide` for up to `width` drafts per row: one of few sizes, each compiled separately."""
    return next((size for size in (16, 128) if 2 * (width + 1) <= size), 2 * triton.next_power_of_2(width + 1))


def accept(
    p: Tensor | None,
    q: Tensor | None,
    drafts: Tensor,
    num_drafted: Tensor,
    choices: Tensor | None,
    sequences: Tensor,
    positions: Tensor,
    seed: Tensor,
    *,
    begins: Tensor | None = None,
    verification: AcceptRule,
    chance: float = 0.0,
    block: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Verify drafts, and choose the next token of each row.

    Args:
        p: float32 [B, l+1, V]; None if it is not needed.
        q: float32 [B, l, V], None for point masses.
        drafts: int64 [B, l].
        num_drafted: int64 [B], drafts per row; the rest of `drafts` is padding.
        choices: int64 [B, l+1], the target's own tokens, from which the next token is taken; None to draw it.
        sequences, positions: int64 [B], the noise key of the round's first token.
        seed: int64 [1] on the device.
        begins: int64 [B], where each row's epoch began; None outside AMUSD.
        chance: the chance of a COIN.
        block: the result of `chances` (kernels/triton/block.py), for BLOCK.

    Returns:
        accepted and next_token int64 [B], and p, q, u float32 [B, l] of each draft.

    Raises:
        ValueError: if shapes do not fit, or an argument that the rule needs is missing.
    """
    batch, width = drafts.shape
    _check(drafts)
    per_position = p if p is not None else choices
    if (
        per_position is None
        or per_position.shape[:2] != (batch, width + 1)
        or (verification == AcceptRule.CHOICES and choices is None)
    ):
        raise ValueError("accept needs p or the target's choices for each drafted position and one more.")
    if verification in (AcceptRule.REJECTION, AcceptRule.BLOCK) and p is None:
        raise ValueError(f"{verification.name} needs p.")
    if verification == AcceptRule.BLOCK and block is None:
        raise ValueError("BLOCK needs the chances.")
    if q is not None and (p is None or q.shape != (batch, width, p.shape[2])):
        raise ValueError(f"q has shape {tuple(q.shape)}, which does not fit p.")
    accepted, next_token = torch.empty(2, batch, dtype=torch.int64, device=drafts.device).unbind(0)
    tested = torch.empty(3, batch, width, device=drafts.device).unbind(0)
    chances, reach = block or (tested[0], tested[0])
    rows = _ROWS_INTERPRETED if interpreting() else 1
    launch(decide, (triton.cdiv(batch, rows),),
        _dense(p, tested[0]), _dense(q, tested[0]), drafts.contiguous(), num_drafted,
        drafts if choices is None else choices.contiguous(), chances, reach, sequences, positions,
        positions if begins is None else begins, seed,
        accepted, next_token, *tested, chance, batch, width, 0 if p is None else p.shape[2],
        VERIFICATION=int(verification), SOFT=q is not None, DRAWN=choices is None, ROWS=rows,
        BLOCK_L=lanes(width), BLOCK_V=BLOCK_V, num_warps=WARPS,
    )  # fmt: skip
    p_draft, q_draft, u = tested
    return accepted, next_token, p_draft, q_draft, u


def draw(
    weights: Tensor, sequences: Tensor, positions: Tensor, streams: Tensor, seed: Tensor, ids: Tensor | None = None
) -> Tensor:
    """Draw one column per key from weights float32 [..., V] by Gumbel-max: int64 [...].

    Args:
        sequences, positions, streams: int64, the keys, broadcast to [...].
        seed: int64 [1] on the device.
        ids: int64 [V], the token ids of the columns; None if they are 0 to V - 1.
    """
    _check(weights)
    shape = weights.shape[:-1]
    keys = [key.expand(shape).contiguous() for key in (sequences, positions, streams)]
    out = torch.empty(shape, dtype=torch.int64, device=weights.device)
    if out.numel():
        launch(gumbel, (out.numel(),),
            _dense(weights, weights), *keys, seed, out if ids is None else ids, out, weights.shape[-1],
            NAMED=ids is not None, BLOCK_V=BLOCK_V, num_warps=WARPS,
        )  # fmt: skip
    return out


def _dense(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """Return the tensor as contiguous float32; for None return `stand_in`, which the kernel does not read."""
    return stand_in if tensor is None else tensor.float().contiguous()


def _check(tensor: Tensor) -> None:
    reason = why_unavailable(tensor.device)
    if reason:
        raise ValueError(f"the kernel can't run: {reason}.")
