"""How weights lie in memory, and how a register's worth of them becomes numbers.

Contract: a packed matrix is a stream [groups][steps] of blocks, each ROWS rows x STEP inputs. A kind says
how many bytes a block has and emits the LLVM code that loads one. With `dot`, numbers are bfloat16, and pairs of
products are summed in float32 (dpbf16ps); without, both are float32. Packed rows, in each block:
- bfloat16, float16: [ROWS][STEP] 16-bit numbers;
- int8: [ROWS][STEP] bytes; the product is multiplied by the row's scale afterwards;
- Q8_0: [ROWS][STEP] bytes, then [ROWS] float16 scales d; a weight is d q;
- Q4_1: [ROWS][STEP / 2] bytes, then [ROWS] float16 d and [ROWS] float16 m; a weight is d q + m. Byte j holds q of
  input j in its low half and of input j + 16 in its high half (GGUF's own order).
Weights of Q8_0 and Q4_1 are rounded to bfloat16 for `dot`: the same numbers that a converted bfloat16 model has.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from .calls.jit import cpu_features

ROWS, STEP = 4, 32
_AVX512, _AVX2 = "avx512f" in cpu_features(), "avx2" in cpu_features()
# Numbers in a float32 register, and how many vectors' sums fit the registers beside the weights.
LANES = 16 if _AVX512 else 8 if _AVX2 else 4
COLUMNS = 6 if _AVX512 else 2 if _AVX2 else 4
# Whether the CPU multiplies bfloat16 natively.
HAS_DOT = "avx512bf16" in cpu_features()

FLOAT, BYTE, SHORT, INT, LONG = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOATS = ir.VectorType(FLOAT, LANES)
FORMATS = ("bfloat16", "float16", "int8", "q8_0", "q4_1")
# Bytes of a block's rows, and of what follows them.
_ROW_BYTES = {"bfloat16": 64, "float16": 64, "int8": 32, "q8_0": 32, "q4_1": 16}
_TAIL_BYTES = {"q8_0": 2 * ROWS, "q4_1": 4 * ROWS}


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


BFLOATS = ir.VectorType(_BFloat(), STEP)


def block_bytes(form: str) -> int:
    """Bytes of ROWS x STEP weights."""
    return ROWS * _ROW_BYTES[form] + _TAIL_BYTES.get(form, 0)


def kind_of(form: str, dot: bool) -> int:
    """The number of a kind. Raises ValueError for float16 with `dot`, which would round the weights."""
    if dot and form == "float16":
        raise ValueError("float16 weights are not bfloat16 numbers")
    return 2 * FORMATS.index(form) + dot


def count(value: int) -> ir.Constant:
    """An address's offset."""
    return ir.Constant(LONG, value)


def loaded(b: Any, address: Any, kind: Any, align: int = 4) -> Any:
    """The value of an LLVM type at an address."""
    value = b.load(b.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def function(b: Any, name: str, result: Any, *arguments: Any) -> Any:
    """A declared LLVM function."""
    return cgutils.get_or_insert_function(b.module, ir.FunctionType(result, arguments), name)


def splat(b: Any, value: Any, lanes: int) -> Any:
    """A vector of one number."""
    one = b.insert_element(ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined), value, ir.Constant(INT, 0))
    return b.shuffle_vector(one, one, ir.Constant(ir.VectorType(INT, lanes), [0] * lanes))


