"""What of a card and of a model decides which variants of the kernels are launched.

Contract: plain numbers, which go to another process as JSON. triton/needed.py makes launches of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Shared memory of a program in bytes, by compute capability (CUDA C++ Programming Guide), and multiprocessors of a
# card of that capability: of a T4, A100, A10, L4, H100, B200 and RTX 5090.
_CARDS = {
    75: (64, 40), 80: (163, 108), 86: (99, 72), 89: (99, 58), 90: (227, 132), 100: (227, 148), 120: (99, 170),
}  # fmt: skip
CAPABILITIES = tuple(_CARDS)


@dataclass(frozen=True)
class Card:
    """A CUDA device. capability: 90 for 9.0; shared: most bytes of a program's shared memory."""

    capability: int
    shared: int
    processors: int

    @classmethod
    def of_capability(cls, capability: int) -> Card:
        """A card of one of CAPABILITIES."""
        kilobytes, processors = _CARDS[capability]
        return cls(capability, kilobytes * 1024, processors)


@dataclass(frozen=True)
class Shape:
    """A model's sizes, as its launches have them.

    dtype: "bfloat16", "float16" or "float32". outputs: its logits a token, of which the first `vocab` are drawn
    from. hidden, mlp: 0 for a model that transformers' own code runs; normed: its heads have norms. windows:
    whether layers have a sliding window, once for each kind of layer; capped: whether scores have a soft cap.
    verifies: of a target, which verifies drafts and may draft over a gap; named: its outputs are a part of the
    target's ids.
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

    @property
    def number(self) -> torch.dtype:
        """torch's dtype."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found
