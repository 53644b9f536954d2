"""Products of a packed matrix and any number of vectors, shared by the threads of a call.

`linear` multiplies one matrix; `product` is a phase of a larger call (threads.py). Each panel of rows is
multiplied by a group of vectors, block by block, while the next panel is fetched. `blocks_of` divides the vectors
into blocks: `starts`, int64 [blocks + 1]. A `line` is the Line of a matrix (packing.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .calls import pool
from .calls.jit import helper, kernel
from .calls.threads import claim, done, wait
from .elements import add, bytes_of, float_at, pack, pack_all, silu
from .kinds import AS_PAIRS, PANEL, STEP, TILES
from .packing import Line, Packed
from .pages import aligned
from .tiles import ROWS, configure, release
from .vectors import call

# Bytes of weights in a chunk. Large chunks are read faster; small ones divide the work more evenly among the
# threads.
_CHUNK = 221_184
# Multiply a chunk by about this many vectors, then add or gate the results, which are still in the second-level
# cache.
_GROUP = 96
# How many bytes ahead weights are prefetched, if each weight is read only once.
_AHEAD = 3072
# What happens to a product: it is left in y, added to `out`, or written as silu(gate) * up to the next product's
# vectors. As numpy's numbers, because numba would compile `product` again for each literal.
PLAIN, ADD, GATE = np.int64(0), np.int64(1), np.int64(2)
# A gated matrix has STEP gates, then their STEP ups, and so on, so that a chunk holds both.
_GATED_PANELS = 2 * STEP // PANEL


def blocks_of(vectors: int, columns: int) -> np.ndarray[Any, Any]:
    """Return the first vector of each block of at most `columns`, then `vectors`: int64 [blocks + 1].

    Blocks are as equal as possible. For example, 50 vectors in blocks of at most 48 give [0, 25, 50].
    """
    blocks = max(1, -(-vectors // columns))
    return np.arange(blocks + 1, dtype=np.int64) * vectors // blocks


@helper
def line_at(lines, index):
    """Return row `index` of lines int64 [matrices, 9] as a Line."""
    row = lines[index]
    return Line(row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7], row[8])


@helper
def product(
    state, phase, threads, line, starts, vectors_u16, vectors_f32, y, epilogue, out, next_u16, next_f32, next_form
):
    """Multiply a matrix by all vectors, and pass the products on as `epilogue` demands: one phase.

    A PLAIN product is y [vectors, PANEL x panels]. Otherwise y is scratch memory, of which each thread uses a part
    [vectors of a group, rows of a chunk]. Such a part stays in the second-level cache, and its vectors don't
    compete for the same cache lines, as they would if they were a power of two apart. next_form is the form of the
    next product's vectors.
    """
    panels, size = line.panels, line.panel_bytes
    vector_bytes, blocks = bytes_of(line.form), len(starts) - 1
    unit = _GATED_PANELS if epilogue == GATE else 1
    chunk_panels = _panels_per_chunk(panels, size, threads, unit, _CHUNK)
    chunks = (panels + chunk_panels - 1) // chunk_panels
    chunk = claim(state, phase)
    # No other thread has the same first chunk, so its place in y is free for all chunks of this thread.
    own_place = chunk * chunk_panels * PANEL * starts[blocks]
    group = _blocks_per_group(starts)
    tiled = TILES and line.form == AS_PAIRS and chunk < chunks and starts[blocks] > 0
    # Blocks of equal width need the same configuration of the tiles, and so do all blocks of 16 vectors or more.
    narrow = tiled and blocks > 1 and starts[1] - starts[0] < ROWS
    if tiled:
        configure(starts[1] - starts[0])
    while chunk < chunks:
        first, following = chunk * chunk_panels, -1
        num_panels = min(chunk_panels, panels - first)
        for first_block in range(0, blocks, group):
            last_block = min(first_block + group, blocks)
            base, stride = first * PANEL, panels * PANEL
            if epilogue != PLAIN:
                stride = num_panels * PANEL
                base = own_place - starts[first_block] * stride
            for panel in range(num_panels):
                weights = np.uintp(line.data + (first + panel) * size)
                # The first group fetches the rest of the chunk; the last one fetches the next chunk's first panel.
                ahead = weights + np.uintp(size) if first_block == 0 else weights
                # Claim the next chunk early only if its first panel is fetched during this chunk's last panel.
                if panel == num_panels - 1 and last_block == blocks and blocks > 1:
                    following = claim(state, phase)
                    if following < chunks:
                        ahead = np.uintp(line.data + following * chunk_panels * size)
                _multiply_panel(
                    line, weights, ahead, starts, first_block, last_block, vectors_f32, vector_bytes, y,
                    base + panel * PANEL, stride, narrow,
                )  # fmt: skip
            for block in range(first_block, last_block):
                start, width = starts[block], starts[block + 1] - starts[block]
                for vector in range(start, start + width):
                    at = base + vector * stride
                    _scale_and_bias(line, y, at, first * PANEL, num_panels * PANEL)
                    if epilogue == ADD:
                        to = vector * line.rows + first * PANEL
                        add(y, at, out, to, min(num_panels * PANEL, line.rows - first * PANEL))
                    elif epilogue == GATE:
                        # A gate and its up give one number together, so the place is half the number of rows so
                        # far.
                        place = (start * panels + first * width) * PANEL // 2 + (vector - start) * STEP
                        # In one loop they would take twice as long: LLVM can't vectorise it.
                        silu(y, at, num_panels // _GATED_PANELS)
                        for step in range(num_panels // _GATED_PANELS):
                            to = place + step * width * STEP
                            pack(y, at + 2 * STEP * step, STEP, next_u16, next_f32, next_form, to, 1)
        done(state, phase)
        chunk = claim(state, phase) if following < 0 else following
    if tiled:
        release()
    wait(state, phase, chunks)


@helper
def _blocks_per_group(starts):
    """Return how many blocks of vectors pass a panel before the next panel: about _GROUP vectors."""
    blocks = len(starts) - 1
    return max(2, blocks * _GROUP // max(1, starts[blocks]))


@helper
def _multiply_panel(
    line, weights, ahead, starts, first_block, last_block, vectors_f32, vector_bytes, y, at, stride, narrow
):
    """Multiply a panel by all vectors of a group, block by block, into y[at + vector x stride].

    With several blocks, each of the group's first two fetches half of the panel at `ahead`, unless that is this
    panel, while this panel is in the second-level cache. narrow: whether tiles must be configured for each block.
    """
    blocks, steps = len(starts) - 1, line.steps
    for block in range(first_block, last_block):
        start, width = starts[block], starts[block + 1] - starts[block]
        if narrow:
            configure(width)
        x = vectors_f32.ctypes.data + np.uintp(vector_bytes * start * steps)
        to = y.ctypes.data + np.uintp(4 * (start * stride + at))
        if blocks == 1:
            ahead = weights + np.uintp(_AHEAD)
            call(np.uintp(line.multiply), width, weights, x, to, steps, stride, ahead, 128, 64)
        elif block < first_block + 2 and ahead != weights:
            half = ahead + np.uintp(line.panel_bytes // 2 * (block - first_block))
            call(np.uintp(line.multiply), width, weights, x, to, steps, stride, half, 64, 0)
        else:
            call(np.uintp(line.multiply), width, weights, x, to, steps, stride, weights, 0, 0)


@helper
def _panels_per_chunk(panels, size, threads, unit, target):
    """Return how many panels make a chunk: a multiple of `unit`, about `target` bytes.

    All threads get equally many chunks.
    """
    chunks = threads * max(1, (panels * size + threads * target // 2) // (threads * target))
    return max(1, (panels + chunks * unit - 1) // (chunks * unit)) * unit


@helper
def _scale_and_bias(line, y, at, row, number):
    """Multiply results in y by the scales of their rows, and add the rows' biases, if there are any."""
    start, offset = np.uintp(at), np.uintp(4 * row)
    if line.scale:
        for i in range(np.uintp(number)):
            y[start + i] *= float_at(np.uintp(line.scale) + offset + np.uintp(4) * i)
    if line.bias:
        for i in range(np.uintp(number)):
            y[start + i] += float_at(np.uintp(line.bias) + offset + np.uintp(4) * i)


