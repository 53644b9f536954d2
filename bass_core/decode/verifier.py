"""Feeds a round's drafts to the target and judges them, for chains and trees: `Verifier.launch`, then `read`.

A CUDA graph that can run the round contains the forward and the judge. `launch` then only gives it to the device,
and `read` waits for it. Other rounds are judged by `launch`. Nothing is committed here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..draft.base import Proposal
from ..machine.transfer import HostCopy, to_device
from ..model.forward import ForwardBatch, ForwardOutput, verified_tree
from ..model.runner import ModelRunner
from ..model.static_step import CapturedRound, GraphDrafts
from ..sample.noise import RowKeys
from ..sample.shaping import forbid, shaped, write_masks
from ..sequence import Forward, Sequence
from ..verify.acceptance import Outcomes
from ..verify.judge import Judge
from .base import DecodingParams


class VerifiedRound(NamedTuple):
    """The result of a round's verification.

    Attributes:
        proposal: the drafts that were judged.
        outcomes: those of the rows.
        output: the target's output; its tensors are valid until the next forward.
        fed: input sizes of the verification, as in Round.
        raw_logits: the target's logits before penalties and masks; None if there are none.
        staying: the rows that the round writes to, in the order of its record; None for all. The others ended in
            the round before, which was not read when this one was launched.
    """

    proposal: Proposal
    outcomes: Outcomes
    output: ForwardOutput
    fed: Forward
    raw_logits: Tensor | None
    staying: list[int] | None = None

    @property
    def written(self) -> VerifiedRound:
        """The round with the lists of only the rows that it writes to; the tensors have all rows."""
        rows = self.staying
        if rows is None:
            return self
        proposal = replace(self.proposal, num_drafted=[self.proposal.num_drafted[r] for r in rows])
        fed = Forward([self.fed.cached[r] for r in rows], [self.fed.counts[r] for r in rows])
        return VerifiedRound(proposal, self.outcomes.of_rows(rows), self.output, fed, self.raw_logits)


@dataclass
class LaunchedRound:
    """A verification that the device was given.

    Attributes:
        proposal: the drafts.
        captured: the captured round, or None if it was not captured.
        copy: its outcomes, on their way to the host.
        read: the verification's result, if it was not captured.
    """

    proposal: Proposal
    captured: CapturedRound | None = None
    copy: HostCopy | None = None
    read: VerifiedRound | None = None


class Verifier:
    """Verifies the drafts of one decoder's rounds.

    Args:
        target: the runner whose rows are those of the decoder.
        return_states: whether the forwards return hidden states.
        raw_states: as in ForwardBatch.
        branches: whether the drafts form trees.
        masked: whether some rows have grammars. Their masks are made on the host: after the forward, or before the
            graph that contains it.
        advances: whether rounds may be launched before the last one is read (`launch_again`).
    """

    def __init__(
        self,
        target: ModelRunner,
        params: DecodingParams,
        return_states: bool,
        raw_states: bool,
        branches: bool,
        masked: bool = False,
        advances: bool = False,
    ) -> None:
        self.advances = advances
        self.target, self.params, self.masked = target, params, masked
        self.return_states, self.raw_states, self.branches = return_states, raw_states, branches
        self._judge = Judge(params.sampling, params.verification, params.synthetic)
        # The texts on the device, for penalties in captured rounds.
        self._text = target.device_text() if self._judge.reads_text and not branches else None

    @torch.inference_mode()
    def prepare(self, rows: list[Sequence], width: int, soft: bool, merges: bool) -> None:
        """Prepare for rounds of `width` tokens per row, whose drafts come with distributions if `soft`.

        `merges` as in Drafter.
        """
        device, count = self.target.device, len(rows)
        zeros = [0] * count
        if not self.branches:
            tokens = torch.zeros(count, width - 1, dtype=torch.long, device=device)
            probs = torch.zeros(count, width - 1, self.target.vocab, device=device) if soft and width > 1 else None
            inputs = self._judge.inputs(rows, zeros, RowKeys(0, zeros, zeros, device))._replace(tokens=zeros)
            text = None if self._text is None else self._text.tokens
            write = partial(write_masks, rows=[], drafts=[]) if self.masked else None
            drafts = GraphDrafts(tokens, probs, [[]] * count if merges and width > 1 else None, write)
            options = self.return_states, text, self.advances
            if self.target.verify_in_graph(drafts, self._judge, inputs, *options) is not None:
                return
        fed = torch.zeros(count, width, dtype=torch.long, device=device)
        self.target.prepare(ForwardBatch(fed, zeros, return_states=self.return_states))

    def launch(self, rows: list[Sequence], proposal: Proposal, keys: RowKeys) -> LaunchedRound:
        """Feed each row's newest token and its drafts, and judge the drafts with the round's noise keys."""
        captured = self._launch_in_graph(rows, proposal, keys)
        if captured is not None:
            return LaunchedRound(proposal, captured, HostCopy(captured.judged.packed))
        return LaunchedRound(proposal, read=self._verify_after_forward(rows, proposal, keys))

    def repeats(self, last: LaunchedRound) -> bool:
        """Return whether `launch_again` can follow this round, which is not read yet."""
        captured = last.captured
        return self.advances and captured is not None and captured.repeats(1 + last.proposal.width)

    def launch_again(self, last: LaunchedRound, proposal: Proposal) -> LaunchedRound:
        """Launch the next round of the same rows, with as many drafts."""
        captured, drafts = last.captured, proposal.in_graph()
        assert captured is not None and drafts is not None
        captured.repeat(drafts)
        return LaunchedRound(proposal, captured, HostCopy(captured.judged.packed))

    def read(self, rows: list[Sequence], launched: LaunchedRound) -> VerifiedRound:
        """Return the result of a launched round; waits for the device. All rounds before it are committed."""
        proposal, captured, text = launched.proposal, launched.captured, self._text
        if captured is None or launched.copy is None:
            assert launched.read is not None
            return launched.read
        output, raw = captured.output, captured.output.logits
        outcomes = proposal.judge(self._judge).outcomes(launched.copy.wait(), proposal)
        if captured.judged.logits is not None:
            output.logits = captured.judged.logits
        if text is not None:
            # The graph wrote the newest tokens and the drafts, of which the accepted ones stay.
            for r, (row, accepted) in enumerate(zip(rows, outcomes.accepted, strict=True)):
                text.num_valid[r] = len(row.tokens) + accepted
        return VerifiedRound(proposal, outcomes, output, self._fed(rows, proposal), raw)

    def _fed(self, rows: list[Sequence], proposal: Proposal) -> Forward:
        return Forward(list(self.target.lengths[: len(rows)]), [count + 1 for count in proposal.num_drafted])

    def feed(self, rows: list[Sequence], proposal: Proposal, drafts: Tensor) -> ForwardOutput:
        """Run the target on each row's newest token and its drafts, int64 [B, N] on the target's device."""
        newest = to_device([[row.tokens[-1]] for row in rows], self.target.device)
        tokens, lengths = torch.cat((newest, drafts), dim=1), self.target.lengths[: len(rows)]
        counts, parents = [count + 1 for count in proposal.num_drafted], proposal.tree_parents
        states, raw = self.return_states, self.raw_states
        batch = ForwardBatch(tokens, lengths, counts, return_states=states, raw_states=raw)
        if parents is not None and any(parents):
            batch.tree = verified_tree(parents)
        return self.target.forward(batch)

    def move_row(self, source: int, target: int) -> None:
        """Let row `source` take the place of row `target`, which has left."""
        self.target.move_row(source, target)
        if self._text is not None and source != target:
            self._text.move_row(source, target)

    def _launch_in_graph(self, rows: list[Sequence], proposal: Proposal, keys: RowKeys) -> CapturedRound | None:
        """Verify in one captured graph, or return None if there is none for this round."""
        if not self.target.captures:
            return None
        judge, drafts, text = proposal.judge(self._judge), proposal.in_graph(), self._text
        if drafts is None or not judge.captures(self.target.device, drafts.probs):
            return None
        if judge.reads_text and text is None:
            return None
        inputs = self._judge.inputs(rows, proposal.num_drafted, keys)
        if text is not None:
            text.upload(rows, [len(row.tokens) - 1 for row in rows])
        texts = None if text is None else text.tokens
        if self.masked:
            tokens = [row[:n] for row, n in zip(proposal.tokens.tolist(), proposal.num_drafted, strict=True)]
            write = partial(write_masks, rows=rows, drafts=tokens, parents=proposal.tree_parents)
            drafts = drafts._replace(write_masks=write)
        return self.target.verify_in_graph(drafts, judge, inputs, self.return_states, texts, self.advances)

    def _verify_after_forward(self, rows: list[Sequence], proposal: Proposal, keys: RowKeys) -> VerifiedRound:
        """Run one forward, then judge the drafts."""
        fed = self._fed(rows, proposal)
        drafts, raw = to_device(proposal.tokens, self.target.device), None
        output = self.feed(rows, proposal, drafts)
        judged = proposal.after_forward(output)
        if judged is not proposal:
            drafts = to_device(judged.tokens, self.target.device)
        if self.params.sampling.shapes or (self.masked and self.params.logprobs):
            raw = output.logits
            output.logits = shaped(raw, self.params.sampling, rows, drafts, judged.tree_parents)
        elif self.masked:
            # Details of a round show the whole distribution.
            greedy = self.params.sampling.greedy and not self.params.inspect
            forbid(output.scores, rows, judged.tokens.tolist(), judged.tree_parents, greedy)
        outcomes = judged.judge(self._judge).verify(output, judged, drafts, keys)
        return VerifiedRound(judged, outcomes, output, fed, raw)
