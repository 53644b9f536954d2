"""The draft's side of one request, and the rows that it shares with the target's side.

The target extends the texts with `agree` at any time, and reads the drafts. A draft is added only if the tokens
before it are still the same as when it was drafted. Each token is drawn with the noise of (seed, sequence id,
position, where the epoch began).

Whoever reads or changes a row holds `lock`. On an accelerator, each side waits for its stream before it hands over
a tensor. The target's tensors are kept until the draft's stream has read them.
"""

from __future__ import annotations

import copy
import logging
import threading
import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from kernels.support import is_accelerator, runtime

from ...draft.base import Proposal
from ...draft.pending import CHUNK
from ...draft.registry import DrafterInputs, DrafterKind, DraftSource, confident_prefix
from ...machine.transfer import to_device
from ...model.base import CausalModel
from ...model.draft_head import DraftHead
from ...model.pair import ModelPair
from ...model.prefill import PrefillSteps
from ...model.prefix import CachedTexts
from ...model.select import select_model
from ...model.weights.modified import Watch
from ...sample.distribution import dense
from ...sample.noise import NoiseKeys
from ...sequence import Sequence
from ..base import DecodingParams


class QueuedDraft(NamedTuple):
    """A draft token.

    Attributes:
        top: the largest value of q; 1 if the drafter is never unsure.
        own: q at `token`; 1 if the drafter is never unsure.
        copied: whether it was copied from the text, so that its q is a point mass.
        q: float32 [V] on the target's device; None for a copied token, and if no rule needs it.
    """

    token: int
    top: float = 1.0
    own: float = 1.0
    copied: bool = False
    q: Tensor | None = None


@dataclass
class SharedRow(Sequence):
    """A row as both sides see it. `tokens` is the text that the drafter has read, drafts included.

    Attributes:
        text: the tokens that both sides agree on.
        drafts: the drafts after the text.
        begin: position where the epoch began; 0 before the first verification.
        states: for a draft head: the target's states [k, hidden] of text tokens that the drafter has not got yet.
            The newest token has none.
        silent: the drafter had nothing to propose; don't ask it again until the text grows.
        known: how many of `tokens` belong to the text.
    """

    text: list[int] = field(default_factory=list)
    drafts: list[QueuedDraft] = field(default_factory=list)
    begin: int = 0
    states: list[Tensor] = field(default_factory=list)
    silent: bool = False
    known: int = 0

    def whole(self) -> list[int]:
        """Return the tokens of the text from index `known` on, followed by the drafts."""
        return self.text[self.known :] + [draft.token for draft in self.drafts]

    def agree(self, tokens: list[int], same: bool, states: Tensor | None = None) -> None:
        """Append the tokens that the target has written. Unless `same`, begin a new epoch."""
        count = len(tokens)
        as_drafted = [draft.token for draft in self.drafts[:count]] == tokens
        self.drafts = self.drafts[count:] if as_drafted else []
        self.text += tokens
        self.silent = False
        self.states += [] if states is None else [states]
        if not same:
            self.begin = len(self.text)


def shared_rows(sequences: list[Sequence]) -> list[SharedRow]:
    """Return the rows of a request, with nothing written or drafted yet."""
    rows = []
    for sequence in sequences:
        row = SharedRow(
            sequence.index,
            sequence.id,
            sequence.prompt,
            sequence.max_new_tokens,
            frozenset(),
            known=len(sequence.prompt),
        )
        row.text += sequence.prompt
        rows.append(row)
    return rows