@kernel
def _linear(state, threads, line, x, size, starts, vectors_u16, vectors_f32, y):
    pack_all(state, 0, x, size, starts, vectors_u16, vectors_f32, line.form)
    product(
        state, 1, threads, line, starts, vectors_u16, vectors_f32, y, PLAIN, y, vectors_u16, vectors_f32, line.form
    )


def linear(x: Tensor, weight: Packed) -> Tensor:
    """Return the product of x [..., inputs] float32 and the weight: [..., rows] float32."""
    flat = x.reshape(-1, weight.inputs).contiguous()
    vectors, line = len(flat), weight.line
    y = np.empty((vectors, PANEL * line.panels), np.float32)
    vectors_u16, vectors_f32 = vector_buffers(vectors * line.steps * STEP)
    starts = blocks_of(vectors, weight.columns)
    pool.run(_linear, 2, line, flat.numpy().ravel(), weight.inputs, starts, vectors_u16, vectors_f32, y.ravel())
    return torch.from_numpy(y)[:, : weight.rows].view(*x.shape[:-1], weight.rows)


def vector_buffers(numbers: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return an aligned buffer for vectors of `numbers` numbers in any form, viewed as uint16 and as float32."""
    buffer = aligned(4 * numbers)
    return buffer.view(np.uint16), buffer.view(np.float32)
