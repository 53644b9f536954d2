"""A whole forward of a Llama-shaped model over few tokens, in one compiled call, and a chain of drafts after it.

Contract: `forward` takes the N real tokens of all rows, row after row. A layer is nine phases that the threads of
the call share (threads.py); the output layer is four more, and a draft three (chain.py). Every number of a token
is summed in one order, so it depends on its own row alone: not on other rows, on how many tokens the step has, or
on the number of threads.
"""

from __future__ import annotations

from .attention.phases import attend, merge, write
from .calls.jit import helper, kernel
from .calls.threads import claim, done, wait
from .chain import choose, feed, further
from .elements import copy, norm, pack, pack_all, place
from .kinds import PANEL, STEP
from .products import ADD, GATE, PLAIN, line_at, product

_LAYER_PHASES, _LAST_PHASES, _DRAFT_PHASES = 9, 4, 3


def phases_of(layers: int, drafts: int) -> int:
    """How many phases a forward has, and those that a chain of drafts goes on with."""
    return (_LAYER_PHASES * layers + _LAST_PHASES + _DRAFT_PHASES) * max(drafts, 1)


@helper
def _norm_all(state, phase, x, size, weight, first, eps, starts, short, wide, form, out, stream):
    """A phase: the RMSNorm of x [N, size] in `out` and as vectors; a copy of x in `stream`, if it has room."""
    steps, tokens = (size + STEP - 1) // STEP, starts[-1]
    while True:
        token = claim(state, phase)
        if token >= tokens:
            break
        at = token * size
        if len(stream):
            copy(x, at, stream, at, size)
        norm(x, at, size, weight, first, eps, out, at)
        to, width = place(token, starts, steps)
        pack(out, at, size, short, wide, form, to, width)
        done(state, phase)
    wait(state, phase, tokens)


@kernel
def forward(
    state,
    threads,
    lines,
    norms,
    head_norms,
    eps,
    shape,
    step,
    sight,
    plan,
    caches,
    segment,
    turns,
    x,
    reads,
    streams,
    room,
    short,
    wide,
    queries,
    parts,
    dot,
    out,
    logits,
    chain,
):
    """x float32 [N, hidden] becomes the residual stream; out [N, hidden] its final norm; logits [M, V].

    lines int64 [4 layers + 1, 9]: Packed.line of each layer's joined query, key and value, output, joined gate
    and up, and down products, and of the output layer. norms float32 [2 layers + 1, hidden]. head_norms: the
    weights of query and key norms [layers, 2, dim], flat, or nothing. turns: cosines and sines of a position,
    [positions, dim], flat. shape, sight, plan, caches, segment, queries, parts: attention/phases.py. step: int64
    arrays firsts [B + 1], lengths [B], starts (products.py), the M tokens wanted whose logits are computed,
    and the starts of these. reads int64 [layers + 1]: before which layers x is
    kept, by its place in streams [places, N x hidden]; -1: not kept. dot: whether queries, keys and values are
    bfloat16. room, short, wide: scratch. chain: chain.py; with one, M = B, and logits [levels, B, V].
    """
    heads, kv_heads, dim, _ = shape
    hidden, layers, last = norms.shape[1], len(lines) // 4, line_at(lines, len(lines) - 1)
    form, weights, none = line_at(lines, 0).form, norms.ravel(), x[:0]
    rows = heads * dim + 2 * kv_heads * dim
    rows += -rows % PANEL
    # Two products' vectors: those of the down product are written while gates and ups read theirs.
    half = len(wide) // 2
    short, other, wide, another = short[: 2 * half], short[2 * half :], wide[:half], wide[half:]
    levels = len(chain.columns)
    each, first, chosen = PANEL * last.panels, 0, logits
    # One loop for the forward and those of its drafts: what stands here twice is compiled twice.
    for level in range(max(1, levels)):
        _, _, starts, wanted, wanted_starts = step
        tokens = starts[-1]
        mixed, y = room[: tokens * heads * dim], room[(tokens * heads * dim + 15) // 16 * 16 :]
        for layer in range(layers):
            p, four, norm = first + _LAYER_PHASES * layer, 4 * layer, 2 * layer * hidden
            kept = none if reads[layer] < 0 else streams[reads[layer]]
            _norm_all(state, p, x, hidden, weights, norm, eps, starts, short, wide, form, out, kept)
            line = line_at(lines, four)
            product(state, p + 1, threads, line, starts, short, wide, y, PLAIN, x, other, another, form)
            write(
                state, p + 2, layer, y, rows, shape, step, sight, plan, caches, turns, head_norms, eps, *queries,
                dot,
            )  # fmt: skip
            attend(state, p + 3, layer, shape, step, sight, plan, caches, segment, *queries, dot, *parts, mixed)
            merge(state, p + 4, shape, step, sight, plan, *parts, mixed, starts, short, wide, form)
            line = line_at(lines, four + 1)
            product(state, p + 5, threads, line, starts, short, wide, y, ADD, x, other, another, form)
            _norm_all(state, p + 6, x, hidden, weights, norm + hidden, eps, starts, short, wide, form, out, none)
            line = line_at(lines, four + 2)
            product(state, p + 7, threads, line, starts, short, wide, y, GATE, x, other, another, form)
            line = line_at(lines, four + 3)
            product(state, p + 8, threads, line, starts, other, another, y, ADD, x, short, wide, form)
        p = first + _LAYER_PHASES * layers
        kept = none if reads[layers] < 0 else streams[reads[layers]]
        _norm_all(state, p, x, hidden, weights, 2 * layers * hidden, eps, starts, short, wide, form, out, kept)
        _pick(state, p + 1, out, hidden, wanted, y)
        pack_all(state, p + 2, y, hidden, wanted_starts, short, wide, last.form)
        if levels:
            at = level * len(wanted) * each % len(logits)
            chosen = logits[at : at + len(wanted) * each]
        product(state, p + 3, threads, last, wanted_starts, short, wide, chosen, PLAIN, x, other, another, form)
        first = p + _LAST_PHASES
        if levels == 0:
            return
        more = choose(state, first, level, chain, chosen, each, out, wanted, hidden)
        if not more or level == levels - 1:
            return
        feed(state, first + 1, threads, level, chain, out, wanted, hidden, short, wide, x, other, another)
        first += _DRAFT_PHASES
        step = chain.firsts, chain.lengths[level], chain.starts, chain.firsts[: len(wanted)], chain.starts
        plan = further(chain, level, plan)


@helper
def _pick(state, phase, x, size, wanted, out):
    """A phase: the rows `wanted` of x."""
    while True:
        if claim(state, phase) >= 1:
            break
        for i in range(len(wanted)):
            copy(x, wanted[i] * size, out, i * size, size)
        done(state, phase)
    wait(state, phase, 1)
