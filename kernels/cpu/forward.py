"""A whole forward of a Llama-shaped model over few tokens, and a chain of drafts after it, in one compiled call.

`forward` takes the N real tokens of all rows, row after row. A layer is nine phases that the threads of the call
share (threads.py), the output layer four more, and a draft three (chain.py). Invariant: every number of a token is
summed in a fixed order, so it depends only on its own row: not on other rows, the number of tokens in the step, or
the number of threads.
"""

from __future__ import annotations

from .attention.phases import attend, merge, write
from .calls.jit import helper, kernel
from .calls.threads import claim, done, wait
from .chain import choose, feed, later_plan
from .elements import add, copy, norm, pack, pack_all, vector_position
from .kinds import PANEL, STEP
from .products import ADD, GATE, PLAIN, line_at, product

_LAYER_PHASES, _LAST_PHASES, _DRAFT_PHASES = 9, 4, 3


def phases_of(layers: int, drafts: int) -> int:
    """Return the number of phases of a forward that drafts `drafts` tokens."""
    return (_LAYER_PHASES * layers + _LAST_PHASES + _DRAFT_PHASES) * max(drafts, 1)


@helper
def _norm_all(
    state, phase, x, size, weights, rows, eps, y, stride, starts, vectors_u16, vectors_f32, form, out, stream
):
    """Write the RMSNorm of x [N, size] to `out` and as vectors: one phase.

    First, add the normalised y [N, stride] to x if rows[0] >= 0, and copy x to `stream`, unless that is empty.
    rows: the rows of weights [norms, size] for the norm of y and for that of x; -1 for none. Without a norm of x,
    x itself is written.
    """
    steps, tokens = (size + STEP - 1) // STEP, starts[-1]
    while True:
        token = claim(state, phase)
        if token >= tokens:
            break
        at = token * size
        if rows[0] >= 0:
            norm(y, token * stride, size, weights, rows[0] * size, eps, y, token * stride)
            add(y, token * stride, x, at, size)
        if len(stream):
            copy(x, at, stream, at, size)
        if rows[1] >= 0:
            norm(x, at, size, weights, rows[1] * size, eps, out, at)
        else:
            copy(x, at, out, at, size)
        to, width = vector_position(token, starts, steps)
        pack(out, at, size, vectors_u16, vectors_f32, form, to, width)
        done(state, phase)
    wait(state, phase, tokens)