class DraftSession:
    """Drafts for the rows, with the draft model or head of `source`.

    Attributes:
        lead: tokens to draft beyond the text.
        limit: maximum number of tokens that the draft can hold.
        home: the target's device.
        totals: tokens drafted so far, forwards of the draft model, tokens that it drew, and roll-backs.
    """

    def __init__(
        self,
        source: DraftSource,
        rows: list[SharedRow],
        params: DecodingParams,
        lead: int,
        kind: DrafterKind,
        backend: str,
        home: torch.device,
        lock: AbstractContextManager[Any],
    ) -> None:
        step = source.draft_step
        assert step is not None
        self.device, self.home, self.limit = source.device, home, step.context
        self.rows, self.lead, self.seed, self.lock = list(rows), lead, params.seed, lock
        # Copied tokens are proposed all at once. A model drafts only one token per step, because the target may
        # have extended the text differently before the next step.
        self._max_per_step, self._confidence = lead if kind.copies else 1, kind.stops_when_unsure
        self._keeps_q = asks_q(params)
        self.totals, self._drafted, self._rolled_back = (0, 0, 0, 0), 0, 0
        # Leave room for rejected drafts, and for a chunk of padding after the longest row.
        ends = [len(row.prompt) + row.max_new_tokens + 2 * lead + CHUNK for row in rows]
        texts = CachedTexts([row.prompt for row in rows], ends)
        parts = DrafterInputs(source, len(rows), texts, backend, params.sampling, params.verification, ahead=True)
        self.runner, self.drafter = parts.runner, kind.make(parts)
        self._prefill: PrefillSteps | None = self.drafter.start(list(rows))
        # The target's states that the draft's stream may still be reading.
        self._states_in_use: list[Tensor] = []

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return self._prefill is not None or any(self._max_drafts(row) for row in self.rows)

    def _max_drafts(self, row: SharedRow) -> int:
        # The target does not look at drafts after an unsure one.
        unsure = self._confidence and sure_drafts(row.drafts) < len(row.drafts)
        if row.silent or row.finish_reason or unsure:
            return 0
        end = min(len(row.prompt) + row.max_new_tokens, self.limit)
        return max(0, min(end - len(row.text) - len(row.drafts), self.lead - len(row.drafts), self._max_per_step))

    @torch.inference_mode()
    def step(self) -> bool:
        """Run a chunk of the prompts or one proposal per row that may continue; True if only the model drafted."""
        if self._prefill is not None:
            self._prefill.step()
            self._prefill = None if self._prefill.done else self._prefill
            return False
        with self.lock:
            self._follow()
            rows, max_drafts = list[Sequence](self.rows), [self._max_drafts(row) for row in self.rows]
            keys = [[row.id, len(row.tokens), row.begin] for row in self.rows]
        if not any(max_drafts):
            return False
        noise = NoiseKeys(self.seed, *to_device(keys, self.device).unbind(1))
        proposal = self.drafter.propose(rows, max_drafts, noise)
        drafts = self._read(proposal)
        with self.lock:
            for row, most, new in zip(self.rows, max_drafts, drafts, strict=True):
                # Mark the row silent only if its text has not changed since we asked.
                row.silent = row.silent or (most > 0 and not new and row.known == len(row.text))
                self._add(row, new)
            self._drafted += sum(proposal.num_drafted)
            self.totals = self._drafted, self.drafter.calls, self.drafter.drafted, self._rolled_back
        if any(drafts):
            # Tell the drafter that all drafts but the last were accepted. The last draft stands for the token that
            # the target would add.
            self.drafter.on_verified(rows, proposal, [max(0, len(new) - 1) for new in drafts])
        return any(drafts) and not any(draft.copied for new in drafts for draft in new)

    def _follow(self) -> None:
        """Bring the drafter up to date with the texts."""
        for place in reversed(range(len(self.rows))):
            if self.rows[place].finish_reason:
                last = self.rows.pop()
                if place < len(self.rows):
                    self.drafter.move_row(len(self.rows), place)
                    self.rows[place] = last
        for place, row in enumerate(self.rows):
            read, now = row.tokens[row.known :], row.whole()
            num_same = 0
            while num_same < min(len(read), len(now)) and read[num_same] == now[num_same]:
                num_same += 1
            if num_same < len(read):
                self._rolled_back += 1
                del row.tokens[row.known + num_same :]
                self.drafter.rewind(place, row.known + num_same)
            row.tokens += now[num_same:]
            row.known = len(row.text)
        new = [row.states for row in self.rows]
        if any(new):
            empty = next(states[0][:0] for states in new if states)
            new_states = [torch.cat(states or [empty]).to(self.device, non_blocking=True) for states in new]
            self.drafter.observe_states(list[Sequence](self.rows), new_states)
            for row in self.rows:
                self._states_in_use += row.states
                row.states = []

    def _read(self, proposal: Proposal) -> list[list[QueuedDraft]]:
        """Return the drafts of each row, read on the host."""
        counts = proposal.num_drafted
        if not any(counts):
            return [[] for _ in counts]
        copied = proposal.copied or [False] * len(counts)
        drawn = [r for r, count in enumerate(counts) if count and not copied[r]]
        q: dict[int, Tensor] = {}
        probs = dense(proposal.probs)
        if drawn and self._keeps_q and probs is not None:
            first_probs = probs[to_device(drawn, probs.device), 0]
            q = dict(zip(drawn, first_probs.to(self.home, non_blocking=True).unbind(), strict=True))
        # `tolist` waits for the draft's stream. After it, q is computed and the target's states have been read.
        # If the target is on another device, the copies of q are on a separate stream there.
        tokens: list[list[int]] = proposal.tokens.tolist()
        if q and self.home != self.device:
            runtime(self.home).current_stream(self.home).synchronize()
        confidences: dict[int, tuple[float, float]] = {}
        if drawn and proposal.max_probs is not None and proposal.token_probs is not None:
            tops = torch.stack((proposal.max_probs[:, 0], proposal.token_probs[:, 0]), dim=-1).tolist()
            confidences = {r: (tops[r][0], tops[r][1]) for r in drawn}
        if drawn:
            self._states_in_use.clear()
        return [
            [QueuedDraft(token, top, of_token, copied[r], q.get(r)) for token in tokens[r][:count]]
            for r, count in enumerate(counts)
            for top, of_token in [confidences.get(r, (1.0, 1.0))]
        ]

    def _add(self, row: SharedRow, new: list[QueuedDraft]) -> None:
        """Add the new drafts after the row's text, unless the text has changed meanwhile."""
        read = row.tokens[row.known :] + [draft.token for draft in new]
        row.tokens += read[len(read) - len(new) :]
        now = row.whole()
        if read[: len(now)] == now:
            row.drafts += new[len(new) - (len(read) - len(now)) :]


