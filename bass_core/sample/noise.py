"""Random numbers as a pure function of (seed, sequence id, position, stream, token).

The same key gives the same number on every device, in every batch and in every order of calls, so a row's text
does not depend on its neighbours. A stream is a role plus the position where the round began; for the target's own
draws it is the role alone. Different streams are independent.

Philox4x32-10 (Salmon et al., SC 2011) hashes each key. An invertible 32-bit mixer derives the numbers of all
tokens at a position from two words of that hash, because ten Philox rounds for each of 50,000 tokens would cost a
CPU as much as the model. Uniforms lie strictly inside (0, 1). Small ones, which decide about unlikely tokens, are
2**-32 apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..machine import cpu_kernels
from ..machine.transfer import to_device

_MASK = 0xFFFFFFFF
_ROUND_0, _ROUND_1 = 0xD2511F53, 0xCD9E8D57
_KEY_0, _KEY_1 = 0x9E3779B9, 0xBB67AE85
# Streams reserved per round: one for each role, and three spare ones.
_STREAMS = 8
# The stream of the ids of inner rounds, which no round has: it has the number of a spare role.
_INNER = 7
# In a position's number, the bits below this one are the position in the text. The bits from this one on are the
# number of a tree's node.
_NODE = 25


class Role(IntEnum):
    """The purpose of a random number. No two purposes share a stream."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    SYNTHETIC = 4


def stream(role: Role, begins: Tensor) -> Tensor:
    """Return the streams of a role in rounds that began at the positions `begins`: int64 [...].

    Rounds, and epochs of AMUSD, begin at ascending positions, and each uses every role and position at most once.
    So no number is used twice, and the next draft length may depend on earlier drafts. The target's own draw at a
    position is either written there or never seen. So the target can use one and the same stream in all rounds,
    and regular and coupled texts do not depend on where rounds end.
    """
    return torch.zeros_like(begins) if role == Role.TARGET else _STREAMS * begins + int(role)


def place_node(positions: Tensor, nodes: Tensor) -> Tensor:
    """Return positions int64 [...] that also encode the node which a tree's draft follows.

    Siblings of different parents can have the same position, but need different noise. `nodes` int64 [...] are
    below 64; 0 is the newest token and has the noise of a chain.
    """
    return positions + (nodes << _NODE)


