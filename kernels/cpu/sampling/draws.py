"""Draws from whole vocabularies by Gumbel-max, without storing the noise.

Contract: `draw` finds the largest of weight / exponential for each key, the lowest index of equals; a row's NaN
counts as the largest, so that it is found. Each chunk of CHUNK weights is searched the same way by every thread
that searches it. The noise is bass_core/sample/noise.py's; the exponential of a uniform u is -log(1 - u), rounded
to nearest.

Since -log(1 - u) >= u, a weight below u times the best score so far can't win: its logarithm is never computed.
"""

from __future__ import annotations

import math

import numpy as np

from ..calls.jit import helper, kernel
from ..calls.threads import claim, done, wait
from .noise import hashed, uniform

# Numbers in a chunk, and numbers that are looked at together.
CHUNK, BLOCK = 4096, 128
# A little below 1, for what rounding takes from a quotient.
_SLACK = np.float32(1 - 2**-20)


@helper
def _search(weights, start, tokens, given, at, size, first, second, uniforms):
    """(best score, its index) of weights[start + at : start + at + size]; `tokens`: see `draw`."""
    best, place = np.float32(-np.inf), at
    block = at
    while block < at + size:
        few, base = np.uintp(min(BLOCK, at + size - block)), np.uintp(start + block)
        if given:
            for j in range(few):
                uniforms[j] = uniform(hashed(tokens[np.uintp(block) + j], first, second))
        else:
            for j in range(few):
                uniforms[j] = uniform(hashed(np.uint32(block) + np.uint32(j), first, second))
        limit = best * _SLACK
        hopeful = False
        for j in range(few):
            hopeful |= not weights[base + j] < limit * uniforms[j]
        if hopeful:
            for j in range(few):
                weight = weights[base + j]
                if not weight < limit * uniforms[j]:
                    score = weight / np.float32(-math.log1p(-np.float64(uniforms[j])))
                    if score != score:
                        return score, block + np.int64(j)
                    if score > best:
                        best, place, limit = score, block + np.int64(j), score * _SLACK
        block += BLOCK
    return best, place


@kernel
def draw(state, threads, weights, size, tokens, given, firsts, seconds, scores, places):
    """The best score of each chunk, scores float32 [rows * chunks], and its column, places int64.

    weights: float32 [rows * size]; firsts, seconds int64 [rows]: two words of the hash of each row's key; tokens
    int64 [size]: what the columns stand for, if `given`; else the columns themselves.
    """
    chunks = (size + CHUNK - 1) // CHUNK
    count = len(firsts) * chunks
    uniforms = np.empty(BLOCK, np.float32)
    one = claim(state, 0)
    while one < count:
        row, start = one // chunks, one % chunks * CHUNK
        first, second, few = np.uint32(firsts[row]), np.uint32(seconds[row]), min(CHUNK, size - start)
        found = _search(weights, row * size, tokens, given, start, few, first, second, uniforms)
        scores[one], places[one] = found
        done(state, 0)
        one = claim(state, 0)
    wait(state, 0, count)


@helper
def draw_row(weights, start, size, tokens, first, second, uniforms):
    """The column of weights[start : start + size] that `draw` finds; tokens: what the columns stand for."""
    best, place, key = np.float32(-np.inf), 0, (np.uint32(first), np.uint32(second))
    for at in range(0, size, CHUNK):
        score, found = _search(weights, start, tokens, True, at, min(CHUNK, size - at), *key, uniforms)
        if not score <= best:
            best, place = score, found
        if score != score:
            break
    return place
