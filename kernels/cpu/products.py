"""Products of a packed matrix and any number of vectors, shared by the threads of a call.

Contract: `product` is a phase of a call (threads.py): each panel of rows is multiplied by all vectors, block by
block, while the next panel is fetched. `starts` int64 [blocks + 1] says which vectors make a block (`blocks_of`);
`line` is a matrix's Line (packing.py). `linear` is a call with one product.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .calls import pool
from .calls.jit import helper, kernel
from .calls.threads import claim, done, wait
from .elements import bytes_of, float_at, pack_all, silu
from .kinds import AS_PAIRS, PANEL, STEP, TILES
from .packing import Line, Packed
from .pages import aligned
from .tiles import ROWS, configure, release
from .vectors import call

# Bytes of weights in a chunk: memory streams longer through larger ones, smaller ones share work more evenly.
_CHUNK = 221_184
# How many bytes before they are read weights are fetched, where each is read once.
_AHEAD = 3072
# What becomes of a product: y itself, y added to `out`, or silu(gate) * up packed as the next product's vectors.
PLAIN, ADD, GATE = 0, 1, 2
# Rows of a gated matrix come as STEP gates, then their STEP ups, so that a chunk holds both.
_GATED_PANELS = 2 * STEP // PANEL


def blocks_of(vectors: int, columns: int) -> np.ndarray[Any, Any]:
    """The first vector of each block of at most `columns`, and `vectors` at the end: int64 [blocks + 1].

    Blocks are as equal as they can be. For example, 50 vectors in blocks of 48 make two blocks of 25.
    """
    blocks = max(1, -(-vectors // columns))
    return np.arange(blocks + 1, dtype=np.int64) * vectors // blocks


@helper
def line_at(lines, index):
    """Row `index` of lines int64 [matrices, 9] as a Line."""
    row = lines[index]
    return Line(row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7], row[8])


@helper
def product(state, phase, threads, line, starts, short, wide, y, then, out, next_short, next_wide, next_form):
    """One phase: the products of a matrix and all vectors, and what `then` says becomes of them.

    A plain product is y [vectors, PANEL x panels]. Otherwise y is scratch, in which each chunk has its own
    [vectors, rows of the chunk]: rows a power of two apart would compete for the same lines of the cache.
    next_form: of the next product's vectors.
    """
    panels, size = line.panels, line.panel_bytes
    each_vector, blocks = bytes_of(line.form), len(starts) - 1
    unit = _GATED_PANELS if then == GATE else 1
    each = _chunk(panels, size, threads, unit, _CHUNK)
    chunks = (panels + each - 1) // each
    chunk = claim(state, phase)
    tiled = TILES and line.form == AS_PAIRS and chunk < chunks and starts[blocks] > 0
    # One configuration serves blocks of equal widths, or of 16 vectors and more.
    narrow = tiled and blocks > 1 and starts[1] - starts[0] < ROWS
    if tiled:
        configure(starts[1] - starts[0])
    while chunk < chunks:
        first, following = chunk * each, -1
        number = min(each, panels - first)
        base, stride = first * PANEL, panels * PANEL
        if then != PLAIN:
            base, stride = base * starts[blocks], number * PANEL
        for panel in range(number):
            weights = np.uintp(line.data + (first + panel) * size)
            ahead = weights + np.uintp(size)
            # A chunk is claimed early only if its first panel is fetched.
            if panel == number - 1 and blocks > 1:
                following = claim(state, phase)
                if following < chunks:
                    ahead = np.uintp(line.data + following * each * size)
            _panel(line, weights, ahead, starts, wide, each_vector, y, base + panel * PANEL, stride, narrow)
        for block in range(blocks):
            start, width = starts[block], starts[block + 1] - starts[block]
            for vector in range(start, start + width):
                at = base + vector * stride
                _finish(line, y, at, first * PANEL, number * PANEL)
                if then == ADD:
                    to = vector * line.rows + first * PANEL
                    _add(y, at, out, to, min(number * PANEL, line.rows - first * PANEL))
                elif then == GATE:
                    # Half of the rows so far were gates, in blocks of STEP.
                    place = (start * panels + first * width) * PANEL // 2 + (vector - start) * STEP
                    for step in range(number // _GATED_PANELS):
                        to = place + step * width * STEP
                        silu(y, at + 2 * STEP * step, next_short, next_wide, next_form, to)
        done(state, phase)
        chunk = claim(state, phase) if following < 0 else following
    if tiled:
        release()
    wait(state, phase, chunks)


@helper
def _panel(line, weights, ahead, starts, wide, each_vector, y, at, stride, narrow):
    """A panel times all vectors, block by block, to y[at + vector x stride].

    narrow: whether tiles must be configured for each block.

    If there are several blocks, each of the first two fetches a half of the next panel, while their own lies in
    the second-level cache.
    """
    blocks, steps = len(starts) - 1, line.steps
    for block in range(blocks):
        start, width = starts[block], starts[block + 1] - starts[block]
        if narrow:
            configure(width)
        x = wide.ctypes.data + np.uintp(each_vector * start * steps)
        to = y.ctypes.data + np.uintp(4 * (start * stride + at))
        if blocks == 1:
            ahead = weights + np.uintp(_AHEAD)
            call(np.uintp(line.multiply), width, weights, x, to, steps, stride, ahead, 128, 64)
        elif block < 2:
            half = ahead + np.uintp(line.panel_bytes // 2 * block)
            call(np.uintp(line.multiply), width, weights, x, to, steps, stride, half, 64, 0)
        else:
            call(np.uintp(line.multiply), width, weights, x, to, steps, stride, weights, 0, 0)


@helper
def _chunk(panels, size, threads, unit, target):
    """Panels in a chunk: about `target` bytes, as many chunks for each thread, in multiples of `unit`."""
    chunks = threads * max(1, (panels * size + threads * target // 2) // (threads * target))
    return max(1, (panels + chunks * unit - 1) // (chunks * unit)) * unit


@helper
def _finish(line, y, at, row, number):
    """Multiply by the rows' scales and add their biases, where there are any."""
    start, offset = np.uintp(at), np.uintp(4 * row)
    if line.scale:
        for i in range(np.uintp(number)):
            y[start + i] *= float_at(np.uintp(line.scale) + offset + np.uintp(4) * i)
    if line.bias:
        for i in range(np.uintp(number)):
            y[start + i] += float_at(np.uintp(line.bias) + offset + np.uintp(4) * i)


