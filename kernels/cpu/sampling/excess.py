"""What block verification sums over whole vocabularies (bass_core/verify/block.py).

Contract: rows are cut into chunks of CHUNK numbers, each of which is summed the same way by any thread. So a
row's sums have the same bits alone or among others, on any number of threads. Arrays are contiguous.
"""

from __future__ import annotations

import numpy as np

from ..calls.jit import helper, kernel
from ..calls.threads import claim, done, wait

# Numbers in a chunk, and partial sums of it.
CHUNK, LANES = 4096, 64


@helper
def _sum(p, at, q, q_at, size, reach, lanes):
    """The sum of max(reach p - q, 0) over `size` numbers from p[at] and q[q_at] on."""
    one, whole = np.uintp(LANES), np.uintp(size) // np.uintp(LANES)
    for j in range(one):
        lanes[j] = np.float32(0.0)
    for i in range(whole):
        left, right = np.uintp(at) + i * one, np.uintp(q_at) + i * one
        for j in range(one):
            more = reach * p[left + j] - q[right + j]
            lanes[j] += more if more > np.float32(0.0) else np.float32(0.0)
    left, right = np.uintp(at) + whole * one, np.uintp(q_at) + whole * one
    for j in range(np.uintp(size) - whole * one):
        more = reach * p[left + j] - q[right + j]
        lanes[j] += more if more > np.float32(0.0) else np.float32(0.0)
    total = 0.0
    for j in range(one):
        total += lanes[j]
    return total


@kernel
def excess(state, threads, p, q, size, width, counts, reach, sums):
    """sums float64 [rows * (width - 1) * chunks]: of each chunk after drafts 1 to width - 1 of each row.

    p float32 [rows * (width + 1) * size], q float32 [rows * width * size], reach float32 [rows * (width + 1)].
    counts int64 [rows]: each row's drafts; 0 after its last one and what follows.
    """
    chunks, places = (size + CHUNK - 1) // CHUNK, width - 1
    count = len(counts) * places * chunks
    lanes = np.empty(LANES, np.float32)
    one = claim(state, 0)
    while one < count:
        row, i, start = one // (places * chunks), 1 + one // chunks % places, one % chunks * CHUNK
        sums[one] = 0.0
        if i < counts[row]:
            at, q_at = (row * (width + 1) + i) * size + start, (row * width + i) * size + start
            factor = reach[row * (width + 1) + i]
            sums[one] = _sum(p, at, q, q_at, min(CHUNK, size - start), factor, lanes)
        done(state, 0)
        one = claim(state, 0)
    wait(state, 0, count)
