"""Products and sums in vector registers: LLVM code for numba.

Contract: `multiply` multiplies packed weights (kinds.py) by a few vectors, `dots` some by one. Every result is
summed in one order whatever stands beside it: over the inputs lane by lane, then the lanes in a fixed tree. So
it has the same bits alone and among others. One text serves AVX-512, AVX2 and NEON. Arguments are addresses, as
uintp, and sizes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .kinds import COLUMNS, FLOATS, INT, KINDS, LANES, ROWS, STEP, Kind, count, fma, loaded

# Keys that are multiplied at once: their sums fit one register.
_KEYS = min(8, LANES)
# columns, addresses of weights, vectors and results, groups, steps, stride.
MULTIPLY = types.void(*[types.intp, types.uintp, types.uintp, types.uintp, types.intp, types.intp, types.intp])

# Addresses of packed weights and of their bfloat16 form, groups, steps.
UNPACK = types.void(types.uintp, types.uintp, types.intp, types.intp)


def shuffled(b: Any, first: Any, second: Any, order: list[int]) -> Any:
    return b.shuffle_vector(first, second, ir.Constant(ir.VectorType(INT, len(order)), order))


def sum_of_lanes(b: Any, sums: list[Any]) -> Any:
    """[len(sums)]: each vector's sum, of at most as many vectors as lanes.

    In each step the upper half of the lanes is added to the lower.
    """
    lanes = sums[0].type.count
    while lanes > 1:
        # Two vectors are joined before they are halved, while there are two.
        pairs = list(zip(sums[::2], sums[1::2], strict=True)) if len(sums) > 1 else [(sums[0], sums[0])]
        width = sums[0].type.count
        starts = [at for at in range(0, width * min(len(sums), 2), lanes)]
        low = [at + i for at in starts for i in range(lanes // 2)]
        high = [i + lanes // 2 for i in low]
        sums = [b.fadd(shuffled(b, *pair, low), shuffled(b, *pair, high)) for pair in pairs]
        lanes //= 2
    return sums[0]


def store(b: Any, value: Any, address: Any) -> None:
    b.store(value, b.inttoptr(address, value.type.as_pointer())).align = 4


@intrinsic(prefer_literal=True)
def multiply(_: Any, kind: Any, columns: Any, w: Any, x: Any, y: Any, groups: Any, steps: Any, stride: Any) -> Any:
    """y[c * stride + ROWS * g + r] = the product of row r of group g and vector c, float32.

    kind: a literal (kinds.py); columns: 1 to COLUMNS; w: packed weights [groups][steps]; x: vectors
    [steps][columns][STEP].
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        columns, *rest = args[1:]
        after = b.append_basic_block("multiplied")
        switch = b.switch(columns, after)
        for width in range(1, COLUMNS + 1):
            case = b.append_basic_block(f"columns{width}")
            switch.add_case(count(width), case)
            b.position_at_end(case)
            _multiply(b, KINDS[kind.literal_value], width, *rest)
            b.branch(after)
        b.position_at_end(after)
        return context.get_dummy_value()

    if not isinstance(kind, types.IntegerLiteral):
        return None
    return types.void(kind, *MULTIPLY.args), generate


