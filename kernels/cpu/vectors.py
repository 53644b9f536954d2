"""Products and sums in vector registers: LLVM code for numba.

`multiply` multiplies a panel of packed weights (kinds.py) by a few vectors, `dots` several vectors by one, and
`to_bytes` rounds a block of a vector to signed bytes. The same code serves AVX-512, AVX2 and NEON. Arguments are
addresses, as uintp, and sizes. Invariant: every number is summed in a fixed order, so its bits do not depend on
the numbers computed with it. Products are summed over the inputs; `dots` sums lane by lane, then the lanes in a
fixed tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .kinds import (
    AS_BYTES,
    AS_PAIRS,
    BFLOATS,
    BYTE,
    COLUMNS,
    FLOAT,
    FLOATS,
    FORMATS,
    HAS_VNNI,
    IN_PAIRS,
    INT,
    INTS,
    LANES,
    PANEL,
    SHORTS,
    STEP,
    VECTOR_BYTES,
    add_fours,
    add_pairs,
    block_bytes,
    count,
    fma,
    function,
    halves,
    loaded,
    pinned,
    signed,
    splat,
    sum_of_pairs,
    vectors_of,
    whole,
)  # fmt: skip

# How many keys `dots` multiplies at once: their sums fit one register.
_KEYS = min(8, LANES)
# Two cache lines are prefetched for every _FETCH bytes of weights.
_FETCH = 128
# Types of the arguments of `multiply` after `kind`: the number of columns; the addresses of weights, vectors and
# results; steps; stride; the address to prefetch, how far it moves each time, and the distance to the second line.
MULTIPLY = types.void(
    types.intp, types.uintp, types.uintp, types.uintp, types.intp, types.intp, types.uintp, types.intp, types.intp
)


def shuffled(b: Any, first: Any, second: Any, order: list[int]) -> Any:
    return b.shuffle_vector(first, second, ir.Constant(ir.VectorType(INT, len(order)), order))


def sum_of_lanes(b: Any, sums: list[Any]) -> Any:
    """Return the sum of each vector, as a vector [len(sums)]. There are at most as many vectors as lanes.

    Each step adds the upper half of the lanes to the lower.
    """
    lanes = sums[0].type.count
    while lanes > 1:
        # Join two vectors before halving them, while there are two.
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
def multiply(
    _: Any,
    kind: Any,
    columns: Any,
    w: Any,
    x: Any,
    y: Any,
    steps: Any,
    stride: Any,
    ahead: Any,
    pace: Any,
    gap: Any,
) -> Any:
    """Write y[c * stride + r] = row r of a panel times vector c, in float32.

    Args:
        kind: a literal, 2 x the format's place in FORMATS + `dot`.
        columns: number of vectors, 1 to COLUMNS.
        w: packed weights [steps].
        x: vectors [steps][columns].
        ahead, pace, gap: for every _FETCH bytes of weights, the lines at `ahead` and `ahead` + gap are fetched,
            and `ahead` moves by `pace`.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        columns, *rest = args[1:]
        form, dot = FORMATS[kind.literal_value // 2], bool(kind.literal_value % 2)
        after = b.append_basic_block("multiplied")
        switch = b.switch(columns, after)
        for width in range(1, COLUMNS + 1):
            case = b.append_basic_block(f"columns{width}")
            switch.add_case(count(width), case)
            b.position_at_end(case)
            one_pass = _Pass(b, form, dot, width, *rest)
            (one_pass.bytes if one_pass.vectors == AS_BYTES else one_pass.floats)()
            b.branch(after)
        b.position_at_end(after)
        return context.get_dummy_value()

    if not isinstance(kind, types.IntegerLiteral):
        return None
    return types.void(kind, *MULTIPLY.args), generate


@intrinsic
def call(
    _: Any,
    address: Any,
    columns: Any,
    w: Any,
    x: Any,
    y: Any,
    steps: Any,
    stride: Any,
    ahead: Any,
    pace: Any,
    gap: Any,
) -> Any:
    """Call the compiled `multiply` of a kind (multiply.py) at an address."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in args[1:]])
        b.call(b.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(types.uintp, *MULTIPLY.args), generate


class _Pass:
    """The code of a pass of `width` vectors over a panel."""

    def __init__(
        self, b: Any, form: str, dot: bool, width: int, w: Any, x: Any, y: Any, steps: Any, stride: Any,
        ahead: Any, pace: Any, gap: Any,
    ) -> None:  # fmt: skip
        self.b, self.form, self.width, self.vectors = b, form, width, vectors_of(form, dot)
        self._w, self._x, self._y, self._steps, self._stride, self._pace, self._gap = (
            w,
            x,
            y,
            steps,
            stride,
            pace,
            gap,
        )
        self._first, self._ahead = ahead, cgutils.alloca_once(b, ahead.type)
        self._used = 0
        zero = ir.Constant(FLOATS, [0.0] * LANES)
        self._sums = [[cgutils.alloca_once_value(b, zero) for _ in range(width)] for _ in range(PANEL // LANES)]
        for slot in (slot for row in self._sums for slot in row):
            b.store(zero, slot)

    def floats(self) -> None:
        """Emit products with 16-bit weights: sums of float32 products, input by input or pair by pair."""
        b, paired, halved = self.b, self.vectors == AS_PAIRS, self.form == "bfloat16"
        # LLVM would make blends of a mask that it knows; on a Zen 1 they compete with the products.
        ((mask,),) = pinned(b, [[whole(-65536)]])
        with self._each_step() as (w, x):
            sums = [[b.load(slot) for slot in row] for row in self._sums]
            for part in range(STEP // 2 if halved else STEP):
                places = [b.add(w, count(self._read((4 if halved else 2) * LANES))) for _ in sums]
                if not halved:
                    weights = [[halves(b, at) for at in places]]
                else:
                    raw = [loaded(b, at, INTS, 4 * LANES) for at in places]
                    low = [b.bitcast(b.shl(pairs, whole(16)), FLOATS) for pairs in raw]
                    high = [b.bitcast(b.and_(pairs, mask), FLOATS) for pairs in raw]
                    weights = [[b.bitcast(pairs, BFLOATS) for pairs in raw]] if paired else [low, high]
                for i, registers in enumerate(weights):
                    for c in range(self.width):
                        word = self._word(x, c, len(weights) * part + i, INT if paired else FLOAT)
                        for weight, row in zip(registers, sums, strict=True):
                            if paired:
                                row[c] = add_pairs(b, row[c], weight, b.bitcast(word, BFLOATS))
                            else:
                                row[c] = fma(b, weight, word, row[c])
                # Between two prefetches, float16 weights may be converted ahead of their products.
                if halved or self._used % _FETCH == 0:
                    sums = pinned(b, sums)
            for slots, row in zip(self._sums, sums, strict=True):
                for slot, total in zip(slots, row, strict=True):
                    b.store(total, slot)
        self._write()

    def bytes(self) -> None:
        """Emit products with weights of 8 and 4 bits: a block's integer products and their sum are exact."""
        b, low = self.b, self.form == "q4_1"
        zero = ir.Constant(SHORTS, [0] * SHORTS.count) if low and IN_PAIRS else whole(0)
        unsigned = not low and HAS_VNNI
        with self._each_step() as (w, x):
            # Unsigned bytes are q + 128, so subtract 128 times the sum of the vector.
            start = [self._word(x, c, STEP // 4 + 1, INT) if unsigned else zero for c in range(self.width)]
            sums = [list(start) for _ in self._sums]
            for part in range(STEP // 8 if low else STEP // 4):
                places = [b.add(w, count(self._read(4 * LANES))) for _ in sums]
                raw = [loaded(b, at, INTS, 4 * LANES) for at in places]
                parts = [raw if unsigned else [signed(b, bits) for bits in raw]]
                if low:
                    parts = [
                        [b.and_(bits, whole(0x0F0F0F0F)) for bits in (raw if half == 0 else _shifted(b, raw))]
                        for half in range(2)
                    ]
                for i, weights in enumerate(parts):
                    for c in range(self.width):
                        word = self._word(x, c, len(parts) * part + i, INT)
                        for r, weight in enumerate(weights):
                            sums[r][c] = add_fours(b, sums[r][c], weight, word)
                    sums = pinned(b, sums)
            if zero.type == SHORTS:
                sums = [[sum_of_pairs(b, pairs) for pairs in row] for row in sums]
            self._scale(w, x, sums)
        self._write()

    def _scale(self, w: Any, x: Any, sums: list[list[Any]]) -> None:
        """Add a block's integer sums, times the scales of vectors and weights, to the sums so far."""
        b, scales = self.b, []
        for _ in range({"q8_0": 1, "q4_1": 2}.get(self.form, 0)):
            scales.append([halves(b, b.add(w, count(self._read(2 * LANES)))) for _ in sums])
        for c in range(self.width):
            scale = self._word(x, c, STEP // 4, FLOAT)
            for r, row in enumerate(sums):
                total, factor = b.load(self._sums[r][c]), scale
                if scales:
                    factor = b.fmul(scales[0][r], scale)
                total = fma(b, factor, b.sitofp(row[c], FLOATS), total)
                if self.form == "q4_1":
                    total = fma(b, scales[1][r], self._word(x, c, STEP // 4 + 2, FLOAT), total)
                b.store(total, self._sums[r][c])

    @contextmanager
    def _each_step(self) -> Iterator[tuple[Any, Any]]:
        """Loop over the steps; yield the addresses of their weights and vectors."""
        b = self.b
        with cgutils.for_range(b, self._steps) as step:
            self._used, read = 0, b.mul(step.index, count(block_bytes(self.form)))
            w = b.add(self._w, read)
            b.store(b.add(self._first, b.udiv(b.mul(read, self._pace), count(_FETCH))), self._ahead)
            yield w, b.add(self._x, b.mul(step.index, count(self.width * VECTOR_BYTES[self.vectors])))

    def _read(self, size: int) -> int:
        """Return the offset of the next `size` bytes of a block; prefetch whenever another _FETCH bytes begin."""
        b, before = self.b, self._used
        self._used += size
        if -(-before // _FETCH) != -(-self._used // _FETCH):
            at = b.load(self._ahead)
            for line in (at, b.add(at, self._gap)):
                fetch(b, line)
            b.store(b.add(at, self._pace), self._ahead)
        return before

    def _word(self, x: Any, c: int, word: int, kind: Any) -> Any:
        """Load a word of a block of vector c into all lanes."""
        at = self.b.add(x, count(c * VECTOR_BYTES[self.vectors] + 4 * word))
        return splat(self.b, loaded(self.b, at, kind), LANES)

    def _write(self) -> None:
        b = self.b
        for r, row in enumerate(self._sums):
            for c, slot in enumerate(row):
                place = b.add(b.mul(self._stride, count(4 * c)), count(4 * LANES * r))
                store(b, b.load(slot), b.add(self._y, place))


def _shifted(b: Any, numbers: list[Any]) -> list[Any]:
    return [b.lshr(number, whole(4)) for number in numbers]


def fetch(b: Any, address: Any) -> None:
    """Prefetch a cache line to the second-level cache."""
    pointer = ir.IntType(8).as_pointer()
    prefetch = function(b, "llvm.prefetch.p0", ir.VoidType(), pointer, INT, INT, INT)
    b.call(prefetch, [b.inttoptr(address, pointer), *(ir.Constant(INT, option) for option in (0, 2, 1))])


@intrinsic
def to_bytes(_: Any, source: Any, to: Any) -> Any:
    """Write STEP float32 numbers at an address as a block of signed bytes with its scale and sums (kinds.py).

    NaN or infinity among them makes the scale NaN or infinite, and so every product. If all numbers are below
    2^-100, the bytes are 0.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        source, to = args
        parts = [loaded(b, b.add(source, count(at)), FLOATS) for at in range(0, 4 * STEP, 4 * LANES)]
        # Without the sign, the bits of numbers have the order of the numbers, and NaN is above all.
        sizes = [b.and_(b.bitcast(part, INTS), whole(0x7FFFFFFF)) for part in parts]
        largest = sizes[0]
        for size in sizes[1:]:
            largest = b.select(b.icmp_unsigned(">", size, largest), size, largest)
        maximum = b.bitcast(_reduced(b, "umax", largest), FLOAT)
        inverse = b.fdiv(ir.Constant(FLOAT, 127.0), maximum)
        tiny = b.fcmp_ordered("<", maximum, ir.Constant(FLOAT, 2.0**-100))
        inverse = b.select(tiny, ir.Constant(FLOAT, 0.0), inverse)
        scale, sums, factor = b.fdiv(maximum, ir.Constant(FLOAT, 127.0)), None, splat(b, inverse, LANES)
        nearest = function(b, f"llvm.roundeven.v{LANES}f32", FLOATS, FLOATS)
        zero = ir.Constant(FLOATS, [0.0] * LANES)
        for i, part in enumerate(parts):
            number = b.call(nearest, [b.fmul(part, factor)])
            number = b.fptosi(b.select(b.fcmp_ordered("ord", number, number), number, zero), INTS)
            store(b, b.trunc(number, ir.VectorType(BYTE, LANES)), b.add(to, count(LANES * i)))
            sums = number if sums is None else b.add(sums, number)
        total = _reduced(b, "add", sums)
        store(b, scale, b.add(to, count(STEP)))
        store(b, b.mul(total, ir.Constant(INT, -128)), b.add(to, count(STEP + 4)))
        store(b, b.fmul(scale, b.sitofp(total, FLOAT)), b.add(to, count(STEP + 8)))
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp), generate


def _reduced(b: Any, how: str, numbers: Any) -> Any:
    return b.call(function(b, f"llvm.vector.reduce.{how}.v{LANES}i32", INT, INTS), [numbers])


@intrinsic
def dots(_: Any, query: Any, keys: Any, out: Any, number: Any, size: Any) -> Any:
    """Write out[j] = query x key j, in float32, over the first size - size % LANES of their `size` numbers."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        query, keys, out, number, size = args
        many = b.udiv(number, count(_KEYS))
        with cgutils.for_range(b, many) as loop:
            _dots(b, query, keys, out, b.mul(loop.index, count(_KEYS)), _KEYS, size)
        rest = b.mul(many, count(_KEYS))
        with cgutils.for_range(b, b.sub(number, rest)) as loop:
            _dots(b, query, keys, out, b.add(rest, loop.index), 1, size)
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp, types.uintp, types.intp, types.intp), generate


def _dots(b: Any, query: Any, keys: Any, out: Any, first: Any, number: int, size: Any) -> None:
    zero = ir.Constant(FLOATS, [0.0] * LANES)
    slots = [cgutils.alloca_once_value(b, zero) for _ in range(number)]
    for slot in slots:
        b.store(zero, slot)
    row = b.mul(size, count(4))
    base = b.add(keys, b.mul(first, row))
    with cgutils.for_range(b, b.udiv(size, count(LANES))) as part:
        at = b.mul(part.index, count(4 * LANES))
        x = loaded(b, b.add(query, at), FLOATS)
        for j, slot in enumerate(slots):
            key = loaded(b, b.add(b.add(base, at), b.mul(row, count(j))), FLOATS)
            b.store(fma(b, x, key, b.load(slot)), slot)
    sums = sum_of_lanes(b, [b.load(slot) for slot in slots])
    store(b, sums, b.add(out, b.mul(first, count(4))))