def asks_q(params: DecodingParams) -> bool:
    """Return whether the rule that judges drafts needs their q."""
    coupled = params.verification.coupled
    return not params.sampling.greedy and not coupled and params.synthetic is None


def sure_drafts(drafts: list[QueuedDraft]) -> int:
    """Return how many of these drafts the target should verify (`confident_prefix`)."""
    return confident_prefix([draft.top for draft in drafts], [draft.own for draft in drafts])


def second_device(device: torch.device) -> torch.device | None:
    """Return the accelerator after this one, for a draft; None on a CPU, or if there is only one."""
    count = runtime(device).device_count() if is_accelerator(device) else 1
    return None if count < 2 else torch.device(device.type, ((device.index or 0) + 1) % count)


_log = logging.getLogger(__name__)
_moving = threading.Lock()
# Copied drafts by the `draft_step` of their pair, which is a new object once the pair gets other models. The Watch
# detects weights that were changed in place.
_moved: weakref.WeakKeyDictionary[CausalModel, tuple[DraftSource, Watch]] = weakref.WeakKeyDictionary()


def draft_source(pair: ModelPair) -> DraftSource:
    """Return a cached copy of the pair's draft on the second accelerator, or the pair if there is only one."""
    device = second_device(pair.device)
    if device is None:
        return pair
    assert pair.draft is not None and pair.draft_step is not None
    with _moving:
        copied = _moved.get(pair.draft_step)
        if copied is None or copied[1].changed():
            try:
                watch = Watch(pair.draft, True)  # before the copy, to detect changes during it
                copied = _copy_draft(pair, device), watch
            except Exception:
                _log.exception("the draft could not be copied to %s and stays on the target's device", device)
                return pair
            _moved[pair.draft_step] = copied
        return copied[0]


def _copy_draft(pair: ModelPair, device: torch.device) -> DraftSource:
    """Return the pair's draft, copied to another device."""
    assert pair.draft is not None and pair.draft_step is not None
    # `moved` is the memo of deepcopy: it uses these tensors instead of making its own copies.
    moved: dict[int, Any] = {id(tensor): tensor.detach().to(device) for tensor in pair.draft.buffers()}
    moved |= {id(tensor): nn.Parameter(tensor.detach().to(device), False) for tensor in pair.draft.parameters()}
    draft = copy.deepcopy(pair.draft, moved)
    if isinstance(draft, DraftHead):
        draft.pack()
    step = select_model(draft, pair.draft_step)
    source = SimpleNamespace(draft=draft, draft_step=step, device=device, vocab=pair.vocab)
    return cast(DraftSource, source)


# Weight of a new measurement in a running mean.
NEW_SAMPLE_WEIGHT = 0.2


class StepTimes:
    """The target's speed and the acceptance so far, which decide whether waiting for another draft pays.

    Attributes:
        plain_ms: milliseconds of a target step without drafts; None until a step was measured.
    """

    def __init__(self) -> None:
        self.plain_ms: float | None = None
        self._accepted, self._tested = 1, 2

    def measure(self, spent: float, plain: bool) -> None:
        """Record that a step of the target took `spent` ms; `plain` if it verified nothing."""
        if self.plain_ms is None or spent < self.plain_ms:
            self.plain_ms = spent
        elif plain:
            self.plain_ms += NEW_SAMPLE_WEIGHT * (spent - self.plain_ms)

    def count(self, accepted: int, drafted: int) -> None:
        """Record that `accepted` of a row's `drafted` drafts were accepted."""
        self._accepted += accepted
        self._tested += min(accepted + 1, drafted)

    def worth_waiting(self, step_ms: float, counts: list[int], growing: list[bool], waited: float) -> bool:
        """Return whether one more draft in each growing row raises the expected tokens per ms.

        With a token acceptance of a, n drafts give 1 + a + ... + a^n tokens for a target step of t ms (Leviathan
        et al., 2211.17192). One more draft, of d ms, pays while a^(n+1) (t + waited) > d (1 + ... + a^n).
        """
        if self.plain_ms is None:
            return False
        a = self._accepted / self._tested
        gain = sum(a ** (n + 1) for n, grows in zip(counts, growing, strict=True) if grows)
        return gain * (self.plain_ms + waited) > step_ms * sum((1 - a ** (n + 1)) / (1 - a) for n in counts)
