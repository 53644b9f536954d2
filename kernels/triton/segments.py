"""The device side of attention.py: sums over segments of the columns, and their merging.

Columns are cut into segments of SEGMENT tokens from a row's first token on, no matter where these are stored. A
segment's blocks are added in ascending order. A row's segments are also added in ascending order, either in one
program (WHOLE) or by the last of the segments' programs to finish; both do the same operations. blocks.py defines
the sums of a segment: `highest`, `total` and `sums`. Invariant: a row's sums depend neither on which of its tokens
are in a prefix nor on other rows, nor on which program finishes last.

TREE: the new tokens form trees (TreeMask in plan.py). Row b's tree begins at column bases[b]. Its query s is at
positions[b, s] and sees the tree columns whose bits are set in marks[b, s]. Without TREE, `bases`, `positions` and
`marks` are not read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import (
    NONE,
    SINKS,
    add_block,
    column,
    columns,
    empty_sums,
    merge_parts,
    merge_sums,
    seen_by,
    seen_in_tree,
    sees_segment,
    store_result,
    store_sums,
    visible,
)  # fmt: skip
from .rotary import rotated


# Don't specialise the kernel on these arguments: otherwise new values could compile it again.
@triton.jit(do_not_specialize=["queries", "window", "segments", "last_position"])
def attend(
    q, k, v, prefix_k, prefix_v, lengths, starts, groups, order, skips, bases, positions, marks,
    parts, peaks, totals, counters, out, cos, sin, q_norm, k_norm, last_position, eps,
    q_b, q_h, q_s, k_b, k_h, k_n, v_b, v_h, v_n, pk_b, pk_h, pk_n, pv_b, pv_h, pv_n,
    scaling, softcap, queries, window, segments, dim,
    HEADS: tl.constexpr, GROUP: tl.constexpr, EXACT: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SEGMENT: tl.constexpr, UNROLLED: tl.constexpr,
    WINDOW: tl.constexpr, GAP: tl.constexpr, TREE: tl.constexpr, SOFTCAP: tl.constexpr, SHARED: tl.constexpr,
    WHOLE: tl.constexpr, ROTATE: tl.constexpr, NORM: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Sum one segment, or all (WHOLE), in program (block of query rows x segment, kv head, batch row).

    The last program of a block to finish writes `out` [B, S, Hq, D]. If there are several, the others leave their
    sums in `parts` float32 [segments, rows, D], and `peaks` and `totals` float32 [segments, rows], for the queries
    that see the segment; their rows are [Hkv, B, group, S], with B ordered by prefix. `counters` int32 [B, Hkv,
    blocks] are 0 before and after the launch. Segments in a row's prefix are left to `attend_prefix`. WHOLE:
    `segments` is 1, and only `out` is written.

    ROTATE: `q` is a layer's joined QKV product [B, S, Hq + 2 Hkv, D], as for `rotate` (cache_write.py), and `k`
    and `v` don't have the new tokens yet. Each program writes those of its columns before it reads them. Several
    programs may write a column, all with the same bits; none reads what only another one writes.
    """
    segment = tl.program_id(0) % segments
    block = tl.program_id(0) // segments
    head = tl.program_id(1)
    rank = tl.program_id(2).to(tl.int64)
    row = rank
    if SHARED:
        row = tl.load(order + rank)
    length = tl.load(lengths + row).to(tl.int32)
    skip = SINKS
    if GAP:
        skip = tl.load(skips + row).to(tl.int32)
    start = 0
    if SHARED:
        start = tl.load(starts + row).to(tl.int32)
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    s = m % queries
    hq = head * GROUP + m // queries
    query_exists = m < queries * GROUP
    last = length + s
    position = last
    if TREE:
        base = tl.load(bases + row).to(tl.int32)
        position = tl.load(positions + row * queries + s).to(tl.int32)
        mark = tl.load(marks + row * queries + s)
        mark_first, mark_second = mark.to(tl.int32), (mark >> 32).to(tl.int32)

    # Skip columns that no row of this block sees: in a prefill, half of all. A block that reaches into the next
    # head has both the last queries and the first.
    query = block * BLOCK_M % queries
    first = 0
    if WINDOW:
        min_position = tl.where(query + BLOCK_M <= queries, length + query, length)
        if TREE:
            min_position = tl.min(tl.where(query_exists, position, NONE), 0)
        first = min_position - window + 1
        first = tl.maximum(first, 0) // BLOCK_N * BLOCK_N
    end = length + tl.minimum(query + BLOCK_M, queries)
    low, high = first, end
    first_segment = first // SEGMENT
    if WHOLE:
        segment = first_segment
        joined_highest, joined_total, joined_sums = empty_sums(BLOCK_M, BLOCK_D)
    else:
        # A captured launch has programs for all segments of the cache; those without columns end here.
        last_segment = (end - 1) // SEGMENT
        own_segment = first_segment
        if SHARED:
            own_segment = tl.maximum(first_segment, start // SEGMENT)
        if (segment < own_segment) | (segment > last_segment):
            return
        low = tl.maximum(segment * SEGMENT, first)
        high = tl.minimum(segment * SEGMENT + SEGMENT, end)

    d = tl.arange(0, BLOCK_D)
    # Head dimensions that are not powers of two share a kernel, with the elements beyond `dim` masked.
    size = BLOCK_D if EXACT else dim
    in_head = d < size
    k_at = k + row * k_b + head.to(tl.int64) * k_h + d[:, None]
    v_at = v + row * v_b + head.to(tl.int64) * v_h + d[None, :]
    if ROTATE:
        kv_heads: tl.constexpr = HEADS // GROUP
        # More tokens at once would spill registers, fewer would give a thread fewer numbers of a head, and so
        # sum the squares of a head in another order than elsewhere.
        BLOCK_T: tl.constexpr = BLOCK_M if BLOCK_M < 32 else 32
        for begin in range(tl.maximum(low, length), high, BLOCK_T):
            n = begin + tl.arange(0, BLOCK_T)
            new = n < high
            new_position = n
            if TREE:
                new_position = tl.load(positions + row * queries + (n - length), mask=new, other=0).to(tl.int32)
            new_at = q + row * q_b + (n - length) * q_s + (HEADS + head) * q_h
            new_key = rotated(new_at, new, new_position, last_position, cos, sin, k_norm, d, size, eps, NORM)
            mask = new[:, None] & in_head[None, :]
            new_value = tl.load(new_at[:, None] + kv_heads * q_h + d[None, :], mask=mask)
            to = (n - start).to(tl.int64)[:, None]
            # Round as `rotate` does: to the dtype of the product, then to that of the cache.
            new_key = new_key.to(q.dtype.element_ty).to(k.dtype.element_ty)
            tl.store(k + row * k_b + head.to(tl.int64) * k_h + to * k_n + d[None, :], new_key, mask=mask)
            tl.store(v_at + to * v_n, new_value.to(v.dtype.element_ty), mask=mask)
        # Other threads of this program read these columns.
        tl.debug_barrier()
    q_at = q + row * q_b + hq * q_h + s * q_s
    if ROTATE:
        queries_ = rotated(q_at, query_exists, position, last_position, cos, sin, q_norm, d, size, eps, NORM)
        queries_ = queries_.to(q.dtype.element_ty)
    else:
        queries_ = tl.load(q_at[:, None] + d[None, :], mask=query_exists[:, None] & in_head[None, :], other=0.0)
    queries_ = queries_.to(k.dtype.element_ty)
    if WIDEN:
        queries_ = queries_.to(tl.float32)
    if SHARED:
        group = tl.load(groups + row)
        pk_at = prefix_k + group * pk_b + head.to(tl.int64) * pk_h + d[:, None]
        pv_at = prefix_v + group * pv_b + head.to(tl.int64) * pv_h + d[None, :]

    sinks, resume, blocks = visible(low, high, skip, GAP, BLOCK_N)
    highest, total, sums = empty_sums(BLOCK_M, BLOCK_D)
    for i in range(blocks):
        n = columns(i, low, sinks, resume, BLOCK_N)
        if WHOLE:
            now = column(i, low, sinks, resume, BLOCK_N) // SEGMENT
            if now != segment:
                joined_highest, joined_total, joined_sums = merge_sums(
                    joined_highest, joined_total, joined_sums, highest, total, sums
                )
                highest, total, sums = empty_sums(BLOCK_M, BLOCK_D)
                segment = now
        own_column = (n - start).to(tl.int64)
        keys_at, values_at = k_at + own_column[None, :] * k_n, v_at + own_column[:, None] * v_n
        if SHARED:
            # Select whole blocks of addresses: then Triton sees that a column's elements are contiguous.
            stored = n.to(tl.int64)
            keys_at = tl.where((n < start)[None, :], pk_at + stored[None, :] * pk_n, keys_at)
            values_at = tl.where((n < start)[:, None], pv_at + stored[:, None] * pv_n, values_at)
        if TREE:
            seen = seen_in_tree(
                n[None, :], base, mark_first[:, None], mark_second[:, None], position[:, None], window, WINDOW
            )
        else:
            seen = seen_by(n[None, :], last[:, None], window, skip, WINDOW, GAP)
        highest, total, sums = add_block(
            queries_, keys_at, values_at, n < end, in_head, seen, highest, total, sums,
            scaling, softcap, SOFTCAP, PRECISION, WIDEN,
        )  # fmt: skip

    out_row = row * queries * HEADS + s * HEADS + hq
    if WHOLE:
        highest, total, sums = merge_sums(joined_highest, joined_total, joined_sums, highest, total, sums)
        store_result(out, out_row, d, size, total, sums, query_exists, in_head)
    elif first_segment == last_segment:
        store_result(out, out_row, d, size, total, sums, query_exists, in_head)
    else:
        active = query_exists & sees_segment(segment, last, position, window, skip, SEGMENT, WINDOW, GAP)
        # One segment's rows in `parts`, and this block's rows of the first segment.
        rows = tl.num_programs(1).to(tl.int64) * tl.num_programs(2) * queries * GROUP
        at = (head * tl.num_programs(2) + rank) * queries * GROUP + m
        store_sums(parts, peaks, totals, at + segment * rows, d, size, highest, total, sums, active, in_head)
        # All threads have stored before one of them counts: the program that counts last reads these sums.
        tl.debug_barrier()
        counter = counters + (rank * tl.num_programs(1) + head) * (tl.num_programs(0) // segments) + block
        if tl.atomic_add(counter, 1) == last_segment - own_segment:
            tl.store(counter, 0)
            highest, total, sums = merge_parts(
                parts, peaks, totals, at, rows, d, size, first_segment, last_segment, query_exists, in_head,
                last, position, window, skip, BLOCK_M, BLOCK_D, SEGMENT, WINDOW, GAP, UNROLLED,
            )  # fmt: skip
            store_result(out, out_row, d, size, total, sums, query_exists, in_head)


@triton.jit(do_not_specialize=["batch", "queries", "window", "blocks", "last_position"])
def attend_prefix(
    q, k, v, lengths, starts, groups, order, skips, positions, parts, peaks, totals,
    cos, sin, q_norm, last_position, eps,
    q_b, q_h, q_s, k_b, k_h, k_n, v_b, v_h, v_n,
    scaling, softcap, batch, queries, window, blocks, dim,
    GROUP: tl.constexpr, EXACT: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SEGMENT: tl.constexpr,
    WINDOW: tl.constexpr, GAP: tl.constexpr, TREE: tl.constexpr, SOFTCAP: tl.constexpr,
    ROTATE: tl.constexpr, NORM: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Sum a segment that lies in a shared prefix, in program (block of query rows x segment, kv head, prefix).

    Query rows are those of all batch rows, ordered by prefix, so that a block loads a prefix once for many of
    them. A block with rows of several prefixes has one program per prefix. Writes sums as `attend` does. The
    programs of a segment are neighbours, so they find its columns in the hardware's cache.
    """
    block = tl.program_id(0) % blocks
    segment = tl.program_id(0) // blocks
    head = tl.program_id(1)
    low, high = segment * SEGMENT, segment * SEGMENT + SEGMENT
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    rank = m // (queries * GROUP)
    row = tl.load(order + rank, mask=rank < batch, other=0)
    active = (rank < batch) & (tl.load(starts + row) >= high)
    s = m % queries
    hq = head * GROUP + m // queries % GROUP
    last = tl.load(lengths + row).to(tl.int32) + s
    if TREE:
        # Prefixes end before trees begin, so only a window can hide a prefix's columns. Offsets of 32 bits are
        # enough, because a step has few tokens; 64-bit offsets would spill registers for heads of 256 float32
        # numbers.
        last = tl.load(positions + (row.to(tl.int32) * queries + s)).to(tl.int32)
    skip = tl.zeros_like(last) + SINKS
    if GAP:
        skip = tl.load(skips + row).to(tl.int32)
    active = active & sees_segment(segment, last, last, window, skip, SEGMENT, WINDOW, GAP)
    # This program's prefix: the one in the block that has program_id(2) smaller ones before it.
    group = tl.where(active, tl.load(groups + row), NONE)
    prefix = tl.min(group, 0)
    for _ in range(tl.program_id(2)):
        prefix = tl.min(tl.where(group > prefix, group, NONE), 0)
    active = active & (group == prefix)
    d = tl.arange(0, BLOCK_D)
    size = BLOCK_D if EXACT else dim
    in_head = d < size
    q_at = q + row * q_b + hq * q_h + s * q_s
    if ROTATE:
        queries_ = rotated(q_at, active, last, last_position, cos, sin, q_norm, d, size, eps, NORM)
        queries_ = queries_.to(q.dtype.element_ty)
    else:
        queries_ = tl.load(q_at[:, None] + d[None, :], mask=active[:, None] & in_head[None, :], other=0.0)
    queries_ = queries_.to(k.dtype.element_ty)
    if WIDEN:
        queries_ = queries_.to(tl.float32)

    # Columns that some row of this block sees.
    if WINDOW:
        first = tl.min(tl.where(active, last, NONE), 0) - window + 1
        low = tl.maximum(low, first // BLOCK_N * BLOCK_N)
    sinks, resume, count = visible(low, high, tl.min(tl.where(active, skip, NONE), 0), GAP, BLOCK_N)
    k_at = k + prefix * k_b + head.to(tl.int64) * k_h + d[:, None]
    v_at = v + prefix * v_b + head.to(tl.int64) * v_h + d[None, :]
    # Queries of other prefixes see no column. Give these queries -1 in `last`: keeping `active` too would take
    # registers in the loop.
    last = tl.where(active, last, -1)
    highest, total, sums = empty_sums(BLOCK_M, BLOCK_D)
    for i in range(tl.where(prefix == NONE, 0, count)):
        n = columns(i, low, sinks, resume, BLOCK_N)
        keys_at, values_at = k_at + n[None, :].to(tl.int64) * k_n, v_at + n[:, None].to(tl.int64) * v_n
        seen = seen_by(n[None, :], last[:, None], window, skip[:, None], WINDOW, GAP)
        highest, total, sums = add_block(
            queries_, keys_at, values_at, n < high, in_head, seen, highest, total, sums,
            scaling, softcap, SOFTCAP, PRECISION, WIDEN,
        )  # fmt: skip
    active = last >= 0
    at = (segment * tl.num_programs(1) + head).to(tl.int64) * batch * queries * GROUP + m
    store_sums(parts, peaks, totals, at, d, size, highest, total, sums, active, in_head)
