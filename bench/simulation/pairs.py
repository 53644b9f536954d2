"""Predicted: the pairs with EAGLE-3 heads on the cards that hold them, by `fitting`.

Shapes are those of the published configs (read, never loaded). A head is one layer whose queries, keys and values
read two states; its embedding and the projection of the target's states are stored, but not read for each draft.
"""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import replace

from bass_core.model.loading.catalogue import CATALOGUE
from bass_core.model.loading.choose import ROOM_GB
from bass_core.predict.hardware import HARDWARE, Assumptions, Hardware
from bass_core.predict.roofline import Roofline
from bass_core.predict.shapes import BYTES, ModelShape, llama, shape_of

from ..report.report import Row
from .sweeps import best_fixed, speed_up

# Datasheets of NVIDIA: GB/s, dense bfloat16 FLOP/s, GB. ZeroGPU runs no EAGLE-3 heads.
CARDS = (
    Hardware("RTX 4080", 717, 97.5e12, 16, source="datasheet: NVIDIA GeForce RTX 4080"),
    Hardware("L4", 300, 121e12, 24, source="datasheet: NVIDIA L4"),
    Hardware("RTX 4090", 1008, 165.2e12, 24, source="datasheet: NVIDIA GeForce RTX 4090"),
    Hardware("L40S", 864, 362e12, 48, source="datasheet: NVIDIA L40S"),
    HARDWARE["A100"],
    HARDWARE["H100"],
)
# Catalogue name -> (vocabulary, width, MLP, layers, heads, size of a head, tied, size of the EAGLE-3 head's heads,
# whether its file has an embedding). All have 8 KV heads, and EAGLE-3 heads 32,000 outputs.
SHAPES = {
    "qwen3-4b-eagle3": (151936, 2560, 9728, 36, 32, 128, True, 80, False),
    "llama-3.1-8b-eagle3": (128256, 4096, 14336, 32, 32, 128, False, 128, True),
    "qwen3-8b-eagle3": (151936, 4096, 12288, 36, 32, 128, False, 128, True),
    "qwen3-14b-eagle3": (151936, 5120, 17408, 40, 40, 128, False, 128, True),
    "qwen3-32b-eagle3": (151936, 5120, 25600, 64, 64, 128, False, 128, True),
}
ACCEPTANCES, BATCHES = (0.6, 0.8), (1, 8)


def shapes_of(name: str) -> tuple[ModelShape, ModelShape]:
    """Return the shapes of a pair's target and of its EAGLE-3 head."""
    vocab, hidden, mlp, layers, heads, dim, tied, head_dim, table = SHAPES[name]
    config = llama(vocab, hidden, mlp, layers, heads, 8, tied)
    config.head_dim = dim
    layer = llama(32000, hidden, mlp, 1, heads, 8)
    layer.head_dim = head_dim
    head = shape_of("EAGLE-3 head", layer)
    second_state = hidden * (heads + 16) * head_dim
    read = head.cost.parameters + second_state
    cost = replace(head.cost, parameters=read, weight_bytes=BYTES * read)
    stored = read + 3 * hidden**2 + table * vocab * hidden
    return shape_of(name, config), replace(head, cost=cost, parameters=stored)


def fitting(arguments: Namespace, assumed: Assumptions) -> list[Row]:
    """Predict each pair with its best fixed length, for the cards whose memory holds it and ROOM_GB more."""
    results: list[Row] = []
    for card in CARDS:
        for name in SHAPES:
            needed = CATALOGUE[name].gigabytes + ROOM_GB
            if needed > card.memory:
                continue
            costs = Roofline(card, *shapes_of(name), arguments.context, assumed=assumed)
            row: Row = {"kind": "predicted", "section": "pairs", "hardware": card.name, "memory GB": card.memory}
            row |= {"pair": name, "needs GB": math.ceil(needed)}
            for rows in BATCHES:
                row |= {f"regular tokens/s, batch {rows}": 1000 * rows / costs.verify_ms(rows, rows)}
                for rate in ACCEPTANCES:
                    length = best_fixed(costs, rate, rows)
                    row[f"batch {rows}, a {rate}"] = speed_up(costs, rate, rows, length)
            results.append(row)
    return results
