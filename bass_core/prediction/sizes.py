"""A model that is known by its size alone.

Contract: plain data; the shape that it makes is a guess wherever a number was left out, by one rule for all sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..models.weights.cost import ModelCost
from .shapes import BYTES, Shape

# Of a model that is known by its size alone: width over layers, KV heads and their width.
_RATIO, _KV_HEADS, _HEAD = 128, 8, 128


@dataclass(frozen=True)
class ModelSize:
    """A model by its own numbers; what is left out follows from `parameters`.

    bytes_per_weight: 2 for bfloat16, 1 for int8, 0.5 for int4. layers: by default as many as make a model 128
    times as wide as deep, with 12 x width^2 parameters a layer. kv_bytes: of one token's keys and values; by
    default 8 KV heads of 128 bfloat16 numbers a layer. name: by default the size, such as "7.8B".
    """

    parameters: float
    bytes_per_weight: float = 2.0
    layers: int | None = None
    kv_bytes: int | None = None
    name: str | None = None

    def shape(self) -> Shape:
        """The shape that these numbers make."""
        layers = self.layers or max(1, round((self.parameters / (12 * _RATIO**2)) ** (1 / 3)))
        hidden = round((self.parameters / (12 * layers)) ** 0.5)
        kv = 2 * layers * _KV_HEADS * _HEAD * BYTES if self.kv_bytes is None else self.kv_bytes
        count = round(self.parameters)
        cost = ModelCost(count, round(count * self.bytes_per_weight), kv, 4 * layers * hidden)
        name = self.name or (f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.3g}M")
        return Shape(name, cost, count, layers, hidden, _KV_HEADS, self.bytes_per_weight)
