"""Attention of a few new tokens a row over a ragged cache, for one layer.

Contract: `attend` is a phase of a call: a chunk is one row and one of its key-value heads. It rotates that head's
queries and keys, writes keys and values at the row's end, and attends. Keys are read in blocks of BLOCK from
position 0, and their softmaxes are merged in that order (Milakov and Gimelshein, arXiv 1805.02867). So a token's
result depends on its own row alone. Reference: kernels/reference/attention.py.
"""

from __future__ import annotations

import numpy as np

from .calls.jit import helper
from .calls.threads import claim, done, wait
from .elements import copy, exp, norm, rotate
from .kinds import LANES
from .vectors import dots, mix

# Columns whose scores are held at once. A multiple of every LANES.
BLOCK = 64


@helper
def attend(state, phase, layer, qkv, rows, shape, firsts, lengths, cache, turns, norms, eps, out):
    """out [N, heads x dim] from qkv [N, rows] of the step's N tokens, those of row b from firsts[b] on.

    shape: heads, key-value heads, dim, rows of the cache, columns of the cache. lengths: columns cached before.
    cache, float32, flat: [layers, 2, rows, key-value heads, columns, dim]. turns: cosines and sines of a position,
    [positions, dim]. norms: the weights of query and key norms [layers, 2, dim], or nothing.
    """
    _, kv_heads, dim, max_batch, max_len = shape
    units = (len(firsts) - 1) * kv_heads
    ones, scores = np.ones(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    while True:
        unit = claim(state, phase)
        if unit >= units:
            break
        row, head = unit // kv_heads, unit % kv_heads
        keys = ((2 * layer * max_batch + row) * kv_heads + head) * max_len * dim
        values = keys + max_batch * kv_heads * max_len * dim
        _write(
            layer,
            qkv,
            rows,
            shape,
            firsts[row],
            firsts[row + 1],
            lengths[row],
            head,
            cache,
            keys,
            values,
            turns,
            norms,
            eps,
        )
        _mix_all(
            qkv,
            rows,
            shape,
            firsts[row],
            firsts[row + 1],
            lengths[row],
            head,
            cache,
            keys,
            values,
            out,
            ones,
            scores,
        )
        done(state, phase)
    wait(state, phase, units)


@helper
def _write(layer, qkv, rows, shape, first, end, length, head, cache, keys, values, turns, norms, eps):
    """Rotate the queries and keys of a key-value head, and write its keys and values."""
    heads, kv_heads, dim, _, _ = shape
    group, scale = heads // kv_heads, np.float32(1.0) / np.sqrt(np.float32(dim))
    one = np.float32(1.0)
    for token in range(first, end):
        column = length + token - first
        for query in range(group):
            at = token * rows + (head * group + query) * dim
            if len(norms):
                norm(qkv, at, dim, norms, 2 * layer * dim, eps, qkv, at)
            rotate(qkv, at, dim // 2, turns, column * dim, scale)
        at = token * rows + (heads + head) * dim
        if len(norms):
            norm(qkv, at, dim, norms, (2 * layer + 1) * dim, eps, qkv, at)
        rotate(qkv, at, dim // 2, turns, column * dim, one)
        value = token * rows + (heads + kv_heads + head) * dim
        copy(qkv, at, cache, keys + column * dim, dim)
        copy(qkv, value, cache, values + column * dim, dim)


@helper
def _mix_all(qkv, rows, shape, first, end, length, head, cache, keys, values, out, ones, scores):
    """out: each query's mean of the values, weighted by the softmax of its scores."""
    heads, kv_heads, dim, _, _ = shape
    group, width = heads // kv_heads, heads * dim
    queries = (end - first) * group
    largest, total = np.full(queries, -np.inf, np.float32), np.zeros(queries, np.float32)
    for start in range(0, length + end - first, BLOCK):
        for query in range(queries):
            token = first + query // group
            seen = min(BLOCK, length + token - first + 1 - start)
            if seen <= 0:
                continue
            at = token * rows + (head * group + query % group) * dim
            to = token * width + (head * group + query % group) * dim
            _score(qkv, at, cache, keys + start * dim, dim, seen, scores)
            before = largest[query]
            now = max(before, _largest(scores))
            largest[query] = now
            shrink = exp(before - now)
            for i in range(np.uintp(BLOCK)):
                scores[i] = exp(scores[i] - now)
            _add(scores, ones, total, query, shrink)
            _scale(out, to, dim, shrink, start == 0)
            _mix(scores, cache, values + start * dim, out, to, seen, dim)
    for query in range(queries):
        to = (first + query // group) * width + (head * group + query % group) * dim
        _scale(out, to, dim, np.float32(1.0) / total[query], False)


@helper
def _scale(x, start, size, factor, clear):
    """x[start : start + size] times the factor; zero if `clear`, whatever was there."""
    at = np.uintp(start)
    for i in range(np.uintp(size)):
        x[at + i] = np.float32(0.0) if clear else x[at + i] * factor


@helper
def _score(qkv, at, cache, keys, dim, seen, scores):
    """The scores of `seen` columns; -inf behind them."""
    dots(qkv.ctypes.data + np.uintp(4 * at), cache.ctypes.data + np.uintp(4 * keys), scores.ctypes.data, seen, dim)
    rest = dim - dim % LANES
    if rest < dim:
        for j in range(seen):
            for i in range(rest, dim):
                scores[j] += qkv[at + i] * cache[keys + j * dim + i]
    for j in range(seen, BLOCK):
        scores[j] = -np.inf


@helper
def _largest(scores):
    """The largest of the scores, lane by lane."""
    found = scores[:16].copy()
    for start in range(np.uintp(16), np.uintp(BLOCK), np.uintp(16)):
        for i in range(np.uintp(16)):
            found[i] = scores[start + i] if scores[start + i] > found[i] else found[i]
    best = found[0]
    for i in range(1, 16):
        best = found[i] if found[i] > best else best
    return best


@helper
def _add(weights, ones, total, query, shrink):
    part = np.empty(1, np.float32)
    dots(ones.ctypes.data, weights.ctypes.data, part.ctypes.data, 1, BLOCK)
    total[query] = total[query] * shrink + part[0]


@helper
def _mix(weights, cache, values, out, to, seen, dim):
    """out[to : to + dim] += the weighted sum of `seen` values."""
    mix(
        weights.ctypes.data,
        cache.ctypes.data + np.uintp(4 * values),
        out.ctypes.data + np.uintp(4 * to),
        seen,
        dim,
    )
    for i in range(dim - dim % LANES, dim):
        for j in range(seen):
            out[to + i] += weights[j] * cache[values + j * dim + i]
