"""The shapes of models that people use, and the launches that are compiled for them without a GPU.

Contract: groups of 1 to 8 query heads, head sizes of 64 to 256, K that blocks divide and K that none divides;
float16 and bfloat16, of the first two also float32. What is launched for a shape says kernels/triton/needed.py;
BASS_VARIANTS, a regular expression, leaves only the launches whose names it matches.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace

from kernels.shapes import Card, Shape
from kernels.triton import needed
from kernels.triton.launch import Launch

_MODELS = [
    # SmolLM2-135M and its draft head.
    Shape("bfloat16", 9, 3, 64, 49152, 49152, 576, 1536),
    Shape("bfloat16", 9, 3, 64, 8192, 8192, 576, 1536, verifies=False, named=True),
    # Llama 3.2 1B, Llama 3.1 8B and 70B, whose K no block divides among eight parts.
    Shape("bfloat16", 32, 8, 64, 128256, 128256, 2048, 8192),
    Shape("bfloat16", 64, 8, 128, 128256, 128256, 8192, 28672),
    # Qwen3 8B and 0.6B, of whose logits those are drawn from that have a token.
    Shape("bfloat16", 32, 8, 128, 151936, 151669, 4096, 12288, normed=True),
    Shape("bfloat16", 16, 8, 128, 151936, 151669, 1024, 3072, normed=True, verifies=False),
    # By transformers' own code: Qwen2.5 7B, OPT-13B, GPT-NeoX, Phi 3, Gemma 3 and 2.
    Shape("bfloat16", 28, 4, 128, 152064, 151665),
    Shape("bfloat16", 40, 40, 128, 50272, 50265),
    Shape("bfloat16", 32, 32, 80, 50432, 50257),
    Shape("bfloat16", 32, 32, 96, 32064, 32011, windows=(True,)),
    Shape("bfloat16", 8, 4, 256, 262208, 262145, windows=(False, True)),
    Shape("bfloat16", 8, 4, 256, 256000, 256000, windows=(False, True), capped=True),
]
SHAPES = [
    *_MODELS,
    *(replace(one, dtype="float16") for one in _MODELS),
    *(replace(one, dtype="float32") for one in _MODELS[:2]),
]


def launches(shape: Shape, card: Card) -> list[Launch]:
    """The launches of a shape, those that a bench may choose included.

    Without tensor cores, attention with heads of 256 spills at any size: torch's is used there.
    """
    only = os.environ.get("BASS_VARIANTS", "")
    spills = card.capability < 80 and shape.head_dim == 256
    found = needed.launches(shape, card, chosen=True)
    return [one for one in found if re.search(only, one.name) and not (spills and "BLOCK_N" in one.options)]


def all_launches(card: Card) -> list[Launch]:
    """Every launch for a card, each once."""
    return list({one.name: one for shape in SHAPES for one in launches(shape, card)}.values())
