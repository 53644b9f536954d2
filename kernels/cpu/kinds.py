"""How weights and vectors lie in memory, and how a step of a product multiplies them.

A packed matrix is a stream [panels][steps] of blocks, each PANEL rows x STEP inputs. Each lane of a register
belongs to one row, so a product never sums across lanes. Blocks:

- bfloat16: [STEP / 2][PANEL][2]; float16: [STEP][PANEL];
- int8: [STEP / 4][PANEL][4] unsigned bytes, q + 128; the product is multiplied by the row's scale afterwards;
- q8_0: the same, then [PANEL] float16 scales d; a weight is d q;
- q4_1: [STEP / 8][PANEL][4] bytes, then [PANEL] float16 d and [PANEL] float16 m; a weight is d q + m. Of eight
  inputs, byte j holds q of input j in its low half and of input j + 4 in its high half.

A vector is a row of blocks of STEP inputs, in the form that a kind of weights reads (`vectors_of`):

- AS_FLOATS: STEP float32; AS_PAIRS: STEP bfloat16; products and sums are float32;
- AS_BYTES: STEP signed bytes q, float32 scale s = max |x| / 127, int32 -128 sum q, float32 s sum q; x is about s q
  (Dettmers et al., LLM.int8(), arXiv 2208.07339, section 2, a block for a row). Sums over a block are exact.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from .calls.jit import cpu_features, cpu_name, has_tiles

# AVX-512 without BW (Knights Landing) has no products of bytes in whole registers, so it counts as AVX2.
_AVX512, _AVX2 = {"avx512f", "avx512bw"} <= cpu_features(), "avx2" in cpu_features()
# Numbers in a float32 register, rows of a panel (two registers), and inputs of a block.
LANES = 16 if _AVX512 else 8 if _AVX2 else 4
PANEL, STEP = 2 * LANES, 32
# Whether the CPU has dot products of bfloat16 pairs, and whether it multiplies bfloat16 tiles (AMX).
HAS_DOT = "avx512bf16" in cpu_features()
TILES = has_tiles()
# Whether bfloat16 products are faster than float32 ones. A Zen 4 does 32 bfloat16 products per cycle, and 16
# float32 products. An Emerald Rapids does 16 of either kind, but 512 bfloat16 products with tiles (measured).
FAST_DOT = TILES or (HAS_DOT and cpu_name().startswith("znver"))
# COLUMNS: the maximum number of vectors that are multiplied together; their sums and the weights must fit the
# registers. A Zen 4 is faster with half as many vectors, because the next panel is fetched during the second half;
# an Emerald Rapids is not (measured). TILE_COLUMNS: the same for tiles; six tiles of sums hold 48 vectors.
COLUMNS = 8 if _AVX512 and not (HAS_DOT and cpu_name().startswith("znver")) else 4
TILE_COLUMNS = 48
# How bytes are multiplied (`add_fours`): by vpdpbusd, of unsigned weights; by NEON's sdot; by SSSE3's vpmaddubsw,
# AVX2's or AVX-512's; or without any of these. LLVM lists no features of an Apple CPU, so we go by its name.
HAS_VNNI = ("avx512vnni" if _AVX512 else "avxvnni") in cpu_features()
_HAS_SDOT = "dotprod" in cpu_features() or cpu_name().startswith(("apple-m", "neoverse-"))
_HAS_PAIRS = "ssse3" in cpu_features()
# Whether products of bytes are summed in pairs, in 16 bits.
IN_PAIRS = not (HAS_VNNI or _HAS_SDOT)

FLOAT, BYTE, SHORT, INT, LONG = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOATS = ir.VectorType(FLOAT, LANES)
INTS = ir.VectorType(INT, LANES)
SHORTS, BYTES = ir.VectorType(SHORT, 2 * LANES), ir.VectorType(BYTE, 4 * LANES)
FORMATS = ("bfloat16", "float16", "int8", "q8_0", "q4_1")
# Forms of a vector, and the bytes of STEP numbers in each.
AS_FLOATS, AS_PAIRS, AS_BYTES = 0, 1, 2
VECTOR_BYTES = (4 * STEP, 2 * STEP, STEP + 12)
# Bits of a weight, and bytes of a row's scales in a block.
_BITS = {"bfloat16": 16, "float16": 16, "int8": 8, "q8_0": 8, "q4_1": 4}
_SCALES = {"q8_0": 2, "q4_1": 4}


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


BFLOATS = ir.VectorType(_BFloat(), 2 * LANES)


def block_bytes(form: str) -> int:
    """Return the bytes of PANEL x STEP weights."""
    return PANEL * (STEP * _BITS[form] // 8 + _SCALES.get(form, 0))


def vectors_of(form: str, dot: bool) -> int:
    """Return the form of the vectors that weights are multiplied by.

    Raises:
        ValueError: for float16 with `dot`, which would round the weights.
    """
    if dot and form == "float16":
        raise ValueError("float16 weights are not bfloat16 numbers")
    return AS_BYTES if _BITS[form] < 16 else AS_PAIRS if dot else AS_FLOATS


def columns_of(form: str, dot: bool) -> int:
    """Return the maximum number of vectors that weights of a format are multiplied by at once."""
    return TILE_COLUMNS if TILES and vectors_of(form, dot) == AS_PAIRS else COLUMNS


def count(value: int) -> ir.Constant:
    """Return an int64 constant, e.g. an offset of an address."""
    return ir.Constant(LONG, value)


def loaded(b: Any, address: Any, kind: Any, align: int = 4) -> Any:
    """Load a value of an LLVM type from an address."""
    value = b.load(b.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def function(b: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Declare an LLVM function, or return the declared one."""
    return cgutils.get_or_insert_function(b.module, ir.FunctionType(result, arguments), name)


