"""The arms of `python -m bench floor` that attend over long texts, each its own or with a prefix that all share.

Contract: an arm runs the attention of all layers of a compiled target (kernels/cpu/attention), without its
matrix products, over rows of LONG cached tokens. Its cost is in the terms of floor.py: bytes of the cached keys
and values that it must read at least once, and half the FLOPs of a query token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bass_core import ModelPair
from bass_core.model.llama_cpu import LlamaCompiled

LONG = 4000
OWN, SHARED = NAMES = ("attention, own texts", "attention, one prefix")
# Rows x tokens a row. Together the caches of 8 rows are the largest.
CASES = [(SHARED, 8, 1), (SHARED, 8, 5), (OWN, 8, 1), (OWN, 8, 5), (OWN, 1, 1), (OWN, 1, 128)]
# The bar on the lowest time over the floor, on a CPU with native bfloat16.
BAR = 1.8

Case = tuple[str, int, int]


def arms(pair: ModelPair) -> dict[Case, Callable[[], object]]:
    """The arms by what, rows, and tokens a row; none if the target is not compiled."""
    model = pair.target_step
    if not isinstance(model, LlamaCompiled):
        return {}
    from kernels.cpu.attention.step import attend_alone  # imports numba

    own = model.new_cache(8, LONG + 128)
    shared = model.new_cache(8, 128, 1, LONG)
    for row in range(8):
        shared.attach(row, 0, LONG)
    for buffer in (own.buffer, shared.buffer, shared.prefix.buffer if shared.prefix else own.buffer):
        buffer.fill_(0.5)  # memory that was never written is one page of zeros
    attention, turns = model.packed.attention, model._turns_until(LONG + 128)
    width = (attention.heads + 2 * attention.kv_heads) * attention.dim

    def arm(what: str, rows: int, tokens: int) -> Callable[[], object]:
        y, cache = torch.randn(rows * tokens, width), own if what == OWN else shared
        lengths, counts = [LONG] * rows, [tokens] * rows
        return lambda: attend_alone(attention, y.clone(), lengths, counts, cache, turns, layers=model.layers)

    return {case: arm(*case) for case in CASES}


def cost(pair: ModelPair, what: str, rows: int, tokens: int) -> tuple[float, int]:
    """Half the FLOPs of a query token, and the bytes of keys and values that all rows read."""
    one, own = pair.target_step.cost, LONG if what == OWN else 0
    columns = (LONG - own) + rows * (own + tokens)
    return one.attention_flops * (LONG + (tokens + 1) / 2) / 2, columns * one.kv_bytes
