"""Matrix products by AMX's tiles: LLVM code for numba.

`configure` prepares a thread's tiles, `multiply_tiles` multiplies a panel of packed bfloat16 weights (kinds.py) by
1 to 48 vectors, and `release` gives the tiles back. Configuring once per phase instead of once per panel saves a
fifth of a step's products at 16 tokens (measured).

Nothing is repacked. A block of vectors is [steps][vectors][64 bytes], so 16 vectors of a step are an A tile. A
step's weights are [16 pairs][32 rows][2], so 16 of its rows are a B tile. For more than 16 vectors there are
several A tiles, and the last 16 vectors overlap the 16 before them: for example, 20 vectors are multiplied as 0 to
15 and 4 to 19. A block of 17 vectors or more therefore needs the same configuration as one of 16.

Invariant: the sums of a vector have the same bits for any number of vectors. In each step of 32 inputs, tdpbf16ps
adds up the even inputs and the odd inputs in separate chains of float32 additions, and adds the sum of both to the
total. It rounds to nearest even and flushes denormals (kernels/reference/tiles.py has the same bits).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .calls.jit import cpu_features
from .kinds import BYTE, LONG, SHORT, TILE_COLUMNS, count, function
from .vectors import MULTIPLY, fetch

# Rows of a tile, bytes of a row, and cache lines of a step's weights.
ROWS, ROW_BYTES, _STEP_LINES = 16, 64, 16
_STEP_BYTES, _PANEL_ROW_BYTES = 2048, 128
_VOID = ir.VoidType()


@intrinsic
def multiply_tiles(
    _: Any, columns: Any, w: Any, x: Any, y: Any, steps: Any, stride: Any, ahead: Any, pace: Any, gap: Any
) -> Any:
    """Multiply like `multiply` (vectors.py): bfloat16 weights, 1 to TILE_COLUMNS vectors, on configured tiles."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        groups = b.udiv(b.add(args[0], count(ROWS - 1)), count(ROWS))
        after = b.append_basic_block("multiplied")
        switch = b.switch(groups, after)
        for number in range(1, TILE_COLUMNS // ROWS + 1):
            case = b.append_basic_block(f"groups{number}")
            switch.add_case(count(number), case)
            b.position_at_end(case)
            _multiply(b, number, *args)
            b.branch(after)
        b.position_at_end(after)
        return context.get_dummy_value()

    return types.void(*MULTIPLY.args), generate


def _multiply(
    b: Any, groups: int, columns: Any, w: Any, x: Any, y: Any, steps: Any, stride: Any, ahead: Any, pace: Any,
    gap: Any,
) -> None:  # fmt: skip
    """Emit the code for 1 to 3 groups of 16 vectors.

    Tile 2 g + h holds the sums of group g and half h of the rows.
    """
    sums = range(2 * groups)
    for tile in sums:
        tile_call(b, "tilezero", tile)
    width = b.mul(columns, count(ROW_BYTES))
    # The first vector of each group; the last group ends with the last vector.
    firsts = [count(ROWS * group) for group in range(groups)]
    if groups > 1:
        firsts[-1] = b.sub(columns, count(ROWS))
    # Three groups leave two tiles for operands, fewer leave four.
    a_tiles, b_tiles = ((6, 6, 6), (7, 7)) if groups == 3 else ((4, 5), (6, 7))
    with cgutils.for_range(b, steps) as step:
        weights = b.add(w, b.mul(step.index, count(_STEP_BYTES)))
        vectors = b.add(x, b.mul(step.index, width))
        # Later blocks of vectors fetch nothing: 32 useless prefetches a step would compete with the tiles' loads.
        with b.if_then(b.icmp_signed("!=", pace, count(0))):
            at = b.add(ahead, b.mul(pace, b.mul(step.index, count(_STEP_LINES))))
            for _ in range(_STEP_LINES):
                for line in (at, b.add(at, gap)):
                    fetch(b, line)
                at = b.add(at, pace)

        def load_vectors(group: int) -> None:
            start = b.add(vectors, b.mul(firsts[group], count(ROW_BYTES)))
            tile_call(b, "tileloadd64", a_tiles[group], start, count(ROW_BYTES))

        for half in range(2):
            tile_call(
                b, "tileloadd64", b_tiles[half], b.add(weights, count(ROW_BYTES * half)), count(_PANEL_ROW_BYTES)
            )
            # With one operand tile for all groups, the second half begins with the group that is still loaded.
            order = list(range(groups)) if half == 0 or groups < 3 else list(range(groups))[::-1]
            for place, group in enumerate(order):
                if half == 0 or (groups == 3 and place > 0):
                    load_vectors(group)
                tile_call(b, "tdpbf16ps", 2 * group + half, a_tiles[group], b_tiles[half])
    row = b.mul(stride, count(4))
    for group, first in enumerate(firsts):
        for half in range(2):
            to = b.add(b.add(y, b.mul(row, first)), count(ROW_BYTES * half))
            tile_call(b, "tilestored64", 2 * group + half, to, row)


@intrinsic
def configure(_: Any, vectors: Any) -> Any:
    """Configure this thread's tiles for `multiply_tiles` with blocks of `vectors` (1 or more) vectors."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        few = b.icmp_signed("<", args[0], count(ROWS))
        rows = b.trunc(b.select(few, args[0], count(ROWS)), BYTE)
        all_rows = ir.Constant(BYTE, ROWS)
        # Sums and A tiles have as many rows as there are vectors. Tiles 6 and 7 hold weights. With three groups
        # tile 6 holds vectors instead; each group then has 16 vectors, so this tile also needs 16 rows.
        configure_tiles(b, [(rows, ROW_BYTES)] * 6 + [(all_rows, ROW_BYTES)] * 2)
        return context.get_dummy_value()

    return types.void(types.intp), generate


@intrinsic
def release(_: Any) -> Any:
    """Give this thread's tiles back."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        tile_call(b, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


def configure_tiles(b: Any, tiles: list[tuple[Any, int]]) -> None:
    """Configure tiles 0 to 7, each with a number of rows (an i8 value from 1 to 16) and bytes per row."""
    config = cgutils.alloca_once(b, ir.ArrayType(BYTE, 64))
    at = b.ptrtoint(config, LONG)

    def put(place: int, value: Any) -> None:
        b.store(value, b.inttoptr(b.add(at, count(place)), value.type.as_pointer())).align = 1

    for place in range(0, 64, 8):
        put(place, ir.Constant(LONG, 0))
    put(0, ir.Constant(BYTE, 1))  # the palette
    for tile, (rows, row_bytes) in enumerate(tiles):
        put(16 + 2 * tile, ir.Constant(SHORT, row_bytes))
        put(48 + tile, rows)
    tile_call(b, "ldtilecfg", at)


def tile_call(b: Any, name: str, *args: Any) -> None:
    """Emit one AMX instruction. Python ints name tiles; the first other argument is an address.

    Emits nothing for a CPU without AMX, where no kernel reaches it: LLVM ends the process at an instruction that
    the CPU lacks, unless its optimisation has removed the branch before (NUMBA_OPT=0 does not).
    """
    if "amx-bf16" not in cpu_features():
        return
    operands = [ir.Constant(BYTE, arg) if isinstance(arg, int) else arg for arg in args]
    address = next((i for i, arg in enumerate(args) if not isinstance(arg, int)), None)
    if address is not None:
        operands[address] = b.inttoptr(operands[address], BYTE.as_pointer())
    b.call(function(b, f"llvm.x86.{name}", _VOID, *(operand.type for operand in operands)), operands)
