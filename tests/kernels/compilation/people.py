"""The shapes of popular models, and their launches (kernels/triton/needed.py), which are compiled without a GPU.

The models have groups of 1 to 8 query heads, heads of 64 to 256, and products whose inner size is or is not a
multiple of the block sizes. If BASS_VARIANTS is set, only launches whose names match this regular expression are
compiled.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from functools import cache

from kernels.shapes import Card, Shape
from kernels.triton import needed
from kernels.triton.launch import Launch

_MODELS = [
    # SmolLM2-135M and its draft head.
    Shape("bfloat16", 9, 3, 64, 49152, 49152, 576, 1536),
    Shape("bfloat16", 9, 3, 64, 8192, 8192, 576, 1536, verifies=False, named=True),
    # Llama 3.2 1B and Llama 3.1 70B.
    Shape("bfloat16", 32, 8, 64, 128256, 128256, 2048, 8192),
    Shape("bfloat16", 64, 8, 128, 128256, 128256, 8192, 28672),
    # An EAGLE-3 head of Llama 3.1 8B.
    Shape("bfloat16", 32, 8, 128, 32000, 32000, 4096, 14336, verifies=False, named=True, doubled=True),
    # Qwen3 8B and 0.6B, which have more logits than tokens.
    Shape("bfloat16", 32, 8, 128, 151936, 151669, 4096, 12288, normed=True),
    Shape("bfloat16", 16, 8, 128, 151936, 151669, 1024, 3072, normed=True, verifies=False),
    # Run by transformers' code: Qwen2.5 7B, OPT-13B, GPT-NeoX, Phi 3, Gemma 3 and Gemma 2.
    Shape("bfloat16", 28, 4, 128, 152064, 151665),
    Shape("bfloat16", 40, 40, 128, 50272, 50265),
    Shape("bfloat16", 32, 32, 80, 50432, 50257),
    Shape("bfloat16", 32, 32, 96, 32064, 32011, windows=(True,)),
    Shape("bfloat16", 8, 4, 256, 262208, 262145, windows=(False, True)),
    Shape("bfloat16", 8, 4, 256, 256000, 256000, windows=(False, True), capped=True),
]
SHAPES = [
    *_MODELS,
    *(replace(shape, dtype="float16") for shape in _MODELS),
    *(replace(shape, dtype="float32") for shape in _MODELS[:2]),
]


def launches(shape: Shape, card: Card) -> list[Launch]:
    """Return the launches of a shape, including launches that only benchmarks use.

    Attention with heads of 256 is left out before capability 8.0: it spills at any tile size, so torch's is used.
    """
    only = os.environ.get("BASS_VARIANTS", "")
    spills = card.capability < 80 and shape.head_dim == 256
    listed = needed.launches(shape, card)
    return [
        launch
        for launch in listed
        if (not only or re.search(only, launch.name)) and not (spills and "BLOCK_N" in launch.options)
    ]


@cache
def all_launches(card: Card) -> list[Launch]:
    """Return every launch for a card, without duplicates. A thousand meta tensors and names take a second."""
    return list({launch.name: launch for shape in SHAPES for launch in launches(shape, card)}.values())
