"""Products of a packed matrix and any number of vectors, shared by the threads of a call.

Contract: `product` is a phase of a call (threads.py): each chunk of rows is multiplied by all vectors, block by
block, while its weights are in the second-level cache. `starts` int64 [blocks + 1] says which vectors make a block
(`blocks_of`), at most COLUMNS of them; `line` is a row of Packed.line. `linear` is a call with one product.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .calls import pool
from .calls.jit import helper, kernel
from .calls.threads import claim, done, wait
from .elements import float_at, pack, silu
from .kinds import COLUMNS, ROWS, STEP
from .packing import Packed, aligned
from .vectors import call, call_unpack

# Bytes of weights in a chunk: one that several blocks read stays in the second-level cache; one that is read once
# is larger, as memory streams longer (measured on an EPYC with 1 MB of it, 18 to 221 KB, 1 to 16 vectors).
_CHUNK, _STREAM = 110_592, 221_184
# What becomes of a product: y itself, y added to `out`, or silu(gate) * up packed as the next product's vectors.
PLAIN, ADD, GATE = 0, 1, 2
# Rows of a gated matrix come as STEP gates, then their STEP ups, so that a chunk holds both.
_GATED_GROUPS = 2 * STEP // ROWS


def blocks_of(vectors: int) -> np.ndarray[Any, Any]:
    """The first vector of each block, and `vectors` at the end: int64 [blocks + 1], as equal as they can be."""
    blocks = max(1, -(-vectors // COLUMNS))
    return np.arange(blocks + 1, dtype=np.int64) * vectors // blocks


@helper
def product(state, phase, threads, line, starts, short, wide, dot, y, then, out, next_short, next_wide):
    """One phase: y [vectors, 4 x groups] = vectors x weights, and what `then` says becomes of it."""
    groups, steps = line[2], line[3]
    rows = groups * ROWS
    # Quantised weights are unpacked once for all blocks, if there are several.
    unpacked = line[8] != 0 and len(starts) > 2
    wide_size = 2 * ROWS * STEP * steps if unpacked else line[6] * steps
    unit = _GATED_GROUPS if then == GATE else 1
    each = _chunk(groups, wide_size, threads, unit, _STREAM if len(starts) == 2 else _CHUNK)
    chunks = (groups + each - 1) // each
    plain = np.empty(each * wide_size + 64 if unpacked else 0, np.uint8)
    while True:
        chunk = claim(state, phase)
        if chunk >= chunks:
            break
        first = chunk * each
        number = min(each, groups - first)
        weights, multiply = np.uintp(line[0] + first * line[6] * steps), np.uintp(line[1])
        if unpacked:
            aligned_at = (plain.ctypes.data + np.uintp(63)) & ~np.uintp(63)
            call_unpack(np.uintp(line[8]), weights, aligned_at, number, steps)
            weights, multiply = aligned_at, np.uintp(line[9])
        for block in range(len(starts) - 1):
            start, width = starts[block], starts[block + 1] - starts[block]
            x = short.ctypes.data + np.uintp(2 * start * steps * STEP)
            if not dot:
                x = wide.ctypes.data + np.uintp(4 * start * steps * STEP)
            to = y.ctypes.data + np.uintp(4 * (start * rows + first * ROWS))
            call(multiply, width, weights, x, to, number, steps, rows)
            for vector in range(start, start + width):
                at = vector * rows + first * ROWS
                _finish(line, y, at, first * ROWS, number * ROWS)
                if then == ADD:
                    _add(y, at, out, number * ROWS)
                elif then == GATE:
                    place = (
                        start * rows // 2 + (first * ROWS // (2 * STEP)) * width * STEP + (vector - start) * STEP
                    )
                    for step in range(number // _GATED_GROUPS):
                        silu(y, at + 2 * STEP * step, next_short, next_wide, dot, place + step * width * STEP)
        done(state, phase)
    wait(state, phase, chunks)


@helper
def _chunk(groups, size, threads, unit, target):
    """Groups in a chunk: about `target` bytes, as many chunks for each thread, in multiples of `unit`."""
    chunks = threads * max(1, (groups * size + threads * target // 2) // (threads * target))
    return max(1, (groups + chunks * unit - 1) // (chunks * unit)) * unit


@helper
def _finish(line, y, at, row, number):
    """Multiply by the rows' scales and add their biases, where there are any."""
    start, offset = np.uintp(at), np.uintp(4 * row)
    if line[4]:
        for i in range(np.uintp(number)):
            y[start + i] *= float_at(np.uintp(line[4]) + offset + np.uintp(4) * i)
    if line[5]:
        for i in range(np.uintp(number)):
            y[start + i] += float_at(np.uintp(line[5]) + offset + np.uintp(4) * i)


@helper
def _add(y, at, out, number):
    start = np.uintp(at)
    for i in range(np.uintp(number)):
        out[start + i] += y[start + i]


@kernel
def _linear(state, threads, line, x, size, starts, short, wide, y):
    dot = line[7] == 1
    steps = (size + STEP - 1) // STEP
    chunks = len(starts) - 1
    while True:
        block = claim(state, 0)
        if block >= chunks:
            break
        for vector in range(starts[block], starts[block + 1]):
            to = (starts[block] * steps + vector - starts[block]) * STEP
            pack(x, vector * size, size, short, wide, dot, to, starts[block + 1] - starts[block])
        done(state, 0)
    wait(state, 0, chunks)
    product(state, 1, threads, line, starts, short, wide, dot, y, PLAIN, y, short, wide)


def linear(x: Tensor, weight: Packed) -> Tensor:
    """x [..., inputs] float32 times the weight: [..., rows] float32."""
    flat = x.reshape(-1, weight.inputs).contiguous()
    vectors, line = len(flat), np.array(weight.line())
    y = np.empty((vectors, ROWS * int(line[2])), np.float32)
    short, wide = scratch(vectors * int(line[3]) * STEP, weight.dot)
    pool.run(_linear, 2, line, flat.numpy().ravel(), weight.inputs, blocks_of(vectors), short, wide, y.ravel())
    return torch.from_numpy(y)[:, : weight.rows].view(*x.shape[:-1], weight.rows)


def scratch(numbers: int, dot: bool) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Room for packed vectors: uint16 and float32, one of them without numbers; aligned to 64 bytes."""
    none, room = aligned(0), aligned(numbers * (2 if dot else 4))
    return (room.view(np.uint16), none.view(np.float32)) if dot else (none.view(np.uint16), room.view(np.float32))
