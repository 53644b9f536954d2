"""Drafts from the target itself, which reads only the two ends of its own cache.

`WindowDrafter` needs neither weights nor a cache of its own. Its forwards read a row's first SINKS tokens and its
last `window` tokens, in whole blocks (kernels/plan.py), but not the gap between them. The forwards write to the
columns after the row's text, which the verification overwrites, so the cached length stays the same. A row that is
too short for a gap gets no drafts, because each would cost as much as a plain step. `WindowChain` adds a second
drafter, which drafts for the windowed target.
Sources: sinks and window, Xiao et al. 2309.17453; as a draft of the same model, MagicDec (Chen et al. 2408.11049).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from kernels.plan import SINKS, window_start

from ..machine.transfer import to_device
from ..model.forward import ForwardBatch, ForwardOutput
from ..model.prefill import PrefillSteps
from ..model.runner import ModelRunner
from ..sample.distribution import probabilities
from ..sample.noise import NoiseKeys
from ..sample.params import SamplingParams
from ..sample.rows import cat, pad
from ..sequence import Sequence, WindowWork
from ..verify.acceptance import refuse_unsound
from ..verify.rejection import verify
from ..verify.rules import Verification
from .base import Drafter, Proposal, no_drafts, point_masses
from .chain import ChainSampler, Levels

# Maximum number of tokens that `front` in a WindowChain proposes before the windowed target verifies them.
FRONT_LENGTH = 4
# Default number of tokens in the window. It is not tuned: drafts from a wider window are accepted more often, but
# their forwards read more (docs/history.md).
WINDOW = 256


class WindowDrafter(Drafter):
    """Drafts with windowed forwards of the target: one forward of the whole batch per token.

    Args:
        window: tokens of the window. A line of DRAFTERS can choose it, for example `parts.window(512)`.
    """

    source = "window"

    def __init__(
        self, target: ModelRunner, params: SamplingParams, verification: Verification, window: int
    ) -> None:
        self.target, self.params, self.verification, self.window = target, params, verification, window
        self.chains = ChainSampler(params, verification.draft_role, target.vocab)

    def prepare(self, rows: int) -> None:
        """Let the target prepare windowed steps of one token per row."""
        tokens = torch.zeros(rows, 1, dtype=torch.long, device=self.target.device)
        self.target.prepare(ForwardBatch(tokens, [0] * rows, window=self.window))

    def usable(self, rows: list[Sequence], max_drafts: list[int]) -> list[int]:
        """Return max_drafts, with 0 for rows without a gap. Drafts that can be verified also fit in the cache."""
        has_gap = [window_start(len(row.tokens) - 1, self.window) > SINKS for row in rows]
        return [most if gap else 0 for most, gap in zip(max_drafts, has_gap, strict=True)]

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        max_drafts = self.usable(rows, max_drafts)
        device, most = self.target.device, max(max_drafts)
        if most == 0:
            return no_drafts(max_drafts, device)
        work = WindowWork()
        proposal = self.chains.propose(self._levels(rows, work), max_drafts, keys)
        proposal.windowed = work
        self.calls += most
        self.drafted += sum(max_drafts)
        return proposal

    def _levels(self, rows: list[Sequence], work: WindowWork) -> Levels:
        lengths = [len(row.tokens) - 1 for row in rows]
        fed = to_device([[row.tokens[-1]] for row in rows], self.target.device)
        while True:
            # Rows that already have all their drafts feed padding.
            level = yield self.forward(ForwardBatch(fed, lengths, window=self.window), work).logits
            fed, lengths = level.tokens, [length + 1 for length in lengths]

    def forward(self, fed: ForwardBatch, work: WindowWork) -> ForwardOutput:
        """Run a windowed forward of the target and add its cost, including padding, to `work`."""
        width = fed.tokens.shape[1]
        seen = [min(n, SINKS) + max(0, n - window_start(n, self.window)) for n in fed.lengths]
        work.add(len(seen) * width, sum(seen), width)
        return self.target.forward(fed)


def gapped(window: int) -> int:
    """Return the smallest number of cached tokens of which a windowed forward skips some."""
    return next(n for n in itertools.count(SINKS + window) if window_start(n, window) > SINKS)


class WindowChain(Drafter):
    """Drafts with the windowed target, which itself decodes speculatively, with drafts of `front`.

    Each proposal is a short text that the windowed target writes, in rounds of up to FRONT_LENGTH drafts by
    `front`, verified by the usual rule. So a sampled draft has the windowed target's distribution, and the full
    target's verification uses that distribution as q. These inner rounds draw with the noise of NoiseKeys.inner.
    Greedy and coupled drafts are the windowed target's own choices. `front` drafts chains, and forgets the short
    text after each proposal. `calls` and `drafted` count only the work of `front`.
    Source: TriForce, Sun et al. 2404.11912, section 4.
    """

    source = "window"

    def __init__(self, front: Drafter, window: WindowDrafter) -> None:
        self.front, self.window = front, window
        self.observes_states, self.reads_early = front.observes_states, front.reads_early
        self._inner_noise = not (window.params.greedy or window.verification.coupled)

    def start(self, rows: list[Sequence]) -> PrefillSteps | None:
        return self.front.start(rows)

    def prepare(self, rows: int) -> None:
        """Let both drafters prepare the first rounds."""
        self.front.prepare(rows)
        self.window.prepare(rows)

    def read(self, rows: list[Sequence]) -> None:
        """Let `front` read the prompts."""
        self.front.read(rows)

    def observe_states(self, rows: list[Sequence], states: Seq[Tensor]) -> None:
        """Pass the target's states to `front`."""
        self.front.observe_states(rows, states)

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        max_drafts = self.window.usable(rows, max_drafts)
        ends = [len(row.tokens) for row in rows]
        probs: list[list[Tensor]] = [[] for _ in rows]
        work = WindowWork()
        try:
            for _ in range(max(max_drafts)):
                left = [
                    end + most - len(row.tokens) for end, most, row in zip(ends, max_drafts, rows, strict=True)
                ]
                if max(left) == 0:
                    break
                positions = to_device([len(row.tokens) for row in rows], keys.positions.device)
                keys_at_ends = NoiseKeys(keys.seed, keys.sequence_ids, positions)
                inner = keys.inner(positions) if self._inner_noise else keys_at_ends
                for row_probs, new in zip(probs, self._round(rows, ends, left, inner, work), strict=True):
                    row_probs.extend(new)
            drafts = [row.tokens[end:] for row, end in zip(rows, ends, strict=True)]
        finally:
            for r, (row, end) in enumerate(zip(rows, ends, strict=True)):
                del row.tokens[end:]
                self.front.rewind(r, end)
        self.calls, self.drafted = self.front.calls, self.front.drafted
        proposal = point_masses(drafts)
        proposal.windowed = work
        if self._inner_noise and any(drafts):
            vocab = next(q.shape[-1] for row in probs for q in row)
            device = self.window.target.device
            proposal.probs = pad([cat(row) if row else torch.zeros(0, vocab, device=device) for row in probs])
        return proposal

    def _round(
        self, rows: list[Sequence], ends: list[int], left: list[int], keys: NoiseKeys, work: WindowWork
    ) -> list[list[Tensor]]:
        """Append 1 to left[r] tokens to each row; return their distributions [n, V], in lists, if needed."""
        runner = self.window.target
        # A row that already has all its drafts feeds padding at the place of its first draft.
        starts = [(len(row.tokens) if n else end) - 1 for row, n, end in zip(rows, left, ends, strict=True)]
        # Padding fits: a draft ends at least two columns before the text's end, and the cache has
        # longest_draft + 1 columns after that.
        front_lengths = [max(0, min(n - 1, FRONT_LENGTH)) for n in left]
        proposal = point_masses([[] for _ in rows])
        if max(front_lengths):
            proposal = self.front.propose(rows, front_lengths, keys)
        drafts = to_device(proposal.tokens, runner.device)
        newest = to_device([[row.tokens[start]] for row, start in zip(rows, starts, strict=True)], runner.device)
        real = [count + 1 for count in proposal.num_drafted]
        output = self.window.forward(
            ForwardBatch(
                torch.cat((newest, drafts), dim=1),
                starts,
                real,
                return_states=self.observes_states,
                window=self.window.window,
            ),
            work,
        )
        counts = to_device(proposal.num_drafted, runner.device)
        params = self.window.params
        outcome = verify(
            output.logits, drafts, proposal.probs, counts, keys, params, verification=self.window.verification
        )
        outcomes = outcome.host()
        refuse_unsound([result.next_token for result, n in zip(outcomes, left, strict=True) if n])
        written = [result.accepted + 1 if n else 0 for result, n in zip(outcomes, left, strict=True)]
        probs = probabilities(output.logits, params) if self._inner_noise else None
        if max(front_lengths) and self.observes_states:
            states = output.require_states()
            self.front.observe_states(rows, [states[r, :count] for r, count in enumerate(written)])
        for row, result, count in zip(rows, outcomes, written, strict=True):
            row.tokens.extend(
                [*(test.token for test in result.tests[: result.accepted]), result.next_token][:count]
            )
        if max(front_lengths):
            self.front.on_verified(rows, proposal, [result.accepted for result in outcomes])
        return [[probs[r, :count]] if probs is not None and count else [] for r, count in enumerate(written)]

    def move_row(self, source: int, target: int) -> None:
        self.front.move_row(source, target)
