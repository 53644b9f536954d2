"""The part of a round after the target's forward, as a function that a CUDA graph can capture with it.

`Judge.run` draws or verifies, and packs the outcomes into one tensor; `Judge.outcomes` reads them on the host. The
numbers that change from round to round are rows of one tensor, so that the graph serves every round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..sample.noise import NoiseKeys, RowKeys
from ..sample.params import SamplingParams
from .acceptance import RowOutcome, unpack
from .rejection import plain_packed, verify
from .rules import Verification


@dataclass(frozen=True)
class Judge:
    """How the drafts of every round of a request are judged; equal judges share captured graphs."""

    sampling: SamplingParams
    verification: Verification
    synthetic: float | None

    @staticmethod
    def numbers(counts: list[int], keys: RowKeys) -> list[list[int]]:
        """Return a round's numbers, one list per row of `run`'s argument of that name."""
        return [counts, keys.host_ids, keys.host_positions, [keys.seed] * len(counts)]

    def run(self, logits: Tensor, drafts: Tensor, numbers: Tensor, probs: Tensor | None) -> Tensor:
        """Judge a round on its device.

        Args:
            logits: [B, l + 1, V], the target's.
            drafts: int64 [B, l]; what follows a row's last draft is padding.
            numbers: int64 [4, B].
            probs: float32 [B, l, V], the distributions that the drafts were drawn from; None for point masses.

        Returns:
            The outcomes as `Outcome.packed`.
        """
        counts, ids, positions, seeds = numbers
        keys = NoiseKeys(seeds[:1], ids, positions)
        if not drafts.shape[1]:
            return plain_packed(logits[:, 0], keys, self.sampling)
        rule: Any = {"verification": self.verification, "synthetic": self.synthetic}
        return verify(logits, drafts, probs, counts, keys, self.sampling, **rule).packed()

    def outcomes(self, packed: Tensor, width: int) -> list[RowOutcome]:
        """Return the outcomes of a round with at most `width` drafts per row; waits for the device."""
        rows = unpack(packed)
        return [row._replace(tests=row.tests[:width]) for row in rows] if width * 5 + 4 < packed.shape[1] else rows