@intrinsic(prefer_literal=True)
def unpack(_: Any, kind: Any, w: Any, out: Any, groups: Any, steps: Any) -> Any:
    """Write packed weights of a kind with `dot` as bfloat16 ones, [groups][steps][ROWS][STEP], at `out`."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        form, (_, w, out, groups, steps) = KINDS[kind.literal_value], args
        with cgutils.for_range(b, b.mul(groups, steps)) as step:
            rows = form.weights(b, b.add(w, b.mul(step.index, count(form.block_bytes))))
            to = b.add(out, b.mul(step.index, count(2 * ROWS * STEP)))
            for r, (row,) in enumerate(rows):
                b.store(row, b.inttoptr(b.add(to, count(2 * STEP * r)), row.type.as_pointer())).align = 64
        return context.get_dummy_value()

    if not isinstance(kind, types.IntegerLiteral):
        return None
    return types.void(kind, *UNPACK.args), generate


@intrinsic
def call_unpack(_: Any, address: Any, w: Any, out: Any, groups: Any, steps: Any) -> Any:
    """Call the compiled `unpack` of a kind (multiply.py) at an address."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [one.type for one in args[1:]])
        b.call(b.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(types.uintp, *UNPACK.args), generate


@intrinsic
def call(_: Any, address: Any, columns: Any, w: Any, x: Any, y: Any, groups: Any, steps: Any, stride: Any) -> Any:
    """Call the compiled `multiply` of a kind (multiply.py) at an address."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [one.type for one in args[1:]])
        b.call(b.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(types.uintp, *MULTIPLY.args), generate


def _multiply(
    b: Any, kind: Kind, width: int, w: Any, x: Any, y: Any, groups: Any, steps: Any, stride: Any
) -> None:
    zero = ir.Constant(kind.sums, [0.0] * kind.sums.count)
    held = [[cgutils.alloca_once_value(b, zero) for _ in range(width)] for _ in range(ROWS)]
    with cgutils.for_range(b, groups) as group:
        for slot in (slot for row in held for slot in row):
            b.store(zero, slot)
        base = b.add(w, b.mul(group.index, b.mul(steps, count(kind.block_bytes))))
        with cgutils.for_range(b, steps) as step:
            rows = kind.weights(b, b.add(base, b.mul(step.index, count(kind.block_bytes))))
            start = b.add(x, b.mul(step.index, count(width * kind.vector_bytes)))
            for c in range(width):
                vector = kind.vectors(b, b.add(start, count(c * kind.vector_bytes)))
                for r in range(ROWS):
                    total = b.load(held[r][c])
                    for weight, part in zip(rows[r], vector, strict=True):
                        total = kind.add(b, total, weight, part)
                    b.store(total, held[r][c])
        for c in range(width):
            sums = sum_of_lanes(b, [b.load(held[r][c]) for r in range(ROWS)])
            place = b.add(b.mul(stride, count(c)), b.mul(group.index, count(ROWS)))
            store(b, sums, b.add(y, b.mul(count(4), place)))


@intrinsic
def dots(_: Any, query: Any, keys: Any, out: Any, number: Any, size: Any) -> Any:
    """out[j] = query x key j, float32, over the first size - size % LANES of their `size` numbers."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        query, keys, out, number, size = args
        many = b.udiv(number, count(_KEYS))
        with cgutils.for_range(b, many) as one:
            _dots(b, query, keys, out, b.mul(one.index, count(_KEYS)), _KEYS, size)
        rest = b.mul(many, count(_KEYS))
        with cgutils.for_range(b, b.sub(number, rest)) as one:
            _dots(b, query, keys, out, b.add(rest, one.index), 1, size)
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp, types.uintp, types.intp, types.intp), generate


def _dots(b: Any, query: Any, keys: Any, out: Any, first: Any, number: int, size: Any) -> None:
    zero = ir.Constant(FLOATS, [0.0] * LANES)
    held = [cgutils.alloca_once_value(b, zero) for _ in range(number)]
    for slot in held:
        b.store(zero, slot)
    row = b.mul(size, count(4))
    base = b.add(keys, b.mul(first, row))
    with cgutils.for_range(b, b.udiv(size, count(LANES))) as part:
        at = b.mul(part.index, count(4 * LANES))
        x = loaded(b, b.add(query, at), FLOATS)
        for j, slot in enumerate(held):
            key = loaded(b, b.add(b.add(base, at), b.mul(row, count(j))), FLOATS)
            b.store(fma(b, x, key, b.load(slot)), slot)
    sums = sum_of_lanes(b, [b.load(slot) for slot in held])
    store(b, sums, b.add(out, b.mul(first, count(4))))
