"""The part of a round after the target's forward, as a function that a CUDA graph can capture with it.

`Judge.run` draws or verifies, and packs the outcomes into one tensor; `Judge.outcomes` reads them on the host. The
numbers that change from round to round are rows of one tensor, so that the graph serves every round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..model.forward import Judged
from ..sample.noise import NoiseKeys, RowKeys
from ..sample.params import SamplingParams
from ..sample.shaping import Shaper
from ..sequence import Sequence
from .acceptance import RowOutcome, unpack
from .rejection import plain_packed, verify
from .rules import Verification


@dataclass(frozen=True)
class Judge:
    """How the drafts of every round of a request are judged; equal judges share captured graphs."""

    sampling: SamplingParams
    verification: Verification
    synthetic: float | None

    columns = None

    @property
    def reads_text(self) -> bool:
        """Whether `run` needs the rows' texts."""
        return self.sampling.reads_text

    @staticmethod
    def numbers(rows: list[Sequence], counts: list[int], keys: RowKeys) -> list[list[int]]:
        """Return a round's numbers, one list per row of `run`'s argument of that name."""
        prompts = [len(row.prompt) for row in rows]
        return [counts, prompts, keys.host_ids, keys.host_positions, [keys.seed] * len(counts)]

    def constants(self, device: torch.device) -> dict[str, Tensor]:
        """Return the tensors that `run` reads in every round (Shaper)."""
        return Shaper.constants(self.sampling, device)

    def tree(self, constants: dict[str, Tensor], rows: int) -> None:
        """Return None: the drafts are chains."""

    def run(
        self,
        logits: Tensor,
        fed: Tensor,
        numbers: Tensor,
        probs: Tensor | None,
        text: Tensor | None,
        constants: dict[str, Tensor],
    ) -> Judged:
        """Judge a round on its device.

        Args:
            logits: [B, l + 1, V], the target's.
            fed: int64 [B, l + 1], the newest tokens and the drafts; what follows a row's last draft is padding.
            numbers: int64 [5, B].
            probs: float32 [B, l, V], the distributions that the drafts were drawn from; None for point masses.
            text: int64 [B, T], the rows' texts without the newest tokens, if penalties read them.
            constants: of this judge.

        Returns:
            The outcomes as `Outcome.packed`, and the logits with penalties.
        """
        counts, prompts, ids, positions, seeds = numbers
        keys, drafts, changed = NoiseKeys(seeds[:1], ids, positions), fed[:, 1:], None
        if self.sampling.shapes:
            shaper = Shaper(self.sampling, constants)
            if text is not None:
                # Accepted drafts are part of the text in the next round.
                at = (positions - 1).clamp(min=0)[:, None] + torch.arange(fed.shape[1], device=fed.device)
                text.scatter_(1, at, fed)
            logits = changed = shaper.apply(logits, text, positions, prompts, drafts)
        if not drafts.shape[1]:
            return Judged(plain_packed(logits[:, 0], keys, self.sampling), changed)
        rule: Any = {"verification": self.verification, "synthetic": self.synthetic}
        return Judged(verify(logits, drafts, probs, counts, keys, self.sampling, **rule).packed(), changed)

    def outcomes(self, packed: Tensor, width: int) -> list[RowOutcome]:
        """Return the outcomes of a round with at most `width` drafts per row; waits for the device."""
        rows = unpack(packed)
        return [row._replace(tests=row.tests[:width]) for row in rows] if width * 5 + 4 < packed.shape[1] else rows
