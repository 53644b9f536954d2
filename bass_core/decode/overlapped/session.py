"""The draft's side of one request, and the rows that it shares with the target's.

Contract: the target extends the rows' texts by `agree` whenever it likes, and reads their drafts; `step` calls the
drafter once for all rows that may go on (or feeds one chunk of the prompts) and adds what was drafted after the
texts: of each row one token of the model, or a copied run. A draft follows a row's text only while all
tokens before it are those it was drafted after; one that comes too late for that is dropped. What the drafter
knows of a row is rolled back only from where the text went on differently. Each token is drawn with the noise of
(seed, sequence id, position, where the epoch began).

Whoever reads or changes a row holds `lock`. On an accelerator both sides hand over only what their streams have
computed: the host has waited for it. Tensors of the target's are kept until the draft's stream has read them.
"""

from __future__ import annotations

import copy
import logging
import threading
import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from kernels.support import is_accelerator, runtime

from ...draft.base import Proposal
from ...draft.pending import CHUNK
from ...draft.registry import DrafterKind, DraftSource, Parts, confident_prefix
from ...machine.transfer import to_device
from ...model.base import CausalModel
from ...model.draft_head import DraftHead
from ...model.pair import ModelPair
from ...model.prefill import PrefillSteps
from ...model.prefix import CachedTexts
from ...model.select import select_model
from ...model.weights.modified import Watch
from ...sample.noise import NoiseKeys
from ...sequence import Sequence
from ..base import DecodingParams


class Draft(NamedTuple):
    """A drafted token. top, own: q's largest value, and its value at the token; 1 if the drafter is never unsure.

    copied: it was copied from the text, so that its q is a point mass. q: float32 [V] on the target's device, None
    for a copied token and where no rule asks for it.
    """

    token: int
    top: float = 1.0
    own: float = 1.0
    copied: bool = False
    q: Tensor | None = None


@dataclass
class Row(Sequence):
    """A row as both sides see it: the agreed `text`, and the drafts after it.

    begin: the position where the epoch began, at first 0: before the first verdict nothing is judged. states: of a
    target with a draft head, those [k, hidden] of the text's tokens, but for the newest, that the drafter was not
    given yet. silent: the drafter had nothing to propose, so it is not asked again before the text goes on.
    `tokens` is the draft's own: what the drafter has read. known: as many of them are of the text.
    """

    text: list[int] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)
    begin: int = 0
    states: list[Tensor] = field(default_factory=list)
    silent: bool = False
    known: int = 0

    def whole(self) -> list[int]:
        """The text with the drafts after it, from `known` on."""
        return self.text[self.known :] + [draft.token for draft in self.drafts]

    def agree(self, tokens: list[int], same: bool, states: Tensor | None = None) -> None:
        """The target has written these tokens; a new epoch begins unless they are the drafts (`same`)."""
        count = len(tokens)
        kept = [draft.token for draft in self.drafts[:count]] == tokens
        self.drafts = self.drafts[count:] if kept else []
        self.text += tokens
        self.silent = False
        self.states += [] if states is None else [states]
        if not same:
            self.begin = len(self.text)


def shared_rows(sequences: list[Sequence]) -> list[Row]:
    """The rows of a request, of which nothing is written or drafted yet."""
    rows = []
    for one in sequences:
        row = Row(one.index, one.id, one.prompt, one.max_new_tokens, frozenset(), known=len(one.prompt))
        row.text += one.prompt
        rows.append(row)
    return rows


