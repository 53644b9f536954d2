"""Drafts with the target itself, which sees only the ends of its own cache.

Contract: a drafter (drafting/base.py) without weights or a cache of its own. A draft's forward sees a row's first
SINKS tokens and its last `window`, in whole blocks (kernels/plan.py); between them lies the gap, which it does not
read. What it writes lies behind the row's valid length, and the verification writes those columns anew, so no
length changes. A row without a gap gets no drafts: they would cost what plain steps cost, and say the same.
Sources: sinks and window, Xiao et al. 2309.17453; as a draft of the same model, MagicDec (Chen et al. 2408.11049).
"""

from __future__ import annotations

from itertools import count

import torch

from kernels.plan import SINKS, window_start

from ..engine.runner import ModelRunner
from ..machine.transfer import to_device
from ..models.forward import ForwardBatch, ForwardOutput
from ..sampling.noise import NoiseKeys
from ..sampling.params import SamplingParams
from ..sequence import Sequence, WindowWork
from ..verification.table import Verification
from .base import Drafter, Proposal
from .model import draw_draft

# Tokens of the window. Not tuned: a wider one is accepted more often and reads more (python -m bench window).
WINDOW = 256


class WindowDrafter(Drafter):
    """One windowed forward of the target's runner a drafted token, for the whole batch at once.

    window: tokens of the window; a line of DRAFTERS can ask for others than WINDOW: `parts.window(512)`.
    """

    source = "window"

    def __init__(
        self, target: ModelRunner, params: SamplingParams, verification: Verification, window: int
    ) -> None:
        self.target, self.params, self.window = target, params, window
        self.role = verification.draft_role

    def prepare(self, rows: int) -> None:
        """Before the first step: let the target make ready for windowed steps of one token a row."""
        tokens = torch.zeros(rows, 1, dtype=torch.long, device=self.target.device)
        self.target.prepare(ForwardBatch(tokens, [0] * rows, window=self.window))

    def usable(self, rows: list[Sequence], max_drafts: list[int]) -> list[int]:
        """How many tokens each row can draft: none without a gap, and no more than every row has columns for."""
        cached = [len(row.tokens) - 1 for row in rows]
        room = self.target.cache.room(cached)
        hides = [window_start(length, self.window) > SINKS for length in cached]
        return [min(most, room) if gap else 0 for most, gap in zip(max_drafts, hides, strict=True)]

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        max_drafts = self.usable(rows, max_drafts)
        device, most = self.target.device, max(max_drafts)
        if most == 0:
            return Proposal(torch.zeros(len(rows), 0, dtype=torch.long, device=device), max_drafts)
        cached = [len(row.tokens) - 1 for row in rows]
        token = to_device([row.tokens[-1] for row in rows], device)
        drawn, probs, work = [], [], WindowWork()
        for step in range(most):
            # Rows that draft fewer are fed padding behind their drafts.
            fed = ForwardBatch(token[:, None], [length + step for length in cached], window=self.window)
            logits = self.forward(fed, work).logits[:, 0]
            token, q = draw_draft(logits, self.params, keys, step, self.role)
            drawn.append(token)
            if q is not None:
                probs.append(q)
        self.calls += most
        self.drafted += sum(max_drafts)
        stacked = torch.stack(probs, dim=1) if probs else None
        return Proposal(torch.stack(drawn, dim=1), max_drafts, stacked, windowed=work)

    def forward(self, fed: ForwardBatch, work: WindowWork) -> ForwardOutput:
        """A windowed forward of the target, whose cost, padding included, is added to `work`."""
        width = fed.tokens.shape[1]
        sees = [min(n, SINKS) + max(0, n - window_start(n, self.window)) for n in fed.lengths]
        work.add(len(sees) * width, sum(sees), width)
        return self.target.forward(fed)


def gapped(window: int) -> int:
    """The fewest cached tokens with which a windowed forward hides any."""
    return next(n for n in count(SINKS + window) if window_start(n, window) > SINKS)
