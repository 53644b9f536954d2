"""The part of a round after the target's forward, for chains (`Judge`): captured with the forward, or without.

`Judge.run` draws or verifies on the device, and packs the outcomes into one tensor; `Judge.outcomes` reads them on
the host. `Judge.verify` does both for a forward that was not captured. tree_judge.py has the judge of trees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.plan import TreeMask

from ..machine.transfer import to_device
from ..model.forward import ForwardOutput
from ..model.static_step import Judged, RoundInputs
from ..sample.noise import NoiseKeys, RowKeys
from ..sample.params import SamplingParams
from ..sample.shaping import Shaper
from ..sequence import Sequence
from .acceptance import Outcomes, unpack
from .rejection import plain, plain_packed, verify
from .rules import Verification


@dataclass(frozen=True)
class Judge:
    """How the drafts of every round of a request are judged; equal judges share captured graphs.

    The proposals of its methods are those of draft/base.py.
    """

    sampling: SamplingParams
    verification: Verification
    synthetic: float | None

    @property
    def columns(self) -> int | None:
        """The tokens per row of every captured step; None if their number varies."""
        return None

    @property
    def reads_text(self) -> bool:
        """Whether `run` needs the rows' texts."""
        return self.sampling.reads_text

    def captures(self, device: torch.device, probs: Tensor | None) -> bool:
        """Return whether `run` can judge rounds on this device, with drafts drawn from `probs` [..., V]."""
        return True

    @staticmethod
    def inputs(rows: list[Sequence], counts: list[int], keys: RowKeys) -> RoundInputs:
        """Return the numbers of a round in which row r has counts[r] drafts."""
        return RoundInputs(
            counts=counts,
            prompts=[len(row.prompt) for row in rows],
            ids=keys.host_ids,
            positions=keys.host_positions,
            seeds=[keys.seed] * len(counts),
            tokens=[row.tokens[-1] for row in rows],
        )

    def constants(self, device: torch.device) -> dict[str, Tensor]:
        """Return the tensors that `run` reads in every round (Shaper)."""
        return Shaper.constants(self.sampling, device)

    def tree(self, constants: dict[str, Tensor], rows: int) -> TreeMask | None:
        """Return the trees of a step of `rows` rows; None if each token follows the one before."""
        return None

    def run(
        self,
        logits: Tensor,
        fed: Tensor,
        inputs: RoundInputs,
        probs: Tensor | None,
        text: Tensor | None,
        constants: dict[str, Tensor],
    ) -> Judged:
        """Judge a round on its device.

        Args:
            logits: [B, l + 1, V], the target's.
            fed: int64 [B, l + 1], the newest tokens and the drafts; what follows a row's last draft is padding.
            inputs: the round's numbers.
            probs: float32 [B, l, V], the distributions that the drafts were drawn from; None for point masses.
            text: int64 [B, T], the rows' texts without the newest tokens, if penalties read them. The newest
                tokens and the drafts are written into it.
            constants: of this judge.

        Returns:
            The outcomes as `Outcome.packed`, and the logits with penalties.
        """
        positions, keys, drafts, changed = inputs.positions, inputs.keys, fed[:, 1:], None
        if self.sampling.shapes:
            shaper = Shaper(self.sampling, constants)
            if text is not None:
                # Accepted drafts are part of the text in the next round.
                at = (positions - 1).clamp(min=0)[:, None] + torch.arange(fed.shape[1], device=fed.device)
                text.scatter_(1, at, fed)
            logits = changed = shaper.apply(logits, text, positions, inputs.prompts, drafts)
        if not drafts.shape[1]:
            return Judged(plain_packed(logits[:, 0], keys, self.sampling), changed)
        outcome = verify(logits, drafts, probs, inputs.counts, keys, self.sampling, **self._rule)
        return Judged(outcome.packed(), changed)

    def advance(self, inputs: RoundInputs, packed: Tensor) -> None:
        """Make the numbers of a judged round those of the next one, in which each row drafts as many tokens."""
        written = packed[:, 0].long() + 1
        inputs.lengths.add_(written)
        inputs.positions.add_(written)
        # A token that was chosen from unsound numbers has no embedding. Its round is refused when it is read.
        inputs.tokens.copy_(packed[:, 1].clamp(min=0))

    def outcomes(self, packed: Tensor, proposal: Any) -> Outcomes:
        """Return the outcomes of a captured round, which may be wider than its drafts.

        `packed` as in Judged; if it is on the device, this waits for it.
        """
        return self._adjusted(unpack(packed, proposal.width), proposal.width)

    def verify(self, output: ForwardOutput, proposal: Any, drafts: Tensor, keys: NoiseKeys) -> Outcomes:
        """Judge the drafts int64 [B, l] of a proposal after their forward; waits for the device."""
        if not proposal.width:
            return plain(output.logits[:, 0], keys, self.sampling)
        counts = to_device(proposal.num_drafted, drafts.device)
        outcome = verify(output.scores, drafts, proposal.probs, counts, keys, self.sampling, **self._rule)
        return self._adjusted(outcome.host(), proposal.width)

    @property
    def _rule(self) -> dict[str, Any]:
        return {"verification": self.verification, "synthetic": self.synthetic}

    def _adjusted(self, outcomes: Outcomes, width: int) -> Outcomes:
        adjust = self.verification.adjust
        return outcomes if adjust is None or not width else Outcomes.of(adjust(list(outcomes)))