class DraftSession:
    """The rows, drafted for by the draft of `source`.

    lead: tokens to draft beyond the text; kind: the drafter, which runs the draft; home: the target's device.
    limit: the most tokens that the draft can hold. totals: tokens drafted so far; the draft model's forwards, and
    the tokens that it drew; roll-backs.
    """

    def __init__(
        self,
        source: DraftSource,
        rows: list[Row],
        params: DecodingParams,
        lead: int,
        kind: DrafterKind,
        backend: str,
        home: torch.device,
        lock: threading.Condition,
    ) -> None:
        step = source.draft_step
        assert step is not None
        self.device, self.home, self.limit = source.device, home, step.context
        self.rows, self.lead, self.seed, self.lock = list(rows), lead, params.seed, lock
        # A copied run is proposed whole; the model drafts one token a step, so the text is looked at in between.
        self._most, self._confidence = lead if kind.copies else 1, kind.stops_when_unsure
        self._keeps_q = asks_q(params)
        self.totals, self._made, self._rolled_back = (0, 0, 0, 0), 0, 0
        # Room for drafts that are not kept, and for a chunk of padding after the longest row.
        ends = [len(row.prompt) + row.max_new_tokens + 2 * lead + CHUNK for row in rows]
        texts = CachedTexts([row.prompt for row in rows], ends)
        parts = Parts(source, len(rows), texts, backend, params.sampling, params.verification, ahead=True)
        self.runner, self.drafter = parts.runner, kind.make(parts)
        self._prefill: PrefillSteps | None = self.drafter.start(list(rows))
        # The target's states that the draft's stream may still be reading.
        self._lent: list[Tensor] = []

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return self._prefill is not None or any(self._max_drafts(row) for row in self.rows)

    def _max_drafts(self, row: Row) -> int:
        # The target would not look at a draft after an unsure one.
        unsure = self._confidence and sure_drafts(row.drafts) < len(row.drafts)
        if row.silent or row.finish_reason or unsure:
            return 0
        end = min(len(row.prompt) + row.max_new_tokens, self.limit)
        return max(0, min(end - len(row.text) - len(row.drafts), self.lead - len(row.drafts), self._most))

    @torch.inference_mode()
    def step(self) -> bool:
        """One chunk of the prompts, or one proposal for every row that may go on. Whether only models drafted."""
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
                # Asked for what the text is still: one that has gone on meanwhile may be drafted for again.
                row.silent = row.silent or (most > 0 and not new and row.known == len(row.text))
                self._add(row, new)
            self._made += sum(proposal.num_drafted)
            self.totals = self._made, self.drafter.calls, self.drafter.drafted, self._rolled_back
        if any(drafts):
            # All drafts but the last were accepted, as it were, and the last is the target's own token.
            self.drafter.on_verified(rows, proposal, [max(0, len(new) - 1) for new in drafts])
        return any(drafts) and not any(draft.copied for new in drafts for draft in new)

    def _follow(self) -> None:
        """Tell the drafter how the texts went on."""
        for place in reversed(range(len(self.rows))):
            if self.rows[place].finish_reason:
                last = self.rows.pop()
                if place < len(self.rows):
                    self.drafter.move_row(len(self.rows), place)
                    self.rows[place] = last
        for place, row in enumerate(self.rows):
            read, now = row.tokens[row.known :], row.whole()
            same = 0
            while same < min(len(read), len(now)) and read[same] == now[same]:
                same += 1
            if same < len(read):
                self._rolled_back += 1
                del row.tokens[row.known + same :]
                self.drafter.rewind(place, row.known + same)
            row.tokens += now[same:]
            row.known = len(row.text)
        new = [row.states for row in self.rows]
        if any(new):
            none = next(states[0][:0] for states in new if states)
            given = [torch.cat(states or [none]).to(self.device, non_blocking=True) for states in new]
            self.drafter.observe_states(list[Sequence](self.rows), given)
            for row in self.rows:
                self._lent += row.states
                row.states = []

    def _read(self, proposal: Proposal) -> list[list[Draft]]:
        """The drafts of each row, read on the host."""
        counts = proposal.num_drafted
        if not any(counts):
            return [[] for _ in counts]
        copied = proposal.copied or [False] * len(counts)
        drawn = [r for r, count in enumerate(counts) if count and not copied[r]]
        q: dict[int, Tensor] = {}
        if drawn and self._keeps_q and proposal.probs is not None:
            of_rows = proposal.probs[to_device(drawn, proposal.probs.device), 0]
            q = dict(zip(drawn, of_rows.to(self.home, non_blocking=True).unbind(), strict=True))
        # Reading the tokens waits for the draft's stream: for q as well, and for what read the target's states. On
        # another device the copies of q have a stream of their own there.
        tokens: list[list[int]] = proposal.tokens.tolist()
        if q and self.home != self.device:
            runtime(self.home).current_stream(self.home).synchronize()
        sure: dict[int, tuple[float, float]] = {}
        if drawn and proposal.max_probs is not None and proposal.token_probs is not None:
            tops = torch.stack((proposal.max_probs[:, 0], proposal.token_probs[:, 0]), dim=-1).tolist()
            sure = {r: (tops[r][0], tops[r][1]) for r in drawn}
        if drawn:
            self._lent.clear()
        return [
            [Draft(token, top, own, copied[r], q.get(r)) for token in tokens[r][:count]]
            for r, count in enumerate(counts)
            for top, own in [sure.get(r, (1.0, 1.0))]
        ]

    def _add(self, row: Row, new: list[Draft]) -> None:
        """Let the new drafts follow the row's text, unless it has gone on differently."""
        read = row.tokens[row.known :] + [draft.token for draft in new]
        row.tokens += read[len(read) - len(new) :]
        now = row.whole()
        if read[: len(now)] == now:
            row.drafts += new[len(new) - (len(read) - len(now)) :]