class Kind:
    """A format of weights, with or without `dot`. Addresses are of a block, or of STEP numbers of a vector."""

    def __init__(self, form: str, dot: bool) -> None:
        self.form, self.dot = form, dot
        self.sums = ir.VectorType(FLOAT, STEP // 2) if dot else FLOATS
        self.vector_bytes = STEP * (2 if dot else 4)
        self.block_bytes = block_bytes(form)

    def vectors(self, b: Any, address: Any) -> list[Any]:
        """The numbers of a vector, in as many registers as they need."""
        if self.dot:
            return [b.bitcast(loaded(b, address, ir.VectorType(SHORT, STEP), 64), BFLOATS)]
        parts = range(0, 4 * STEP, 4 * LANES)
        return [loaded(b, b.add(address, count(part)), FLOATS, 4 * LANES) for part in parts]

    def weights(self, b: Any, address: Any) -> list[list[Any]]:
        """For each row of the block, its numbers in as many registers as `vectors` has."""
        rows = [b.add(address, count(r * _ROW_BYTES[self.form])) for r in range(ROWS)]
        if self.form == "bfloat16" and self.dot:
            return [[b.bitcast(loaded(b, row, ir.VectorType(SHORT, STEP), 64), BFLOATS)] for row in rows]
        tail = [b.add(address, count(ROWS * _ROW_BYTES[self.form] + 2 * ROWS * i)) for i in range(2)]
        scales = [self._halves(b, tail[0]) if self.form in _TAIL_BYTES else None]
        scales += [self._halves(b, tail[1]) if self.form == "q4_1" else None]
        found = []
        for r, row in enumerate(rows):
            own = [None if one is None else self._spread(b, one, r) for one in scales]
            parts = [self._scaled(b, part, *own) for part in self._numbers(b, row)]
            found.append([self._narrowed(b, parts)] if self.dot else parts)
        return found

    def add(self, b: Any, total: Any, weight: Any, vector: Any) -> Any:
        """total + weight x vector, lane by lane."""
        if self.dot:
            dot = function(b, "llvm.x86.avx512bf16.dpbf16ps.512", self.sums, self.sums, BFLOATS, BFLOATS)
            return b.call(dot, [total, weight, vector])
        return fma(b, weight, vector, total)

    def _numbers(self, b: Any, row: Any) -> list[Any]:
        """A row's weights as float32 registers, without their scale."""
        if self.form == "q4_1":
            raw = loaded(b, row, ir.VectorType(BYTE, STEP // 2), 16)
            four = ir.Constant(raw.type, [4] * (STEP // 2))
            low = b.and_(raw, ir.Constant(raw.type, [15] * (STEP // 2)))
            return [b.uitofp(part, FLOATS) for half in (low, b.lshr(raw, four)) for part in _cut(b, half)]
        size = _ROW_BYTES[self.form] // STEP
        starts = [b.add(row, count(size * LANES * i)) for i in range(STEP // LANES)]
        if self.form == "bfloat16":
            shorts = [loaded(b, at, ir.VectorType(SHORT, LANES), 2 * LANES) for at in starts]
            return [widened(b, part) for part in shorts]
        if self.form == "float16":
            return [
                b.fpext(loaded(b, at, ir.VectorType(ir.HalfType(), LANES), 2 * LANES), FLOATS) for at in starts
            ]
        return [b.sitofp(loaded(b, at, ir.VectorType(BYTE, LANES), LANES // 2), FLOATS) for at in starts]

    @staticmethod
    def _halves(b: Any, address: Any) -> Any:
        return b.fpext(loaded(b, address, ir.VectorType(ir.HalfType(), ROWS), 8), ir.VectorType(FLOAT, ROWS))

    @staticmethod
    def _spread(b: Any, scales: Any, row: int) -> Any:
        return b.shuffle_vector(scales, scales, ir.Constant(ir.VectorType(INT, LANES), [row] * LANES))

    @staticmethod
    def _scaled(b: Any, part: Any, scale: Any, least: Any) -> Any:
        """A GGUF file's number is a float32 product, and for Q4_1 a float32 sum, each rounded."""
        if scale is None:
            return part
        part = b.fmul(scale, part)
        return part if least is None else b.fadd(part, least)

    @staticmethod
    def _narrowed(b: Any, parts: list[Any]) -> Any:
        low, high = parts  # where there is `dot`, a register holds 16 numbers
        name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        return b.call(function(b, name, BFLOATS, FLOATS, FLOATS), [high, low])


def widened(b: Any, shorts: Any) -> Any:
    """bfloat16 bits as float32."""
    long = ir.VectorType(INT, LANES)
    return b.bitcast(b.shl(b.zext(shorts, long), ir.Constant(long, [16] * LANES)), FLOATS)


def fma(b: Any, first: Any, second: Any, third: Any) -> Any:
    """first x second + third, rounded once."""
    return b.call(function(b, f"llvm.fma.v{LANES}f32", FLOATS, FLOATS, FLOATS, FLOATS), [first, second, third])


def _cut(b: Any, numbers: Any) -> list[Any]:
    """A vector in pieces of LANES."""
    starts = range(0, numbers.type.count, LANES)
    masks = [ir.Constant(ir.VectorType(INT, LANES), list(range(at, at + LANES))) for at in starts]
    return [b.shuffle_vector(numbers, numbers, mask) for mask in masks]


KINDS = {
    kind_of(form, dot): Kind(form, dot)
    for form in FORMATS
    for dot in (False, HAS_DOT)
    if not (dot and form == "float16")
}
