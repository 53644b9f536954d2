"""All products of a step that our own kernels run, in one compiled call, without what lies between them.

Contract: `run` multiplies as many vectors of zeros as `tokens` by each matrix in turn, on torch's threads.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kernels.cpu.calls import pool
from kernels.cpu.calls.jit import kernel
from kernels.cpu.kinds import ROWS, STEP
from kernels.cpu.llama import PackedLlama
from kernels.cpu.products import PLAIN, blocks_of, product, scratch


@kernel
def _products(state, threads, lines, starts, short, wide, y):  # type: ignore[no-untyped-def]
    dot = lines[0, 7] == 1
    for phase in range(len(lines)):
        product(state, phase, threads, lines[phase], starts, short, wide, dot, y, PLAIN, y, short, wide)


def run(packed: PackedLlama, tokens: int) -> Callable[[], object]:
    """A function that computes the products of a step of so many tokens."""
    lines, starts = packed.lines, blocks_of(tokens)
    short, wide = scratch(tokens * STEP * int(lines[:, 3].max()), bool(lines[0, 7]))
    y = np.empty(tokens * ROWS * int(lines[:, 2].max()), np.float32)
    # Lines hold addresses: the function keeps the model whose weights lie there.
    return lambda: pool.run(_products, len(packed.lines), packed.lines, starts, short, wide, y)
