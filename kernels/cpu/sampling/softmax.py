"""Softmax over whole vocabularies.

Contract: rows are cut into chunks of CHUNK numbers; each chunk is computed the same way by any thread, and
chunks are joined in their order. So a row's result is the same alone or among others, on any number of threads.
`softmax` has 3 phases; arrays are contiguous.
"""

from __future__ import annotations

import numpy as np

from ..calls.jit import helper, kernel
from ..calls.threads import claim, done, wait
from ..elements import exp

# Numbers in a chunk, and partial sums or maxima of it.
CHUNK, LANES = 4096, 64


@helper
def _largest(x, start, size, lanes):
    """The largest of x[start : start + size]; NaN is passed over."""
    one, whole = np.uintp(LANES), np.uintp(size) // np.uintp(LANES)
    for j in range(one):
        lanes[j] = np.float32(-np.inf)
    for i in range(whole):
        at = np.uintp(start) + i * one
        for j in range(one):
            lanes[j] = x[at + j] if x[at + j] > lanes[j] else lanes[j]
    at = np.uintp(start) + whole * one
    for j in range(np.uintp(size) - whole * one):
        lanes[j] = x[at + j] if x[at + j] > lanes[j] else lanes[j]
    found = lanes[0]
    for j in range(one):
        found = lanes[j] if lanes[j] > found else found
    return found


@helper
def _exponentials(x, start, size, top, factor, out, to, lanes):
    """out[to : to + size] = exp((x - top) * factor) of x[start : start + size]; returns their sum."""
    one, whole = np.uintp(LANES), np.uintp(size) // np.uintp(LANES)
    for j in range(one):
        lanes[j] = np.float32(0.0)
    for i in range(whole):
        at, into = np.uintp(start) + i * one, np.uintp(to) + i * one
        for j in range(one):
            out[into + j] = exp((x[at + j] - top) * factor)
        for j in range(one):
            lanes[j] += out[into + j]
    at, into = np.uintp(start) + whole * one, np.uintp(to) + whole * one
    for j in range(np.uintp(size) - whole * one):
        out[into + j] = exp((x[at + j] - top) * factor)
        lanes[j] += out[into + j]
    total = 0.0
    for j in range(one):
        total += lanes[j]
    return total


@kernel
def softmax(state, threads, x, size, factor, out, tops, sums):
    """out = the softmax of x * factor over each row of `size` numbers; x, out float32 [rows * size].

    tops float32, sums float64 [rows * chunks]: room. A row that holds NaN, infinity or nothing finite becomes NaN.
    """
    chunks = (size + CHUNK - 1) // CHUNK
    count = len(x) // size * chunks
    lanes = np.empty(LANES, np.float32)
    one = claim(state, 0)
    while one < count:
        start = one % chunks * CHUNK
        tops[one] = _largest(x, one // chunks * size + start, min(CHUNK, size - start), lanes)
        done(state, 0)
        one = claim(state, 0)
    wait(state, 0, count)
    one = claim(state, 1)
    while one < count:
        row, start = one // chunks, one % chunks * CHUNK
        top = tops[row * chunks]
        for i in range(row * chunks, row * chunks + chunks):
            top = max(top, tops[i])
        at = row * size + start
        sums[one] = _exponentials(x, at, min(CHUNK, size - start), top, factor, out, at, lanes)
        done(state, 1)
        one = claim(state, 1)
    wait(state, 1, count)
    one = claim(state, 2)
    while one < count:
        row, start = one // chunks, one % chunks * CHUNK
        total = 0.0
        for i in range(row * chunks, row * chunks + chunks):
            total += sums[i]
        share, at = np.float32(1.0 / total), np.uintp(row * size + start)
        for i in range(np.uintp(min(CHUNK, size - start))):
            out[at + i] *= share
        done(state, 2)
        one = claim(state, 2)
    wait(state, 2, count)


@helper
def softmax_row(x, start, size, factor, out, to):
    """out[to : to + size] = the softmax of x[start : start + size] * factor, as `softmax` computes a row."""
    lanes, top, total = np.empty(LANES, np.float32), np.float32(-np.inf), 0.0
    for first in range(0, size, CHUNK):
        top = max(top, _largest(x, start + first, min(CHUNK, size - first), lanes))
    for first in range(0, size, CHUNK):
        few = min(CHUNK, size - first)
        total += _exponentials(x, start + first, few, top, factor, out, to + first, lanes)
    share, at = np.float32(1.0 / total), np.uintp(to)
    for i in range(np.uintp(size)):
        out[at + i] *= share