def splat(b: Any, value: Any, lanes: int) -> Any:
    """Return a vector with one number in all lanes."""
    first_lane = b.insert_element(
        ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined), value, ir.Constant(INT, 0)
    )
    return b.shuffle_vector(first_lane, first_lane, ir.Constant(ir.VectorType(INT, lanes), [0] * lanes))


def whole(value: int) -> ir.Constant:
    """Return a register with one int32 in all lanes."""
    return ir.Constant(INTS, [value] * LANES)


def fma(b: Any, first: Any, second: Any, third: Any) -> Any:
    """Return first x second + third, rounded once."""
    return b.call(function(b, f"llvm.fma.v{LANES}f32", FLOATS, FLOATS, FLOATS, FLOATS), [first, second, third])


def add_pairs(b: Any, total: Any, first: Any, second: Any) -> Any:
    """Return total plus, in each lane, two products of bfloat16 numbers."""
    dot = function(b, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, FLOATS, BFLOATS, BFLOATS)
    return b.call(dot, [total, first, second])


def add_fours(b: Any, total: Any, weights: Any, vector: Any) -> Any:
    """Return the total plus, in each lane, four products of bytes; this is exact.

    Args:
        total: INTS. With `IN_PAIRS`, SHORTS if the weights have 4 bits: a block's pairs of products fit 16 bits.
        weights: INTS of four bytes. Those of 8 bits are signed (`signed`), or q + 128 with HAS_VNNI.
        vector: INTS of four signed bytes, -127 to 127.
    """
    if HAS_VNNI:
        dot = function(b, f"llvm.x86.avx512.vpdpbusd.{32 * LANES}", INTS, INTS, INTS, INTS)
        return b.call(dot, [total, weights, vector])
    weights, vector = b.bitcast(weights, BYTES), b.bitcast(vector, BYTES)
    if _HAS_SDOT:
        dot = function(b, f"llvm.aarch64.neon.sdot.v{LANES}i32.v{4 * LANES}i8", INTS, INTS, BYTES, BYTES)
        return b.call(dot, [total, weights, vector])
    if total.type == SHORTS:
        return b.add(total, _pairs(b, weights, vector))
    if _HAS_PAIRS:
        # vpmaddubsw multiplies unsigned bytes by signed ones, so the vector takes the weights' signs. (The sum of
        # two products of unsigned bytes could exceed 16 bits.)
        vector = _with_signs_of(b, weights, vector)
        flag = ir.IntType(1)
        size = function(b, f"llvm.abs.v{4 * LANES}i8", BYTES, BYTES, flag)
        weights = b.call(size, [weights, ir.Constant(flag, 0)])
    return b.add(total, sum_of_pairs(b, _pairs(b, weights, vector)))