@helper
def _add(y, at, out, to, number):
    start, target = np.uintp(at), np.uintp(to)
    for i in range(np.uintp(number)):
        out[target + i] += y[start + i]


@kernel
def _linear(state, threads, line, x, size, starts, short, wide, y):
    pack_all(state, 0, x, size, starts, short, wide, line.form)
    product(state, 1, threads, line, starts, short, wide, y, PLAIN, y, short, wide, 0)


def linear(x: Tensor, weight: Packed) -> Tensor:
    """x [..., inputs] float32 times the weight: [..., rows] float32."""
    flat = x.reshape(-1, weight.inputs).contiguous()
    vectors, line = len(flat), weight.line()
    y = np.empty((vectors, PANEL * line.panels), np.float32)
    short, wide = scratch(vectors * line.steps * STEP)
    starts = blocks_of(vectors, weight.columns)
    pool.run(_linear, 2, line, flat.numpy().ravel(), weight.inputs, starts, short, wide, y.ravel())
    return torch.from_numpy(y)[:, : weight.rows].view(*x.shape[:-1], weight.rows)


def scratch(numbers: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Room for so many numbers in any form of vectors, as uint16 and as float32: the same aligned bytes."""
    room = aligned(4 * numbers)
    return room.view(np.uint16), room.view(np.float32)
