"""Draws from whole vocabularies by Gumbel-max, without storing the noise.

`draw_row` finds the largest of weight / exponential; on ties, the lowest index. NaN counts as the largest, so that
it is found. The noise is that of bass_core/sample/noise.py; the exponential of a uniform u is -log(1 - u), rounded
to nearest.

Since -log(1 - u) >= u, a weight up to u times the best score can't win, and its logarithm is never computed. A
weight up to the smallest u times the best score is skipped before its noise is hashed.
"""

from __future__ import annotations

import math

import numpy as np

from ..calls.jit import helper, kernel
from ..calls.threads import claim, done, wait
from .noise import hashed, uniform

# Numbers that are examined together.
BLOCK = 128
# Limits are multiplied by this number, which is a little below 1. Otherwise a weight that wins because its
# quotient is rounded up could be skipped.
_SLACK = np.float32(1 - 2**-20)
# The smallest uniform (noise.py).
_MIN_UNIFORM = np.float32(2.0**-33)


@helper
def draw_row(weights, start, size, tokens, has_tokens, first, second, uniforms):
    """Return the column of weights[start : start + size] that is drawn with the key words `first` and `second`.

    tokens int64 [size]: the token ids of the columns. Without `has_tokens` it is ignored, and token ids are column
    numbers. uniforms float32 [BLOCK]: scratch.
    """
    first, second = np.uint32(first), np.uint32(second)
    best, place, low = np.float32(-np.inf), 0, np.float32(-np.inf)
    for block in range(0, size, BLOCK):
        few, base = np.uintp(min(BLOCK, size - block)), np.uintp(start + block)
        hopeful = False
        for j in range(few):
            hopeful |= not weights[base + j] <= low
        if not hopeful:
            continue
        if has_tokens:
            for j in range(few):
                uniforms[j] = uniform(hashed(tokens[np.uintp(block) + j], first, second))
        else:
            for j in range(few):
                uniforms[j] = uniform(hashed(np.uint32(block) + np.uint32(j), first, second))
        limit = best * _SLACK
        hopeful = False
        for j in range(few):
            hopeful |= not weights[base + j] <= limit * uniforms[j]
        if hopeful:
            for j in range(few):
                weight = weights[base + j]
                if not weight <= limit * uniforms[j]:
                    score = weight / np.float32(-math.log1p(-np.float64(uniforms[j])))
                    if score != score:
                        return block + np.int64(j)
                    if score > best:
                        best, place, limit = score, block + np.int64(j), score * _SLACK
            low = limit * _MIN_UNIFORM
    return place


@kernel
def draw(state, threads, weights, size, tokens, has_tokens, firsts, seconds, places):
    """Write the column that `draw_row` draws of each row to places int64 [rows].

    Args:
        weights: float32 [rows * size].
        tokens, has_tokens: see `draw_row`.
        firsts, seconds: int64 [rows], two words of the hash of each row's key.
    """
    rows, uniforms = len(firsts), np.empty(BLOCK, np.float32)
    row = claim(state, 0)
    while row < rows:
        words = firsts[row], seconds[row]
        places[row] = draw_row(weights, row * size, size, tokens, has_tokens, words[0], words[1], uniforms)
        done(state, 0)
        row = claim(state, 0)
    wait(state, 0, rows)