def signed(b: Any, weights: Any) -> Any:
    """Return bytes q of bytes q + 128, as INTS."""
    return b.xor(weights, whole(-0x7F7F7F80))


def sum_of_pairs(b: Any, pairs: Any) -> Any:
    """Return the sums of two neighbouring 16-bit numbers, in 32 bits."""
    if not _HAS_PAIRS:
        return b.add(*(b.sext(half, INTS) for half in _even_and_odd(b, pairs)))
    name = {4: "sse2.pmadd.wd", 8: "avx2.pmadd.wd", 16: "avx512.pmaddw.d.512"}[LANES]
    ones = ir.Constant(SHORTS, [1] * 2 * LANES)
    return b.call(function(b, f"llvm.x86.{name}", INTS, SHORTS, SHORTS), [pairs, ones])


def _pairs(b: Any, weights: Any, vector: Any) -> Any:
    """Return the sums of two neighbouring products, in 16 bits."""
    if not _HAS_PAIRS:
        wide = ir.VectorType(SHORT, 4 * LANES)
        return b.add(*_even_and_odd(b, b.mul(b.sext(weights, wide), b.sext(vector, wide))))
    name = {4: "ssse3.pmadd.ub.sw.128", 8: "avx2.pmadd.ub.sw", 16: "avx512.pmaddubs.w.512"}[LANES]
    return b.call(function(b, f"llvm.x86.{name}", SHORTS, BYTES, BYTES), [weights, vector])


def _with_signs_of(b: Any, weights: Any, vector: Any) -> Any:
    """Negate the bytes of a vector whose weights are negative. Those of weights of 0 don't matter."""
    if LANES == 16:  # AVX-512 has no vpsignb
        zero = ir.Constant(BYTES, [0] * 4 * LANES)
        return b.select(b.icmp_signed("<", weights, zero), b.sub(zero, vector), vector)
    name = {4: "ssse3.psign.b.128", 8: "avx2.psign.b"}[LANES]
    return b.call(function(b, f"llvm.x86.{name}", BYTES, BYTES, BYTES), [vector, weights])


def _even_and_odd(b: Any, numbers: Any) -> list[Any]:
    size = numbers.type.count
    return [
        b.shuffle_vector(numbers, numbers, ir.Constant(ir.VectorType(INT, size // 2), list(range(odd, size, 2))))
        for odd in (0, 1)
    ]


def pinned(b: Any, rows: list[list[Any]]) -> list[list[Any]]:
    """Return the vectors of `rows`, all of one type, through an empty assembly instruction.

    LLVM then knows nothing about them, and computes them before the next ones. Otherwise it would multiply all
    weights of a block by one vector after another, with the weights on the stack, and on some CPUs move all
    prefetches to the block's beginning.
    """
    register = {"x86_64": "v", "aarch64": "w", "arm64": "w"}.get(b.module.triple.split("-")[0])
    if register is None:
        return rows
    values = [value for row in rows for value in row]
    kinds, places = [value.type for value in values], [str(i) for i in range(len(values))]
    result = ir.LiteralStructType(kinds)
    constraints = ",".join([f"={register}"] * len(values) + places)
    if len(values) == 1:
        result = kinds[0]
    hidden = b.call(ir.InlineAsm(ir.FunctionType(result, kinds), "", constraints, side_effect=True), values)
    parts = iter([hidden] if len(values) == 1 else [b.extract_value(hidden, i) for i in range(len(values))])
    return [[next(parts) for _ in row] for row in rows]


def halves(b: Any, address: Any) -> Any:
    """Load LANES float16 numbers as float32."""
    return b.fpext(loaded(b, address, ir.VectorType(ir.HalfType(), LANES), 2), FLOATS)