def asks_q(params: DecodingParams) -> bool:
    """Whether the rule that judges drafts asks what they were drawn from."""
    coupled = params.verification.coupled
    return not params.sampling.greedy and not coupled and params.synthetic is None


def sure_drafts(drafts: list[Draft]) -> int:
    """How many of the drafts a target looks at whose drafter may be unsure (`confident_prefix`)."""
    return confident_prefix([draft.top for draft in drafts], [draft.own for draft in drafts])


def second_device(device: torch.device) -> torch.device | None:
    """The accelerator after this one, on which a draft can work; None on a CPU, and where there is one only."""
    count = runtime(device).device_count() if is_accelerator(device) else 1
    return None if count < 2 else torch.device(device.type, ((device.index or 0) + 1) % count)


_log = logging.getLogger(__name__)
_moving = threading.Lock()
# Key: the draft's step, which a pair replaces when its models change. The Watch sees weights changed in place.
_moved: weakref.WeakKeyDictionary[CausalModel, tuple[DraftSource, Watch]] = weakref.WeakKeyDictionary()


def draft_source(pair: ModelPair) -> DraftSource:
    """The pair itself, or where there is a second accelerator a copy of its draft there, which is kept."""
    device = second_device(pair.device)
    if device is None:
        return pair
    assert pair.draft is not None and pair.draft_step is not None
    with _moving:
        copied = _moved.get(pair.draft_step)
        if copied is None or copied[1].changed():
            try:
                watch = Watch(pair.draft, True)  # before the copy, so that it sees a change meanwhile
                copied = _copied(pair, device), watch
            except Exception:
                _log.exception("the draft could not be copied to %s and stays on the target's device", device)
                return pair
            _moved[pair.draft_step] = copied
        return copied[0]


def _copied(pair: ModelPair, device: torch.device) -> DraftSource:
    """The pair's draft on another device."""
    assert pair.draft is not None and pair.draft_step is not None
    # A copy in which each tensor is the other device's, as if it had been copied already.
    moved: dict[int, Any] = {id(one): one.detach().to(device) for one in pair.draft.buffers()}
    moved |= {id(one): nn.Parameter(one.detach().to(device), False) for one in pair.draft.parameters()}
    draft = copy.deepcopy(pair.draft, moved)
    if isinstance(draft, DraftHead):
        draft.pack()
    step = select_model(draft, pair.draft_step)
    made = SimpleNamespace(draft=draft, draft_step=step, device=device, vocab=pair.vocab)
    return cast(DraftSource, made)


# The weight of a new measurement in a running mean.
NEWS = 0.2


class Pace:
    """`plain_ms`: milliseconds of a target step without drafts; None until a step was measured."""

    def __init__(self) -> None:
        self.plain_ms: float | None = None
        self._accepted, self._tested = 1, 2

    def measure(self, spent: float, plain: bool) -> None:
        """A step of the target took `spent` ms; `plain` if it verified nothing."""
        if self.plain_ms is None or spent < self.plain_ms:
            self.plain_ms = spent
        elif plain:
            self.plain_ms += NEWS * (spent - self.plain_ms)

    def count(self, accepted: int, drafted: int) -> None:
        """Of a row's `drafted` drafts that were looked at, `accepted` were accepted."""
        self._accepted += accepted
        self._tested += min(accepted + 1, drafted)

    def worth_waiting(self, step_ms: float, counts: list[int], growing: list[bool], waited: float) -> bool:
        """Whether one more draft for the growing rows, a draft's step from now, raises the expected tokens per ms.

        With a token acceptance of a, n drafts give 1 + a + ... + a^n tokens for a target step of t ms (Leviathan
        et al., 2211.17192). One more gives a^(n+1) for d ms: worth it while
        a^(n+1) (t + waited) > d (1 + ... + a^n).
        """
        if self.plain_ms is None:
            return False
        a = self._accepted / self._tested
        gain = sum(a ** (n + 1) for n, grows in zip(counts, growing, strict=True) if grows)
        return gain * (self.plain_ms + waited) > step_ms * sum((1 - a ** (n + 1)) / (1 - a) for n in counts)
