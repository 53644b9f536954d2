"""The properties of a card and of a model that decide which kernel variants are launched.

These are plain numbers, so they can go to another process as JSON. triton/needed.py turns them into launches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# By compute capability: shared memory of a program in KiB (CUDA C++ Programming Guide), and the multiprocessors of
# one card of that capability (T4, A100, A10, L4, H100, B200 and RTX 5090).
_CARDS = {
    75: (64, 40), 80: (163, 108), 86: (99, 72), 89: (99, 58), 90: (227, 132), 100: (227, 148), 120: (99, 170),
}  # fmt: skip
CAPABILITIES = tuple(_CARDS)
# With several rows, products with more bytes of weights than this (16 MiB) are torch's by default.
LARGEST_WEIGHT = 1 << 24


@dataclass(frozen=True)
class Card:
    """A CUDA device.

    Attributes:
        capability: compute capability times ten, e.g. 90 for 9.0.
        shared: the maximum number of bytes of shared memory that a program may use.
    """

    capability: int
    shared: int
    processors: int

    @classmethod
    def of_capability(cls, capability: int) -> Card:
        """Return a card of one of CAPABILITIES."""
        kilobytes, processors = _CARDS[capability]
        return cls(capability, kilobytes * 1024, processors)


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that its launches depend on.

    Attributes:
        dtype: "bfloat16", "float16" or "float32".
        outputs: logits per token.
        vocab: tokens are drawn from this many of the outputs, beginning with the first.
        hidden, mlp: sizes of the state and of the MLP; 0 if transformers' own code runs the model.
        windows: for each kind of layer, whether it has a sliding window.
        capped: whether scores have a soft cap.
        normed: whether queries and keys are normalised per head.
        verifies: whether it is a target, which verifies drafts and may draft over a gap.
        named: whether its outputs stand for only some of the target's token ids.
        doubled: whether the first layer's queries, keys and values are made from two states side by side.
    """

    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    outputs: int
    vocab: int
    hidden: int = 0
    mlp: int = 0
    normed: bool = False
    windows: tuple[bool, ...] = (False,)
    capped: bool = False
    verifies: bool = True
    named: bool = False
    doubled: bool = False

    @property
    def number(self) -> torch.dtype:
        """Return torch's dtype."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype
