"""The decoding loop: regular, speculative and BASS decoding are one loop over a batch of rows.

Regular decoding is the loop without a drafter. Speculative decoding runs it over batches of one, row after row
(sequential.py). BASS (arXiv 2404.15778) runs it over a batch in which every row accepts its own number of drafts.
BatchDecoder implements Decoder (base.py). A round is four calls: lengths, propose, verify, commit.

The rule that judges drafts is known before any is drawn: the tree rule if the drafter `branches`, else the chain
rule. Each round waits for the device once. This module handles neither clocks nor texts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..draft.base import CommittedStates, Drafter, Proposal, TreeProposal, check_proposal, check_type, sources_of
from ..draft.lookup import MergedProposal
from ..length.base import Feedback, LengthPolicy, Offer, check_lengths
from ..length.policies import LONGEST
from ..machine.setup_time import setup_ms
from ..machine.stopwatch import Stopwatch
from ..machine.transfer import to_device
from ..model.device_text import DeviceText
from ..model.forward import ForwardBatch, ForwardOutput, Judged, verified_tree
from ..model.graphs import GraphRunner
from ..model.prefill import PrefillSteps
from ..model.runner import ModelRunner
from ..sample.distribution import ColumnProbs, dense
from ..sample.noise import NoiseKeys, RowKeys
from ..sample.shaping import shaped
from ..sequence import Forward, Reading, Round, RowRound, Sequence
from ..verify.acceptance import RowOutcome, mark_unsound, refuse_unsound
from ..verify.detail import Drafts, explain, rule_name
from ..verify.draft_tree import DraftTree
from ..verify.judge import Judge
from ..verify.rejection import first_tokens, plain, verify
from ..verify.tree import verify_tree
from ..verify.tree_judge import TreeJudge
from .base import CacheBytes, DecodingParams, Timeline
from .logprobs import record_logprobs
from .record import write_round

# Sources whose drafts come with the distributions that they were drawn from.
DRAWS = ("head", "model")


class Verdict(NamedTuple):
    """The result of a round's verification.

    Attributes:
        outcomes: one per row.
        output: the target's output; its tensors are valid until the next forward.
        fed: input sizes of the verification, as in Round.
        raw_logits: the target's logits before penalties; None if there are no penalties.
    """

    outcomes: list[RowOutcome]
    output: ForwardOutput
    fed: Forward
    raw_logits: Tensor | None


@dataclass
class BatchDecoder:
    """Decode one batch. When a row finishes, the last row takes its place.

    Attributes:
        drafter: None for regular decoding.
        policy: sets the draft lengths; None drafts nothing.
        limit: the longest draft that fits the caches.
        return_states: whether the target's forwards return hidden states, for the drafter or another reader.
        cache: bytes of the caches, for the lane to show.
    """

    sequences: list[Sequence]
    target: ModelRunner
    params: DecodingParams
    drafter: Drafter | None = None
    policy: LengthPolicy | None = None
    limit: int = LONGEST
    target_forwards: int = 0
    return_states: bool = False
    cache: CacheBytes | None = None
    _prefill: PrefillSteps | None = None
    _draft_prefill: PrefillSteps | None = None
    _rows: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._watch = Stopwatch(self.target.device)
        self._rows = list(self.sequences)
        self.return_states |= self.drafter is not None and self.drafter.observes_states
        self._branches = self.drafter is not None and self.drafter.branches
        params = self.params
        self._chain_judge = Judge(params.sampling, params.verification, params.synthetic)
        # The texts on the device, for penalties in captured rounds.
        self._text: DeviceText | None = None
        if isinstance(self.target, GraphRunner) and self._chain_judge.reads_text and not self._branches:
            self._text = DeviceText(self.target)
        self._prefill = PrefillSteps(self.target, [row.prompt for row in self._rows], self.return_states)
        if self.drafter is not None:
            draft_prefill = self.drafter.start(self._rows)
            self._draft_prefill = draft_prefill if self._reads_prompts() else None

    @property
    def finished(self) -> bool:
        return not self._rows

    @property
    def timeline(self) -> Timeline | None:
        """None, because draft and target do not overlap."""
        return None

    def pause(self) -> None:
        """Do nothing: no work goes on between steps."""

    def close(self) -> None:
        """Do nothing: the decoder's memory is freed when the decoder is deleted."""

    def prepare(self) -> None:
        """Prepare the models for the shapes of a plain round and of the first round."""
        rows = len(self._rows)
        # Only the drafter knows how wide a tree step is, so prepare just the plain shape here.
        longest = max(self._usable(self._lengths(self._offers())))
        widest = 1 if self._branches else 1 + longest
        for width in sorted({1, widest}):
            self._prepare_width(rows, width)
        if self.drafter is not None:
            self.drafter.prepare(rows)
            if longest > 0:
                self.drafter.prepare_chains(rows, longest)

    @torch.inference_mode()
    def _prepare_width(self, rows: int, width: int) -> None:
        """Prepare the target for rounds of `width` tokens per row, with their verification if it is captured."""
        device, zeros = self.target.device, [0] * rows
        drafts, probs = torch.zeros(rows, width - 1, dtype=torch.long, device=device), None
        if width > 1 and not self.params.sampling.greedy and self.drafter and self.drafter.source in DRAWS:
            probs = torch.zeros(rows, width - 1, self.target.vocab, device=device)
        if not self._branches:
            numbers = self._chain_judge.numbers(self._rows, zeros, RowKeys(0, zeros, zeros, device))
            if self._forward_judged(zeros, drafts, probs, numbers) is not None:
                return
        tokens = torch.zeros(rows, width, dtype=torch.long, device=device)
        self.target.prepare(ForwardBatch(tokens, zeros, return_states=self.return_states))

    @torch.inference_mode()
    def step(self) -> Round:
        """Run one prefill chunk or one round; the last chunk also samples the first tokens."""
        if self._draft_prefill is not None and not self._draft_prefill.done:
            self._draft_prefill.step()
            fed = replace(self._draft_prefill.newest, draft=True)
            return Round("prefill", reading=self._reading(), fed=fed)
        if self._prefill is not None:
            return self._prefill_step(self._prefill)
        return self._round()

    @torch.inference_mode()
    def look_ahead(self) -> tuple[Proposal, Tensor]:
        """Return a proposal and the target's logits [B, 1 + N, V] over it, as in the next round; commit nothing.

        The logits are valid until the target's next forward. Call it after the prefill.
        """
        proposal = self._propose(self._usable(self._lengths(self._offers())), self._keys())
        drafts = to_device(proposal.tokens, self.target.device)
        output = self._forward(drafts, proposal.num_drafted)
        return proposal, shaped(output.logits, self.params.sampling, self._rows, drafts)

    def _prefill_step(self, prefill: PrefillSteps) -> Round:
        prefill.step()
        if not prefill.done:
            return Round("prefill", reading=self._reading(), fed=prefill.newest)
        self.target_forwards += 1
        keys = self._keys()
        raw = prefill.logits()[:, None]
        logits = shaped(raw, self.params.sampling, self._rows)[:, 0]
        tokens = mark_unsound(first_tokens(logits, keys, self.params.sampling), logits).tolist()
        refuse_unsound(tokens)
        self._hand_states(self._rows, prefill.states)
        self._prefill = self._draft_prefill = None
        outcomes = [RowOutcome(0, token, math.nan, []) for token in tokens]
        rows = [write_round(row, outcome) for row, outcome in zip(self._rows, outcomes, strict=True)]
        if self.params.logprobs:
            record_logprobs(self._rows, rows, [[] for _ in rows], raw, logits[:, None], self.params.sampling)
        self._drop_finished()
        if self.drafter is not None and self._rows and self._reads_prompts():
            self.drafter.read(self._rows)
        return Round("prefill", rows=rows, fed=prefill.newest)

    def _reading(self) -> Reading | None:
        """Return the progress of the target's prefill. The draft's earlier prefill is not included."""
        if self._prefill is None or not self._prefill.total:
            return None
        return Reading(self._prefill.fed, self._prefill.total, [row.index for row in self._rows])

    def _round(self) -> Round:
        """Run one round: lengths, propose, verify, commit; then update the policy and record the round."""
        began, set_up, keys = time.perf_counter(), setup_ms(), self._keys()
        offers, before = self._offers(), self._draft_work()
        lengths = self._lengths(offers)
        self._watch.mark()
        proposal = self._propose(self._usable(lengths), keys)
        self._watch.mark()
        verdict = self._verify_captured(proposal, keys) or self._verify(proposal, keys)
        self._watch.mark()
        records = self._commit(proposal, verdict)
        drafted, accepted = proposal.num_drafted, [outcome.accepted for outcome in verdict.outcomes]
        forwards, drawn = (now - then for now, then in zip(self._draft_work(), before, strict=True))
        draft_ms, verify_ms = self._watch.laps()
        draft_ms = draft_ms if forwards or max(drafted) else 0.0
        if self.policy is not None:
            # A graph that this round captured is no cost of the rounds to come.
            round_ms = 1000 * (time.perf_counter() - began) - (setup_ms() - set_up)
            self.policy.observe(Feedback(offers, lengths, drafted, accepted, forwards, round_ms, draft_ms))
        self._drop_finished()
        round_ = Round("verify" if max(drafted) else "plain", max(lengths), records, lengths=lengths)
        round_.draft_ms, round_.verify_ms = draft_ms, verify_ms
        round_.draft_forwards, round_.draft_tokens = forwards, drawn
        round_.fed, round_.windowed = verdict.fed, proposal.windowed
        if self.params.inspect and max(drafted):
            round_.explain = self._explanation(proposal, verdict, records)
        return round_

    def _offers(self) -> list[Offer]:
        return [] if self.drafter is None else self.drafter.offers(self._rows)

    def _lengths(self, offers: list[Offer]) -> list[int]:
        """Return the draft length (for a tree: its depth) that the policy allows each row."""
        if self.policy is None:
            return [0] * len(self._rows)
        return check_lengths(self.policy.lengths(offers), offers, min(self.limit, self.policy.limit))

    def _reads_prompts(self) -> bool:
        """Return whether the draft reads the prompts during the prefill, which is no part of the decoding time.

        A draft model takes as long for the prompts as for many rounds, so it reads them only if the first round is
        to draft. A policy that decides this by cost counts the time (`Offer.unread`), then or in a later round.
        A draft head reads early, since one layer takes less time than the target's own prefill. Otherwise a policy
        that tries drafts later would pay for the prompts while it decodes, and no other policy would.
        """
        if self.drafter is None or self.policy is None:
            return False
        if self.drafter.reads_early and self.policy.limit > 0:
            return any(row.remaining > 1 for row in self._rows)
        offers = self._offers()
        return any(most > 0 and offer.forwards for most, offer in zip(self._lengths(offers), offers, strict=True))

    def _usable(self, lengths: list[int]) -> list[int]:
        """Limit each row's length to its remaining tokens minus one, because the target adds a token."""
        return [min(most, row.remaining - 1) for most, row in zip(lengths, self._rows, strict=True)]

    def _draft_work(self) -> tuple[int, int]:
        """Return the number of forwards of the draft model so far, and of the tokens that it drew."""
        return (0, 0) if self.drafter is None else (self.drafter.calls, self.drafter.drafted)

    def _propose(self, lengths: list[int], keys: NoiseKeys) -> Proposal:
        """Return the drafter's proposal for these lengths, of the type that its rule judges."""
        if self.drafter is None or max(lengths) <= 0:
            return Proposal(torch.zeros(len(lengths), 0, dtype=torch.long), [0] * len(lengths))
        proposal = self.drafter.propose(self._rows, lengths, keys)
        if self.drafter.is_user_object:
            check_proposal(proposal, lengths, self.target.vocab)
        return check_type(proposal, self._branches)

    def _verify_captured(self, proposal: Proposal, keys: RowKeys) -> Verdict | None:
        """Do the work of `_verify` in one captured graph, or return None if there is none for this round."""
        counts, params = proposal.num_drafted, self.params
        # The graph merges copies and the model's drafts, so that no other operator has to.
        drawn = proposal.modelled if isinstance(proposal, MergedProposal) else proposal
        points = proposal.points if isinstance(proposal, MergedProposal) else None
        if isinstance(drawn.probs, ColumnProbs):
            return None
        if isinstance(proposal, TreeProposal):
            return self._verify_captured_trees(proposal, keys)
        if self._text is None and self._chain_judge.reads_text:
            return None
        newest = [row.tokens[-1] for row in self._rows]
        numbers = self._chain_judge.numbers(self._rows, counts, keys)
        if self._text is not None:
            self._text.upload(self._rows, [len(row.tokens) - 1 for row in self._rows])
        captured = self._forward_judged(newest, drawn.tokens, drawn.probs, numbers, points)
        if captured is None:
            return None
        fed = Forward(list(self.target.lengths[: len(counts)]), [count + 1 for count in counts])
        output, judged = captured
        width, adjust, raw = proposal.width, params.verification.adjust, output.logits
        outcomes = self._chain_judge.outcomes(judged.packed, width)
        if adjust is not None and width:
            outcomes = adjust(outcomes)
        output.logits = raw if judged.logits is None else judged.logits
        self.target_forwards += 1
        if self._text is not None:
            # The graph wrote the newest tokens and the drafts, of which the accepted ones stay.
            for r, (row, outcome) in enumerate(zip(self._rows, outcomes, strict=True)):
                self._text.known[r] = len(row.tokens) + outcome.accepted
        return Verdict(outcomes, output, fed, raw)

    def _verify_captured_trees(self, proposal: TreeProposal, keys: RowKeys) -> Verdict | None:
        """Do the work of `_verify` for trees that have the drafter's full shape, if a graph can judge them."""
        counts, params, probs = proposal.num_drafted, self.params, dense(proposal.probs)
        if proposal.shape is None:
            return None
        judge = TreeJudge(params.sampling, params.verification, proposal.shape)
        if not judge.judges(self.target.device, probs):
            return None
        numbers = self._chain_judge.numbers(self._rows, counts, keys)
        newest = [row.tokens[-1] for row in self._rows]
        q = None if probs is None else probs.view(len(counts), -1, probs.shape[-1])
        captured = self.target.forward_judged(newest, proposal.tokens, q, judge, numbers, self.return_states)
        if captured is None:
            return None
        fed = Forward(list(self.target.lengths[: len(counts)]), [count + 1 for count in counts])
        output, judged = captured
        self.target_forwards += 1
        return Verdict(judge.outcomes(judged.packed, proposal.tokens, proposal.parents), output, fed, None)

    def _forward_judged(
        self,
        newest: list[int],
        drafts: Tensor,
        probs: Tensor | None,
        numbers: list[list[int]],
        points: list[list[int]] | None = None,
    ) -> tuple[ForwardOutput, Judged] | None:
        text = None if self._text is None else self._text.tokens
        judge = self._chain_judge
        states = self.return_states
        return self.target.forward_judged(newest, drafts, probs, judge, numbers, states, text, points)

    def _verify(self, proposal: Proposal, keys: NoiseKeys) -> Verdict:
        """Run one forward of the target over the drafts and verify them."""
        counts, params = proposal.num_drafted, self.params
        parents = proposal.parents if isinstance(proposal, TreeProposal) else None
        fed = Forward(list(self.target.lengths[: len(counts)]), [count + 1 for count in counts])
        drafts = to_device(proposal.tokens, self.target.device)
        output = self._forward(drafts, counts, parents)
        raw = None
        if params.sampling.shapes:
            raw = output.logits
            output.logits = shaped(raw, params.sampling, self._rows, drafts, parents)
        if not proposal.tokens.shape[1]:
            outcomes = plain(output.logits[:, 0], keys, params.sampling)
        elif isinstance(proposal, TreeProposal):
            tree = DraftTree.of(drafts, proposal.parents, proposal.drawn, dense(proposal.probs))
            outcomes = verify_tree(output.logits, tree, keys, params.sampling, params.verification)
        else:
            outcome = verify(
                output.scores,
                drafts,
                proposal.probs,
                to_device(counts, drafts.device),
                keys,
                params.sampling,
                verification=params.verification,
                synthetic=params.synthetic,
            )
            adjust = params.verification.adjust
            outcomes = outcome.host() if adjust is None else adjust(outcome.host())
        self.target_forwards += 1
        return Verdict(outcomes, output, fed, raw)

    def _commit(self, proposal: Proposal, verdict: Verdict) -> list[RowRound]:
        """Commit the accepted tokens to the target's cache, the texts and the drafter."""
        rows, outcomes = self._rows, verdict.outcomes
        refuse_unsound([outcome.next_token for outcome in outcomes])
        paths = [outcome.accepted_drafts for outcome in outcomes]
        # Column 0 of the fed tokens is the newest token; draft i is in column i + 1.
        self.target.commit_paths([[0, *(draft + 1 for draft in path)] for path in paths])
        if (states := verdict.output.vectors) is not None:
            self._hand_states(rows, lambda: CommittedStates(states, paths))
        no_parents: list[Any] = [None] * len(rows)
        parents = proposal.parents if isinstance(proposal, TreeProposal) and proposal.parents else no_parents
        judged = zip(rows, outcomes, proposal.num_drafted, parents, strict=True)
        records = [write_round(*arguments) for arguments in judged]
        if self.params.logprobs:
            logits, raw = verdict.output.logits, verdict.raw_logits
            record_logprobs(rows, records, paths, logits if raw is None else raw, logits, self.params.sampling)
        if self.drafter is not None:
            self.drafter.on_verified(rows, proposal, [outcome.accepted for outcome in outcomes])
        return records

    def _explanation(self, proposal: Proposal, verdict: Verdict, records: list[RowRound]) -> Callable[[], None]:
        """Return a function that adds details to the records; call it while this round's tensors are valid."""
        params, sources = self.params, sources_of(proposal, self.drafter)
        tree = proposal if isinstance(proposal, TreeProposal) else None

        def add_details() -> None:
            drafts = Drafts(_tokens(proposal), sources, probs=dense(proposal.probs), own=proposal.own)
            if tree is not None:
                drafts.parents, drafts.drawn = tree.parents, tree.drawn
            rule = rule_name(params.verification, params.sampling, params.synthetic, tree is not None)
            explain(records, verdict.outcomes, verdict.output.logits, drafts, params.sampling, rule)

        return add_details

    def _hand_states(self, rows: list[Sequence], states: Callable[[], Seq[Tensor]]) -> None:
        """Give the target's hidden states of the newly committed tokens to a drafter that reads states."""
        if self.drafter is not None and self.drafter.observes_states:
            committed = states()
            self.drafter.observe_states(rows, list(committed) if self.drafter.is_user_object else committed)

    def _forward(
        self, drafts: Tensor, num_drafted: list[int], parents: list[list[int]] | None = None
    ) -> ForwardOutput:
        """Run the target on each row's newest token and the first num_drafted[r] of its drafts [B, l]."""
        newest = to_device([[row.tokens[-1]] for row in self._rows], self.target.device)
        tokens, lengths = torch.cat((newest, drafts), dim=1), self.target.lengths[: len(self._rows)]
        real = [count + 1 for count in num_drafted]
        raw = self.drafter is not None and self.drafter.raw_states
        batch = ForwardBatch(tokens, lengths, real, return_states=self.return_states, raw_states=raw)
        if parents is not None and any(parents):
            batch.tree = verified_tree(parents)
        return self.target.forward(batch)

    def _keys(self) -> RowKeys:
        ids, positions = [row.id for row in self._rows], [len(row.tokens) for row in self._rows]
        return RowKeys(self.params.seed, ids, positions, self.target.device)

    def _drop_finished(self) -> None:
        for r in reversed(range(len(self._rows))):
            if self._rows[r].finish_reason:
                last = len(self._rows) - 1
                self.target.move_row(last, r)
                if self._text is not None and last != r:
                    self._text.move_row(last, r)
                if self.drafter is not None and last != r:
                    self.drafter.move_row(last, r)
                self._rows[r] = self._rows[last]
                self._rows.pop()


def _tokens(proposal: Proposal) -> list[list[int]]:
    return [row[:n] for row, n in zip(proposal.tokens.tolist(), proposal.num_drafted, strict=True)]
