"""Raise the logit of the token that followed a text's last words before, in one launch.

The torch reference is `followers` and `Pointer` in bass_core/model/pointer.py. One program per position searches
its row's text backwards and forwards at once: it compares its last tokens with the text's. Invariant: the same
token and match length as the reference; the increase is summed in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..support import why_unavailable
from .launch import launch

BLOCK_T = 1024
WARPS = 4


@triton.jit(do_not_specialize=["positions", "vocab", "hidden", "row_columns", "vocab_ids"])
def point(
    logits, states, last, text, ends, columns, weight, by_size, positions, vocab, hidden, row_columns, vocab_ids,
    SHORTEST: tl.constexpr, LONGEST: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Add to one logit of row n of logits [N, vocab], in place, in program n.

    Args:
        states: [N, hidden].
        last: int64 [N, LONGEST], the last tokens, newest first, -1 before the text begins.
        text: int64 [R, row_columns], of which row r = n // positions is searched, its first ends[r] tokens.
        columns: int64 [vocab_ids], the logit's column of each token id, or -1.
    """
    row = tl.program_id(0).to(tl.int64)
    searched = row // positions
    end = tl.load(ends + searched).to(tl.int32)
    own = text + searched * row_columns
    best = tl.zeros([BLOCK_T], tl.int64)
    for start in range(0, end - 1, BLOCK_T):
        at = start + tl.arange(0, BLOCK_T)
        # A match counts only if a token follows it.
        alike = at < end - 1
        size = tl.zeros([BLOCK_T], tl.int32)
        for back in tl.static_range(LONGEST):
            wanted = tl.load(last + row * LONGEST + back)
            # -2 equals no wanted token; -1 is wanted where there is none.
            token = tl.load(own + at - back, mask=alike & (at >= back), other=-2)
            alike = alike & (token == wanted)
            size += alike.to(tl.int32)
        # Longer matches first, then later ones.
        best = tl.maximum(best, tl.where(size > 0, size.to(tl.int64) * row_columns + at, 0))
    found = tl.max(best, 0)
    size = (found // row_columns).to(tl.int32)
    matches = (size >= SHORTEST) & (end > 1)
    token = tl.load(own + tl.where(matches, found % row_columns + 1, 0))
    named = matches & (token < vocab_ids)
    column = tl.where(named, tl.load(columns + tl.where(named, token, 0)), -1)
    total = tl.zeros([BLOCK_T], tl.float32)
    for start in range(0, hidden, BLOCK_T):
        at = start + tl.arange(0, BLOCK_T)
        state = tl.load(states + row * hidden + at, mask=at < hidden, other=0.0).to(tl.float32)
        total += state * tl.load(weight + at, mask=at < hidden, other=0.0).to(tl.float32)
    lift = tl.sum(total, 0) + tl.load(by_size + tl.maximum(size - SHORTEST, 0)).to(tl.float32)
    place = logits + row * vocab + tl.maximum(column, 0)
    number = tl.load(place)
    # Round the increase first, as the reference does.
    raised = number.to(tl.float32) + lift.to(number.dtype).to(tl.float32)
    tl.store(place, tl.where(column >= 0, raised.to(number.dtype), number))


def add(
    logits: Tensor, states: Tensor, last: Tensor, text: Tensor, ends: Tensor, columns: Tensor, weight: Tensor,
    by_size: Tensor, shortest: int,
) -> None:  # fmt: skip
    """Add the pointer's increases to logits [N, V'], in place.

    Args:
        logits: contiguous; N / R positions after each of R texts, text by text.
        states: the head's states [N, hidden].
        last: int64 [N, LONGEST].
        text: int64 [R, T], rows at any stride, of which ends[r] tokens are searched.
        ends: int64 [R].
        columns: int64 [V], each token id's column or -1.
        weight, by_size: the pointer's parameters.
        shortest: length of the shortest match to use.

    Raises:
        ValueError: if the kernel can't run, or logits, text or columns have gaps.
    """
    reason = why_unavailable(logits.device)
    if reason:
        raise ValueError(f"the kernel can't run: {reason}.")
    if not (logits.is_contiguous() and text.stride(1) == columns.stride(0) == 1):
        raise ValueError("logits, text and columns must have no gaps.")
    launch(
        point, (len(logits),),
        logits, states.contiguous(), last.contiguous(), text, ends.contiguous(), columns, weight, by_size,
        len(logits) // len(text), logits.shape[1], states.shape[1], text.stride(0), len(columns),
        SHORTEST=shortest, LONGEST=last.shape[1], BLOCK_T=BLOCK_T, num_warps=WARPS,
    )  # fmt: skip
