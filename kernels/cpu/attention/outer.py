"""Attention of a few queries over one segment of the columns, in vector registers: LLVM code for numba.

`segment` computes scores, their softmax and the sums of the values for a few queries of one head (`most_queries`).
Keys and values come in tiles (layout.py), so both products are sums of outer products: words of the queries or of
the weights, each times 16 words of a tile. There are three kinds:

- FLOAT32;
- PAIRS: queries and weights are bfloat16, and their products are summed in pairs in float32 (dpbf16ps);
- AMX: the same with tiles of up to 16 queries (tiled.py).

The same code serves AVX-512, AVX2 and NEON. Sizes are intp, addresses uintp. Invariant: a query is summed in the
order of the columns, so it has the same bits on its own and next to others.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..kinds import (
    BFLOATS,
    FLOAT,
    FLOATS,
    INT,
    LANES,
    LONG,
    SHORT,
    TILES,
    add_pairs,
    count,
    fma,
    function,
    loaded,
    splat,
)  # fmt: skip
from ..tiles import ROWS
from ..vectors import shuffled, store, sum_of_lanes
from . import tiled
from .layout import SEGMENT, TILE

FLOAT32, PAIRS, AMX = 0, 1, 2
# _IN_REGISTERS: the maximum number of queries in one pass over keys or values. TOGETHER: how many tiles of keys,
# or blocks of 16 output numbers, such a pass computes at once. All its sums must fit the registers.
_IN_REGISTERS = 6
TOGETHER = 4 if LANES == 16 else 1
# The largest `most_queries` of all kinds on this CPU.
QUERIES = ROWS if TILES else _IN_REGISTERS
# Bytes of a row of scores, and of 16 words.
_ROW, _WORDS = 4 * SEGMENT, 64
# How many registers of scores are turned into weights at once.
_PARTS = 4
# Bytes of scratch memory. It holds the scores, and later the softmax weights in their place.
ROOM = QUERIES * _ROW
# Types of the arguments of `segment` after `kind`.
SEGMENT_CALL = types.void(
    types.intp, types.uintp, types.intp, types.intp, types.uintp, types.uintp, types.intp, types.intp, types.uintp,
    types.uintp, types.uintp, types.intp, types.uintp,
)  # fmt: skip
# Coefficients of the polynomials nearest to (2^x - 1) / x for -1/2 <= x <= 1/2. For bfloat16 (True) the relative
# error is 1e-4, well below that of bfloat16 itself; for float32 (False) it is 9e-8.
_POWERS = {
    True: (0.6932829022407532, 0.24221095442771912, 0.05500892177224159),
    False: (
        0.6931469440460205, 0.24022231996059418, 0.05550779402256012, 0.009671999141573906, 0.00132546026725322,
    ),
}  # fmt: skip


def most_queries(kind: int) -> int:
    """Return the maximum number of queries that one call of `segment` takes."""
    return ROWS if kind == AMX else _IN_REGISTERS


@intrinsic(prefer_literal=True)
def segment(
    _: Any, kind: Any, number: Any, queries: Any, stride: Any, words: Any, keys: Any, values: Any, tiles: Any,
    columns: Any, seen: Any, scratch: Any, out: Any, size: Any, stats: Any,
) -> Any:  # fmt: skip
    """Write the weighted sums of the values, with weights 2^(score - largest score).

    Args:
        kind: a literal, FLOAT32, PAIRS or AMX.
        number: number of queries, 1 to most_queries(kind).
        queries, stride, words: the address of the queries, the bytes from one query to the next, and the words of
            each query.
        keys, values: the addresses of two int64 arrays with the addresses of the tiles; the array for keys is
            padded to a multiple of TOGETHER.
        tiles: number of tiles; the last tile contains the last column that any query sees.
        columns: the maximum number of columns that a query sees.
        seen: the address of int64 [number], the number of columns that each query sees.
        scratch: ROOM bytes.
        out, size: the address to write the results float32 [number, size / 4] to, and the bytes of one of their
            rows.
        stats: the address to write float32 [number, 2] to, the largest score and the sum of the weights of each
            query.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind_of, dot = kind.literal_value, kind.literal_value != FLOAT32
        number, queries, stride, words, keys, values, tiles, columns, seen, scratch, out, size, stats = args[1:]
        if kind_of == AMX:
            tiled.configure(b, number)
            tiled.scores(b, queries, stride, words, keys, tiles, scratch)
        else:
            blocks = b.udiv(b.add(tiles, count(TOGETHER - 1)), count(TOGETHER))
            _for_each(b, number, lambda m: _scores(b, dot, m, queries, stride, words, keys, blocks, scratch))
        parts = b.udiv(b.add(b.mul(tiles, count(TILE)), count(_PARTS * LANES - 1)), count(_PARTS * LANES))
        with cgutils.for_range(b, number) as loop:
            at, eight = b.add(scratch, b.mul(loop.index, count(_ROW))), b.mul(loop.index, count(8))
            _scores_to_weights(b, dot, at, loaded(b, b.add(seen, eight), LONG), parts, b.add(stats, eight))
        if kind_of == AMX:
            tiled.mix(b, scratch, values, tiles, out, size)
            tiled.release(b)
            return context.get_dummy_value()
        rows = b.udiv(b.add(columns, count(1)), count(2)) if dot else columns
        groups = b.udiv(size, count(_WORDS))
        many = b.udiv(groups, count(TOGETHER))

        def mix(m: int) -> None:
            for width, first, last in ((TOGETHER, count(0), many), (1, b.mul(many, count(TOGETHER)), groups)):
                if width == TOGETHER or TOGETHER > 1:
                    with cgutils.for_range(b, b.sub(last, first)) as loop:
                        place = b.mul(b.add(first, b.mul(loop.index, count(width))), count(_WORDS))
                        _mix_values(b, dot, m, width, scratch, values, tiles, rows, place, out, size)

        _for_each(b, number, mix)
        return context.get_dummy_value()

    if not isinstance(kind, types.IntegerLiteral):
        return None
    return types.void(kind, *SEGMENT_CALL.args), generate