def philox(counter: tuple[Any, ...], key: tuple[int, int]) -> tuple[Any, ...]:
    """Return Philox4x32-10 of four counters and two key words: four int64 tensors or arrays of 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product_0, product_1 = c0 * _ROUND_0, c2 * _ROUND_1
        high_0, high_1 = (product_0 >> 32) & _MASK, (product_1 >> 32) & _MASK
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, product_1 & _MASK, high_0 ^ c3 ^ k1, product_0 & _MASK
        k0, k1 = (k0 + _KEY_0) & _MASK, (k1 + _KEY_1) & _MASK
    return c0, c1, c2, c3


def words(seed: Any, sequence_ids: Tensor, positions: Tensor, streams: Tensor) -> tuple[Tensor, ...]:
    """Return the four hash words of each key; the arguments are int64 on one device and broadcast.

    `seed` is an int, or, on an accelerator, a tensor int64 [1].
    """
    ids, positions, streams = torch.broadcast_tensors(sequence_ids, positions, streams)
    key = seed & _MASK, (seed >> 32) & _MASK
    if not ids.is_cpu:
        return philox((positions & _MASK, streams & _MASK, ids & _MASK, (ids >> 32) & _MASK), key)
    if cpu_kernels.available():
        from kernels.cpu.sampling import calls  # imports numba

        return calls.words(seed, ids, positions, streams)
    # Run the same operations in numpy, which has less overhead per call than torch on so few numbers.
    at, use, row = (bits.numpy() for bits in (positions, streams, ids))
    with np.errstate(over="ignore"):
        hashed = philox((at & _MASK, use & _MASK, row & _MASK, (row >> 32) & _MASK), key)
    return tuple(torch.as_tensor(word) for word in hashed)


def uniform(seed: Any, sequence_ids: Tensor, positions: Tensor, streams: Tensor) -> Tensor:
    """Return one float32 uniform in (0, 1) for each key."""
    return to_uniform(words(seed, sequence_ids, positions, streams)[0].float())


def to_uniform(bits: Tensor) -> Tensor:
    """Turn unsigned 32-bit words, as float32 [...], into uniforms (word + 0.5) / 2**32, in place.

    Each operation rounds to nearest. The results are at least 2**-33, and clamped below 1, because log(1 - u) is
    infinite at u = 1.
    """
    return bits.mul_(2.0**-32).add_(2.0**-33).clamp_(max=1 - 2.0**-24)


def token_uniforms(
    seed: Any, sequence_ids: Tensor, positions: Tensor, streams: Tensor, tokens: int | Tensor
) -> Tensor:
    """Return one float32 uniform in (0, 1) for each key and token: the keys' shape + [V].

    The keys are those of `words`. `tokens` is V, for the ids 0 to V - 1, or the ids themselves, int64 [V].
    """
    first, second, _, _ = words(seed, sequence_ids, positions, streams)
    ids = torch.arange(tokens, device=first.device) if isinstance(tokens, int) else tokens
    hashed = ids.to(torch.int32) * _signed(_KEY_0)
    hashed = hashed + _wrap(first)[..., None]
    # In place, because allocating memory for every step would take longer than the step on a CPU.
    shifted = torch.empty_like(hashed)
    _fold(hashed, 17, shifted).mul_(_signed(0xED5AD4BB))
    hashed ^= _wrap(second)[..., None]
    _fold(hashed, 11, shifted).mul_(_signed(0xAC4C1B51))
    _fold(hashed, 15, shifted).mul_(_signed(0x31848BAB))
    return to_uniform(_fold(hashed, 14, shifted).view(torch.uint32).float())


def exponentials(
    seed: Any, sequence_ids: Tensor, positions: Tensor, streams: Tensor, tokens: int | Tensor
) -> Tensor:
    """Return one float32 exponential above 0 for each key and token; arguments as in `token_uniforms`.

    Computed as -log(1 - u): small values win the draw, and u has its finest spacing near 0.
    """
    return token_uniforms(seed, sequence_ids, positions, streams, tokens).neg_().log1p_().neg_()


def _fold(bits: Tensor, shift: int, scratch: Tensor) -> Tensor:
    """Compute bits ^= bits >> shift in place on int32 that wraps (shifts and factors: Wellons' triple32)."""
    return bits.bitwise_xor_(_shift(bits, shift, scratch))


def _shift(bits: Tensor, shift: int, out: Tensor) -> Tensor:
    """Shift the words to the right as unsigned numbers."""
    return torch.bitwise_right_shift(bits, shift, out=out).bitwise_and_((1 << (32 - shift)) - 1)


def _wrap(word: Tensor) -> Tensor:
    """Convert a 32-bit word stored in int64 to the int32 with the same bits."""
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


@dataclass
class NoiseKeys:
    """Keys of a round's random numbers. Role and token, the rest of a key, are given with each draw.

    Attributes:
        seed: seed of the request; on the device, int64 [1], inside a captured graph.
        sequence_ids: int64 [B].
        positions: int64 [B], where in the text the round's first token will be.
        epochs: int64 [B], where each row's epoch began, under AMUSD; None if the epoch is the round.
    """

    seed: Any
    sequence_ids: Tensor
    positions: Tensor
    epochs: Tensor | None = None

    @property
    def begins(self) -> Tensor:
        """Position where each row's epoch began: int64 [B]."""
        return self.positions if self.epochs is None else self.epochs

    def stream(self, role: Role) -> Tensor:
        """Return the stream of a role in this round: int64 [B]."""
        return stream(role, self.begins)

    def inner(self, positions: Tensor) -> NoiseKeys:
        """Return the keys of an inner round whose first token will be at `positions`.

        Inner rounds make drafts that are themselves drafted and verified (WindowChain). Each row and outer round
        has its own id for them, a hash of 64 bits, so they share no random number with any other round. The inner
        rounds of one outer round begin at ascending positions, as in `stream`.
        """
        high, low, _, _ = words(self.seed, self.sequence_ids, self.begins, torch.full_like(self.begins, _INNER))
        return NoiseKeys(self.seed, high << 32 | low, positions)

    def at(self, width: int) -> tuple[Tensor, Tensor]:
        """Return ids [B, 1] and positions [B, width] of the next `width` tokens."""
        steps = torch.arange(width, device=self.positions.device)
        return self.sequence_ids[:, None], self.positions[:, None] + steps


class RowKeys(NoiseKeys):
    """The keys of a decoder's rows: host numbers, copied to the device when something first reads them there.

    Attributes:
        host_ids: the sequence ids.
        host_positions: the positions.
    """

    def __init__(self, seed: int, host_ids: list[int], host_positions: list[int], device: torch.device) -> None:
        self.seed, self.epochs = seed, None
        self.host_ids, self.host_positions, self._device = host_ids, host_positions, device

    @cached_property
    def _copied(self) -> Tensor:
        # An even number of columns, so that both rows begin at a multiple of 16 bytes (Triton).
        odd = [0] * (len(self.host_ids) % 2)
        both = to_device([[*self.host_ids, *odd], [*self.host_positions, *odd]], self._device)
        return both[:, : len(self.host_ids)]

    @property
    def sequence_ids(self) -> Tensor:  # type: ignore[override]
        """int64 [B]."""
        return self._copied[0]

    @property
    def positions(self) -> Tensor:  # type: ignore[override]
        """int64 [B]."""
        return self._copied[1]
