"""Drafts with a head that reads the target's hidden states.

Contract: a drafter as in drafting/base.py. Slots of settled tokens are fed with the target's own states as these
arrive (`observe_states`), slots of drafted tokens with the head's; the latter are fed anew once the target has
settled them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.support import is_accelerator

from ..engine.runner import ModelRunner, PrefillSteps
from ..machine.transfer import to_device, to_host
from ..models.draft_head import DraftHead
from ..sampling.distribution import argmax, probabilities
from ..sampling.draw import draw
from ..sampling.noise import NoiseKeys, Role
from ..sampling.params import SamplingParams
from ..sequence import Sequence
from .base import Drafter, Proposal
from .head_states import SettledStates, StandInStates
from .pending import feed_pending

# A forward costs more than one more token in a verification: a row goes on only where its drafts so far have this
# many times the confidence. Each row by itself, though a batch shares the forward: none depends on its neighbours.
HEADROOM = 4.0
# On an accelerator a forward in vain costs less than to wait for it: whether all rows rest is read every so many.
LOOK_EVERY = 3


class HeadDrafter(Drafter):
    """`runner` drives the head's body over its reduced vocabulary and keeps states; `size` is the target's V.

    confidence: a row drafts on while the head gives its drafts so far, times the likeliest next token, at least
    this probability, and the drafts so far HEADROOM times it (so from 1 / HEADROOM on one draft at most). The
    token that is drawn next has no say in it, so that q stays what it is drawn from. 0: never stop; above 0 a
    proposal waits for the device once, and before each LOOK_EVERY-th token.

    ahead: the text runs ahead of the target's states, as in AMUSD. The head's own state of a token stands in until
    the target's is observed; what was fed behind a stand-in is then fed again. A proposal has one draft a row at
    most, and none where a state is missing: after a token that the head was not fed, such as a copied one. A
    confidence above 0 stops nothing then, but the proposals have `max_probs` and `token_probs`.
    """

    observes_states = True

    def __init__(
        self,
        head: DraftHead,
        runner: ModelRunner,
        size: int,
        params: SamplingParams,
        rule: str = "chen",
        confidence: float = 0.0,
        ahead: bool = False,
    ) -> None:
        self.head, self.runner, self.size, self.params = head, runner, size, params
        self.role = Role.TARGET if rule == "coupled" else Role.DRAFT
        self.confidence = 0.0 if ahead else confidence
        self.ahead, self._tells = ahead, ahead and confidence > 0
        self._source: SettledStates | StandInStates = SettledStates(0, head.config.hidden, runner.device)

    def start(self, rows: list[Sequence]) -> PrefillSteps | None:
        hidden, length = self.head.config.hidden, self.runner.cache.max_len
        if self.ahead:
            self._source = StandInStates(len(rows), length, hidden, self.runner.device)
        else:
            self._source = SettledStates(len(rows), hidden, self.runner.device)
        return None

    @torch.inference_mode()
    def prepare(self, rows: int) -> None:
        """Before the first step: let the body make ready for one token a row, and for two."""
        for width in (1, 2):
            ids = torch.zeros(rows, width, dtype=torch.long, device=self.runner.device)
            states = torch.zeros(rows, width, self.head.config.hidden, device=self.runner.device)
            self.runner.prepare(self.head.inputs(ids, states))

    def observe_states(self, rows: list[Sequence], states: list[Tensor]) -> None:
        """Keep the target's states: copies, for the next step of the target writes over them."""
        for r, slot in (self._source.observe(states) or {}).items():
            self.runner.cached[r] = min(self.runner.cached[r], slot)

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        if isinstance(self._source, StandInStates):
            complete = [self._source.complete(r, len(row.tokens)) for r, row in enumerate(rows)]
            max_drafts = [min(most, 1) if able else 0 for most, able in zip(max_drafts, complete, strict=True)]
            if max(max_drafts) == 0:
                return Proposal(torch.zeros(len(rows), 0, dtype=torch.long, device=self.runner.device), max_drafts)
        logits, states = self._catch_up(rows, max_drafts)
        ends = list(self.runner.cached[: len(rows)])
        # Row by row: in which steps it may draft, whether it still does, how much it has, and how likely that is.
        allowed = [[most > step for most in max_drafts] for step in range(1 + max(max_drafts))]
        room = to_device(allowed, logits.device)
        going, drafted = room[0], torch.zeros_like(room[0], dtype=torch.long)
        sure = torch.ones(len(rows), device=logits.device)
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        for step in range(max(max_drafts)):
            if step:
                if self.confidence:
                    going = going & room[step] & (sure >= HEADROOM * self.confidence)
                    if _all_rest(going, step):
                        break
                x = self.head.inputs(tokens[-1][:, None], states[:, None])
                logits = self.runner.feed_ids(x, [end + step - 1 for end in ends])[:, 0]
                states = self._states()[:, 0]
                self.calls += 1
            q = self._distribution(logits)
            if q is not None and self.confidence:
                going = going & (sure * q.amax(-1) >= self.confidence)
                if _all_rest(going, step):
                    break
            column = self._draw(logits, q, keys, step)
            if q is not None and self.confidence:
                sure = sure * q.gather(1, column[:, None])[:, 0]
                drafted += going
            tokens.append(self.head.vocabulary[column])
            if q is not None and not self.params.greedy:
                probs.append(self._over_all(q))
        num_drafted = to_host(drafted).tolist() if self.confidence else list(max_drafts)
        self.drafted += sum(num_drafted)
        width = max(num_drafted)
        if not width:
            return Proposal(torch.zeros(len(rows), 0, dtype=torch.long, device=logits.device), num_drafted)
        full = torch.stack(probs[:width], dim=1) if probs else None
        proposal = Proposal(torch.stack(tokens[:width], dim=1), num_drafted, full)
        if self._tells and q is not None:
            proposal.max_probs, proposal.token_probs = q.amax(-1)[:, None], q.gather(1, column[:, None])
        return proposal

    def _catch_up(self, rows: list[Sequence], max_drafts: list[int]) -> tuple[Tensor, Tensor]:
        """Feed what came since the last proposal; logits [B, V'], states [B, hidden] of the last slots.

        Settled states are fed for all rows, stand-ins for those that draft.
        """
        runner, own = self.runner, self._source
        lengths = [len(row.tokens) for row in rows]
        if isinstance(own, SettledStates):
            starts = runner.cached[: len(rows)]
            counts = [length - start for length, start in zip(lengths, starts, strict=True)]
            before = own.read(counts)
        else:
            # A token whose slot was fed already is fed again for the logits behind it.
            starts = [min(at, length - 1) for at, length in zip(runner.cached, lengths, strict=False)]
            counts = [
                length - start if most else 0
                for length, start, most in zip(lengths, starts, max_drafts, strict=True)
            ]
            before = own.read(starts, max(counts))
        width = max(counts)
        padded = [(row.tokens[start:] + [0] * width)[:width] for row, start in zip(rows, starts, strict=True)]
        x = self.head.inputs(to_device(padded, runner.device), before)
        logits, states, forwards = feed_pending(runner, x, starts, counts)
        assert states is not None, "the runner was made to keep states"
        self.calls += forwards
        fed = [r for r, count in enumerate(counts) if count]
        for r in fed:
            runner.cached[r] = lengths[r]
        if isinstance(own, StandInStates):
            own.keep(fed, [lengths[r] for r in fed], states[to_device(fed, states.device)])
        return logits, states

    def _states(self) -> Tensor:
        assert self.runner.states is not None, "the runner was made to keep states"
        return self.runner.states

    def _distribution(self, logits: Tensor) -> Tensor | None:
        """q [B, V'] over the head's vocabulary, where somebody asks for it."""
        if self.params.greedy:
            return logits.softmax(-1) if self.confidence or self._tells else None
        return probabilities(logits, self.params)

    def _draw(self, logits: Tensor, q: Tensor | None, keys: NoiseKeys, step: int) -> Tensor:
        """A column of the head's vocabulary a row."""
        if self.params.greedy or q is None:
            return argmax(logits)
        ids, positions = self.head.vocabulary, keys.positions + step
        return draw(q, keys.seed, keys.sequence_ids, positions, keys.stream(self.role), ids)

    def _over_all(self, q: Tensor) -> Tensor:
        """q over the target's vocabulary: [B, V]."""
        return torch.zeros(len(q), self.size, device=q.device).index_copy_(1, self.head.vocabulary, q)

    def on_verified(self, rows: list[Sequence], proposal: Proposal, accepted: list[int]) -> None:
        """Nothing: the slots of drafted tokens lie behind what counts, and are fed again with true states."""

    def rewind(self, row: int, length: int) -> None:
        """Without `ahead` nothing is kept of text that the target's states have not settled."""
        if isinstance(self._source, StandInStates):
            self.runner.cached[row] = min(self.runner.cached[row], length)
            self._source.rewind(row, length)

    def move_row(self, source: int, target: int) -> None:
        self.runner.move_row(source, target)
        self._source.move_row(source, target)


def _all_rest(going: Tensor, step: int) -> bool:
    """Whether no row drafts on; an accelerator is asked now and then, and drafts in vain in between."""
    if is_accelerator(going.device) and step % LOOK_EVERY:
        return False
    return not going.any()