@kernel
def forward(
    state, threads, lines, norms, norm_rows, head_norms, rotated, eps, factor, shape, step, visible, plan, caches,
    segment, rope, x, stream_index, streams, scratch, vectors_u16, vectors_f32, queries, parts, dot, out, logits,
    chain,
):  # fmt: skip
    """Turn x float32 [N, hidden] into the residual stream, and compute its final norm and logits.

    Args:
        lines: int64 [4 layers + 1, 9], Packed.line of each layer's joined query, key and value, output, joined
            gate and up, and down products, and then of the output layer.
        norms: float32 [norms, hidden].
        norm_rows: int64 [2 layers + 1, 2], rows of `norms` for each block (an attention or an MLP) and for the
            end; -1 for none. Column 0 is for the results of the block before, column 1 for this block's input.
        head_norms: float32 [layers, 2 dim], weights of the norms of each query and key; [layers, (heads +
            key-value heads) x dim] if they span the whole width; or [layers, 0].
        rotated: int64 [layers], how many numbers of a head each layer rotates.
        factor: of the scores of attention, besides 1 / sqrt(dim).
        shape, visible, plan, caches, segment, queries, parts: see attention/phases.py.
        step: int64 arrays firsts [B + 1], lengths [B], starts of all tokens' blocks (products.py), the M wanted
            tokens, whose logits are computed, and starts of the wanted tokens' blocks.
        rope: [positions, rotated], flat: cosines and sines of each position.
        stream_index: int64 [layers + 1], the row of `streams` to which x is copied before each layer; -1 for none.
        streams: [copies, N x hidden].
        scratch, vectors_u16, vectors_f32: scratch.
        dot: whether queries, keys and values are bfloat16.
        out: the final norm, [N, hidden].
        logits: [M, V]. With a chain, M is B and `logits` is [levels, B, V].
        chain: see chain.py.
    """
    heads, kv_heads, dim, _ = shape
    hidden, layers, last = norms.shape[1], len(lines) // 4, line_at(lines, len(lines) - 1)
    form, weights, no_stream, head_weights = line_at(lines, 0).form, norms.ravel(), x[:0], head_norms.ravel()
    stride = hidden + -hidden % PANEL
    rows = heads * dim + 2 * kv_heads * dim
    rows += -rows % PANEL
    # There are two buffers of vectors, because the vectors for the down product are written while other vectors
    # are still read for the gate and up product.
    half = len(vectors_f32) // 2
    vectors_u16, next_u16, vectors_f32, next_f32 = (
        vectors_u16[: 2 * half],
        vectors_u16[2 * half :],
        vectors_f32[:half],
        vectors_f32[half:],
    )
    levels = len(chain.columns)
    row_logits, first_phase, level_logits = PANEL * last.panels, 0, logits
    # One loop for the forward and the drafts: numba compiles every call site separately.
    for level in range(max(1, levels)):
        _, _, starts, wanted, wanted_starts = step
        tokens = starts[-1]
        mixed, y = scratch[: tokens * heads * dim], scratch[(tokens * heads * dim + 15) // 16 * 16 :]
        for layer in range(layers):
            p, first_line = first_phase + _LAYER_PHASES * layer, 4 * layer
            stream = no_stream if stream_index[layer] < 0 else streams[stream_index[layer]]
            _norm_all(
                state, p, x, hidden, weights, norm_rows[2 * layer], eps, y, stride, starts, vectors_u16,
                vectors_f32, form, out, stream,
            )  # fmt: skip
            line = line_at(lines, first_line)
            product(
                state, p + 1, threads, line, starts, vectors_u16, vectors_f32, y, PLAIN, x, next_u16, next_f32,
                form,
            )  # fmt: skip
            write(
                state, p + 2, layer, y, rows, shape, step, visible, plan, caches, rope, rotated[layer],
                head_weights, head_norms.shape[1], eps, factor, *queries, dot,
            )  # fmt: skip
            attend(state, p + 3, layer, shape, step, visible, plan, caches, segment, *queries, dot, *parts, mixed)
            merge(state, p + 4, shape, step, visible, plan, *parts, mixed, starts, vectors_u16, vectors_f32, form)
            line = line_at(lines, first_line + 1)
            product(
                state, p + 5, threads, line, starts, vectors_u16, vectors_f32, y,
                ADD if norm_rows[2 * layer + 1, 0] < 0 else PLAIN, x, next_u16, next_f32, form,
            )  # fmt: skip
            _norm_all(
                state, p + 6, x, hidden, weights, norm_rows[2 * layer + 1], eps, y, stride, starts, vectors_u16,
                vectors_f32, form, out, no_stream,
            )  # fmt: skip
            line = line_at(lines, first_line + 2)
            product(
                state, p + 7, threads, line, starts, vectors_u16, vectors_f32, y, GATE, x, next_u16, next_f32, form
            )
            line = line_at(lines, first_line + 3)
            product(
                state, p + 8, threads, line, starts, next_u16, next_f32, y,
                ADD if norm_rows[2 * layer + 2, 0] < 0 else PLAIN, x, vectors_u16, vectors_f32, form,
            )  # fmt: skip
        p = first_phase + _LAYER_PHASES * layers
        stream = no_stream if stream_index[layers] < 0 else streams[stream_index[layers]]
        _norm_all(
            state, p, x, hidden, weights, norm_rows[2 * layers], eps, y, stride, starts, vectors_u16, vectors_f32,
            form, out, stream,
        )  # fmt: skip
        _copy_wanted(state, p + 1, out, hidden, wanted, y)
        pack_all(state, p + 2, y, hidden, wanted_starts, vectors_u16, vectors_f32, last.form)
        if levels:
            at = level * len(wanted) * row_logits % len(logits)
            level_logits = logits[at : at + len(wanted) * row_logits]
        product(
            state, p + 3, threads, last, wanted_starts, vectors_u16, vectors_f32, level_logits, PLAIN, x, next_u16,
            next_f32, form,
        )  # fmt: skip
        first_phase = p + _LAST_PHASES
        if levels == 0:
            return
        more = choose(state, first_phase, level, chain, level_logits, row_logits, out, wanted, hidden)
        if not more or level == levels - 1:
            return
        feed(
            state, first_phase + 1, threads, level, chain, out, wanted, hidden, vectors_u16, vectors_f32, x,
            next_u16, next_f32,
        )  # fmt: skip
        first_phase += _DRAFT_PHASES
        step = chain.firsts, chain.lengths[level], chain.starts, chain.firsts[: len(wanted)], chain.starts
        plan = later_plan(chain, level, plan)


@helper
def _copy_wanted(state, phase, x, size, wanted, out):
    """Copy the rows `wanted` of x: one phase."""
    while True:
        if claim(state, phase) >= 1:
            break
        for i in range(len(wanted)):
            copy(x, wanted[i] * size, out, i * size, size)
        done(state, phase)
    wait(state, phase, 1)