@intrinsic
def call_segment(
    _: Any, address: Any, number: Any, queries: Any, stride: Any, words: Any, keys: Any, values: Any, tiles: Any,
    columns: Any, seen: Any, scratch: Any, out: Any, size: Any, stats: Any,
) -> Any:  # fmt: skip
    """Call the compiled `segment` of a kind (compiled.py) at an address."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in args[1:]])
        b.call(b.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(types.uintp, *SEGMENT_CALL.args), generate


def _for_each(b: Any, number: Any, emit: Any) -> None:
    """Emit a switch on the number of queries; emit(m) emits the code for m queries."""
    after = b.append_basic_block("after")
    switch = b.switch(number, after)
    for m in range(1, _IN_REGISTERS + 1):
        case = b.append_basic_block(f"queries{m}")
        switch.add_case(count(m), case)
        b.position_at_end(case)
        emit(m)
        b.branch(after)
    b.position_at_end(after)


def _slots(b: Any, m: int, width: int) -> list[list[Any]]:
    """Return stack slots, set to zero, for the sums of m queries and `width` times 16 columns."""
    slots = [[cgutils.alloca_once(b, FLOATS) for _ in range(width * TILE // LANES)] for _ in range(m)]
    for slot in (slot for row in slots for slot in row):
        b.store(ir.Constant(FLOATS, [0.0] * LANES), slot)
    return slots


def _add_outer(b: Any, dot: bool, slots: list[list[Any]], rows: list[Any], columns: list[Any]) -> None:
    """Add the word at rows[m] times the 16 words at each of `columns` to slots[m]."""
    add, parts = (add_pairs if dot else _fma), []
    for at in columns:
        if dot:
            parts.append(b.bitcast(loaded(b, at, ir.VectorType(SHORT, 2 * LANES)), BFLOATS))
        else:
            parts += [loaded(b, b.add(at, count(i)), FLOATS) for i in range(0, _WORDS, 4 * LANES)]
    for query_slots, at in zip(slots, rows, strict=True):
        word = splat(b, loaded(b, at, INT if dot else FLOAT), LANES)
        word = b.bitcast(word, BFLOATS) if dot else word
        for slot, part in zip(query_slots, parts, strict=True):
            b.store(add(b, b.load(slot), word, part), slot)


def _fma(b: Any, total: Any, first: Any, second: Any) -> Any:
    return fma(b, first, second, total)


def _store_sums(b: Any, slots: list[list[Any]], out: Any, stride: Any) -> None:
    for m, query_slots in enumerate(slots):
        for i, slot in enumerate(query_slots):
            store(b, b.load(slot), b.add(b.add(out, b.mul(stride, count(m))), count(4 * LANES * i)))


def _scores(
    b: Any, dot: bool, m: int, queries: Any, stride: Any, words: Any, keys: Any, blocks: Any, scratch: Any
) -> None:
    """Write the scores of `blocks` times TOGETHER tiles to the rows of `scratch`."""
    with cgutils.for_range(b, blocks) as block:
        slots = _slots(b, m, TOGETHER)
        first = b.add(keys, b.mul(block.index, count(8 * TOGETHER)))
        tiles = [loaded(b, b.add(first, count(8 * i)), LONG) for i in range(TOGETHER)]
        with cgutils.for_range(b, words) as word:
            at, row = b.mul(word.index, count(4)), b.mul(word.index, count(_WORDS))
            rows = [b.add(b.add(queries, b.mul(stride, count(i))), at) for i in range(m)]
            _add_outer(b, dot, slots, rows, [b.add(tile, row) for tile in tiles])
        _store_sums(b, slots, b.add(scratch, b.mul(block.index, count(_WORDS * TOGETHER))), count(_ROW))


def _mix_values(
    b: Any, dot: bool, m: int, width: int, weights: Any, values: Any, tiles: Any, rows: Any, place: Any, out: Any,
    size: Any,
) -> None:  # fmt: skip
    """Write `width` x 16 numbers of the results, from byte `place` on: sums over `rows` rows of values."""
    slots, tile_rows = _slots(b, m, width), count(TILE // 2 if dot else TILE)
    with cgutils.for_range(b, tiles) as tile:
        base = b.add(loaded(b, b.add(values, b.mul(tile.index, count(8))), LONG), place)
        before = b.mul(tile.index, tile_rows)
        left = b.sub(rows, before)
        start = b.add(weights, b.mul(before, count(4)))
        with cgutils.for_range(b, b.select(b.icmp_signed("<", left, tile_rows), left, tile_rows)) as row:
            words = b.add(start, b.mul(row.index, count(4)))
            at = b.add(base, b.mul(row.index, size))
            _add_outer(
                b, dot, slots, [b.add(words, count(_ROW * i)) for i in range(m)],
                [b.add(at, count(_WORDS * i)) for i in range(width)],
            )  # fmt: skip
    _store_sums(b, slots, b.add(out, place), size)


def _scores_to_weights(b: Any, dot: bool, scores: Any, seen: Any, blocks: Any, stats: Any) -> None:
    """Replace a query's scores by its weights, in bfloat16 or float32; columns from `seen` on get zero.

    blocks: how many blocks of _PARTS registers. The weights of a block need no more bytes than its scores, so no
    score is overwritten before it is read.
    """
    lowest = ir.Constant(FLOATS, [float("-inf")] * LANES)
    first = b.udiv(seen, count(LANES))
    with cgutils.for_range(b, b.sub(b.mul(blocks, count(_PARTS)), first)) as loop:
        part = b.add(first, loop.index)
        at = b.add(scores, b.mul(part, count(4 * LANES)))
        left = splat(b, b.trunc(b.sub(seen, b.mul(part, count(LANES))), INT), LANES)
        lanes = ir.Constant(ir.VectorType(INT, LANES), list(range(LANES)))
        store(b, b.select(b.icmp_signed("<", lanes, left), loaded(b, at, FLOATS), lowest), at)

    def parts(block: Any) -> list[Any]:
        at = b.add(scores, b.mul(block.index, count(4 * LANES * _PARTS)))
        return [loaded(b, b.add(at, count(4 * LANES * i)), FLOATS) for i in range(_PARTS)]

    maxima = [cgutils.alloca_once(b, FLOATS) for _ in range(_PARTS)]
    sums = [cgutils.alloca_once(b, FLOATS) for _ in range(_PARTS)]
    for slot in maxima:
        b.store(lowest, slot)
    for slot in sums:
        b.store(ir.Constant(FLOATS, [0.0] * LANES), slot)
    with cgutils.for_range(b, blocks) as block:
        for slot, part in zip(maxima, parts(block), strict=True):
            b.store(_greater(b, part, b.load(slot)), slot)
    largest = _largest_lane(b, [b.load(slot) for slot in maxima])
    # If a query sees nothing in this segment, its largest score is -inf and its weights are zero.
    sees_none = b.fcmp_ordered("==", largest, ir.Constant(FLOAT, float("-inf")))
    base = splat(b, b.select(sees_none, ir.Constant(FLOAT, 0.0), largest), LANES)
    with cgutils.for_range(b, blocks) as block:
        weights = [_exp2(b, dot, b.fsub(part, base)) for part in parts(block)]
        for slot, part in zip(sums, weights, strict=True):
            b.store(b.fadd(b.load(slot), part), slot)
        to = b.add(scores, b.mul(block.index, count((2 if dot else 4) * LANES * _PARTS)))
        if dot:
            weights = [_to_bfloat16(b, *weights[i : i + 2]) for i in range(0, _PARTS, 2)]
        for i, part in enumerate(weights):
            store(b, part, b.add(to, count(4 * LANES * i)))
    loop, two, three, four = (b.load(slot) for slot in sums)
    total = sum_of_lanes(b, [b.fadd(b.fadd(loop, two), b.fadd(three, four))])
    store(b, largest, stats)
    store(b, b.extract_element(total, ir.Constant(INT, 0)), b.add(stats, count(4)))


def _greater(b: Any, first: Any, second: Any) -> Any:
    """Return the larger number in each lane, or the second if one is NaN: a NaN still shows in its weight."""
    return b.select(b.fcmp_ordered(">", first, second), first, second)


def _largest_lane(b: Any, parts: list[Any]) -> Any:
    while len(parts) > 1:
        parts = [_greater(b, *pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
    largest, lanes = parts[0], LANES
    while lanes > 1:
        lanes //= 2
        low, high = (shuffled(b, largest, largest, list(range(at, at + lanes))) for at in (0, lanes))
        largest = _greater(b, low, high)
    return b.extract_element(largest, ir.Constant(INT, 0))


def _to_bfloat16(b: Any, low: Any, high: Any) -> Any:
    pairs = b.call(function(b, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", BFLOATS, FLOATS, FLOATS), [high, low])
    return b.bitcast(pairs, FLOATS)


def _exp2(b: Any, dot: bool, x: Any) -> Any:
    """Return 2^x for x <= 0, and 0 below -125. NaN stays NaN, unless it has a payload that no CPU produces."""

    def constant(value: float) -> Any:
        return ir.Constant(FLOATS, [value] * LANES)

    lowest = constant(-125.0)
    small = b.fcmp_ordered("<", x, lowest)
    at = b.select(small, lowest, x)
    # Adding 1.5 x 2^23 leaves the nearest whole number in the lowest bits.
    moved = b.fadd(at, constant(12582912.0))
    rest = b.fsub(at, b.fsub(moved, constant(12582912.0)))
    value = constant(_POWERS[dot][-1])
    for power in (*_POWERS[dot][-2::-1], 1.0):
        value = fma(b, value, rest, constant(power))
    whole = ir.VectorType(INT, LANES)
    exponent = b.shl(b.bitcast(moved, whole), ir.Constant(whole, [23] * LANES))
    value = b.bitcast(b.add(b.bitcast(value, whole), exponent), FLOATS)
    return b.select(small, constant(0.0), value)
