"""The models of predictions: the bytes and FLOPs of one forward of each.

A `shape` is counted on a model built from its config on torch's meta device, without weights. Costs are those of
model/weights/cost.py, with bfloat16 weights, keys and values. A `ModelSize` is known only by its size; all numbers
that it leaves out are guessed by one rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kernels.shapes import LARGEST_WEIGHT

from ..model.weights.cost import ModelCost, model_cost

BYTES = 2  # bytes per bfloat16 number


@dataclass(frozen=True)
class ModelShape:
    """A model's numbers.

    Attributes:
        parameters: number of parameters in memory, including an embedding table that is only looked up.
        bytes_per_weight: 2 for bfloat16.
        torch_kernels: additional kernels per layer in a step of several tokens, because torch multiplies with
            weights of more than LARGEST_WEIGHT bytes, and the norms and the gate are then separate kernels.
    """

    name: str
    cost: ModelCost
    parameters: int
    layers: int
    hidden: int
    kv_heads: int
    bytes_per_weight: float = BYTES
    torch_kernels: int = 0

    @property
    def held_bytes(self) -> float:
        """Bytes of all weights."""
        return self.parameters * self.bytes_per_weight


def llama(
    vocab: int, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, tied: bool = False
) -> LlamaConfig:
    """Return a config of Llama's architecture without special tokens. tied: the output shares the embedding."""
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=16384,
        tie_word_embeddings=tied,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )


# (vocabulary, width, MLP, layers, heads, KV heads, whether the output shares the embedding). The BASS paper gives
# only the number of parameters of its models, so we chose the shapes of 7.8B and 310M.
MODELS = {
    "7.8B": (50304, 4096, 15360, 32, 32, 8, False),
    "310M": (50304, 2048, 6656, 4, 16, 4, True),
    # SmolLM2
    "1.7B": (49152, 2048, 8192, 24, 32, 32, True),
    "135M": (49152, 576, 1536, 30, 9, 3, True),
    # Llama 3 and 3.2
    "70B": (128256, 8192, 28672, 80, 64, 8, False),
    "8B": (128256, 4096, 14336, 32, 32, 8, False),
    "1B": (128256, 2048, 8192, 16, 32, 8, True),
}
# Targets and their drafts.
PAIRS = {"7.8B": "310M", "1.7B": "135M", "70B": "8B"}


# Kernels around each of a layer's four products if torch computes it (model/llama_cuda.py): the norm before
# queries, keys and values; the sum and norm before gate and up, and the gate after them.
_FUSED = (1, 0, 2, 0)


def _torch_kernels(sizes: tuple[float, float, float, float]) -> int:
    """Return ModelShape.torch_kernels for these bytes of a layer's four products."""
    return sum(fused for fused, size in zip(_FUSED, sizes, strict=True) if size > LARGEST_WEIGHT)


def shape_of(name: str, config: LlamaConfig) -> ModelShape:
    """Return the shape of a Llama config, counted on an empty model."""
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    # Convert, because building it in bfloat16 would change the default dtype of all threads.
    model.to(torch.bfloat16)
    heads, dim = config.num_key_value_heads, config.head_dim
    assert heads is not None and dim is not None
    kv = 2 * config.num_hidden_layers * heads * dim * BYTES
    return ModelShape(
        name,
        model_cost(model, kv),
        sum(weight.numel() for weight in model.parameters()),
        config.num_hidden_layers,
        config.hidden_size,
        heads,
        torch_kernels=_torch_kernels(
            (
                BYTES * config.hidden_size * (config.num_attention_heads + 2 * heads) * dim,
                BYTES * config.hidden_size * config.num_attention_heads * dim,
                2 * BYTES * config.hidden_size * config.intermediate_size,
                BYTES * config.hidden_size * config.intermediate_size,
            )
        ),
    )


@cache
def shape(name: str) -> ModelShape:
    """Return the shape of a model in MODELS."""
    return shape_of(name, llama(*MODELS[name]))


def shapes(target: str) -> tuple[ModelShape, ModelShape]:
    """Return the shapes of a target in PAIRS and of its draft."""
    return shape(target), shape(PAIRS[target])


# Assumptions for a model known only by its size: its width divided by its layers, its KV heads, a head's width.
# Attention has 2.5 of the 12 x width^2 parameters of a layer.
_RATIO, _KV_HEADS, _HEAD = 128, 8, 128


@dataclass(frozen=True)
class ModelSize:
    """A model by your own numbers. Those left out follow from `parameters`.

    Attributes:
        bytes_per_weight: 2 for bfloat16, 1 for int8, 0.5 for int4.
        layers: by default as many as make the model 128 times as wide as deep, with 12 x width^2 parameters per
            layer.
        kv_bytes: bytes of one token's keys and values; by default 8 KV heads of 128 bfloat16 numbers per layer.
        name: by default the size, for example "7.8B".
    """

    parameters: float
    bytes_per_weight: float = 2.0
    layers: int | None = None
    kv_bytes: int | None = None
    name: str | None = None

    def shape(self) -> ModelShape:
        """Return the shape for these numbers."""
        layers = self.layers or max(1, round((self.parameters / (12 * _RATIO**2)) ** (1 / 3)))
        hidden = round((self.parameters / (12 * layers)) ** 0.5)
        kv = 2 * layers * _KV_HEADS * _HEAD * BYTES if self.kv_bytes is None else self.kv_bytes
        count = round(self.parameters)
        cost = ModelCost(count, round(count * self.bytes_per_weight), kv, 4 * layers * hidden)
        name = self.name or (f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.3g}M")
        square = self.bytes_per_weight * hidden**2
        kernels = _torch_kernels((1.5 * square, square, 19 / 3 * square, 19 / 6 * square))
        return ModelShape(name, cost, count, layers, hidden, _KV_HEADS, self.bytes_per_weight, kernels)
