"""AMUSD's texts have the target's distribution.

A schedule replaces the draft's thread, so that all paths can be enumerated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bass_core.decode.amusd.decoder import AmusdDecoder
from bass_core.decode.amusd.draft import DraftThread
from bass_core.decode.amusd.session import DraftSession, QueuedDraft
from bass_core.decode.base import DecodingParams
from bass_core.draft.head.chain import HeadDrafter
from bass_core.draft.lookup import Cascade
from bass_core.draft.registry import head_drafter
from bass_core.length.policies import FixedLength
from bass_core.model.pointer import Pointer
from bass_core.sequence import Sequence
from tests.support.models import slow_but

from .enumerated import Bigram, BigramHead, Scene
from .test_enumeration import P3, Q3, RULES, _lookup, _model, check_distribution

# Returns the number of steps that the draft takes before the target's next look. Its arguments are the number of
# that look, the text and the drafts so far.
Schedule = Callable[[int, list[int], list[int]], int]
SCHEDULES: dict[str, Schedule] = {
    "one per look": lambda look, text, drafts: 1,
    "every other look": lambda look, text, drafts: look % 2,
    "depends on the text": lambda look, text, drafts: 2 * (text[-1] == 1) + (look % 3 == 1),
    "depends on the drafts": lambda look, text, drafts: 1 + (drafts[-1:] == [2]),
}
LEAD = 2


class ScheduledDraft(DraftThread):
    """A draft without a thread: each look first runs the scheduled number of its steps."""

    def __init__(self, sequences: list[Sequence], schedule: Schedule) -> None:
        super().__init__(sequences)
        self._schedule, self._looks = schedule, 0

    def resume(self) -> None:
        pass

    def look(self, timeout_s: float = 0.0) -> dict[int, list[QueuedDraft]]:
        session, look = self.session, self._looks
        assert session is not None
        self._looks += 1
        for row in list(self.rows.values())[:1]:
            for _ in range(self._schedule(look, row.text, [draft.token for draft in row.drafts])):
                if session.busy:
                    session.step()
        return super().look()


@dataclass(frozen=True)
class Overlapped(Scene):
    """A scene of AMUSD.

    Attributes:
        schedule: The number of steps that the draft takes before each look.
        unsure: Whether the drafter reports its confidence, so that drafts after an unsure one are dropped.
    """

    schedule: Schedule = SCHEDULES["one per look"]
    unsure: bool = False

    def decoder(self) -> AmusdDecoder:
        rows = [Sequence(r, r, list(prompt), self.new_tokens, self.eos) for r, prompt in enumerate(self.prompts)]
        params = DecodingParams(self.sampling, verification=self.verification)
        draft = ScheduledDraft(rows, self.schedule)
        step: Any = Bigram(Q3, self.exact)
        source: Any = SimpleNamespace(draft=None, draft_step=step, device=step.device, vocab=len(self.p[0]))
        kind: Any = SimpleNamespace(copies=False, stops_when_unsure=self.unsure, make=lambda _: self.drafter(self))
        shared, lock = list(draft.rows.values()), threading.Condition()
        draft.session = DraftSession(source, shared, params, 2 * LEAD + 1, kind, "sdpa", step.device, lock)
        while draft.session._prefill is not None:
            draft.session.step()
        return AmusdDecoder(rows, self.runner(self.p), params, draft, LEAD, self.unsure, True)


def _head(scene: Scene) -> HeadDrafter:
    """Return a head that reports its confidence, with a pointer to earlier occurrences."""
    pointer = Pointer(1).requires_grad_(False)
    pointer.by_size.fill_(1.0)
    head: Any = BigramHead(torch.tensor((2, 0)), pointer)
    table = ((0.85, 0.15), (0.4, 0.6), (0.7, 0.3), (0.5, 0.5))
    runner = scene.runner(table)
    return head_drafter(head, runner, len(scene.p[0]), scene.sampling, scene.verification, 0.6, ahead=True)


DRAFTERS: dict[str, Callable[[Scene], Any]] = {
    "model": _model(Q3),
    "an unsure head": _head,
    "copies, else a model": lambda scene: Cascade(_lookup(scene), _model(Q3)(scene), 1),
}
QUICK = [
    ("every other look", "an unsure head", "rejection"),
    ("depends on the text", "an unsure head", "block"),
    ("every other look", "copies, else a model", "rejection"),
]


@pytest.mark.parametrize(("schedule", "drafter", "rule"), slow_but(QUICK, product(SCHEDULES, DRAFTERS, RULES)))
def test_amusd_keeps_the_distribution(
    schedule: str, drafter: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft may arrive before the target's step, during it, or not at all."""
    monkeypatch.setattr("bass_core.draft.registry.AHEAD_CONFIDENCE", 0.5)
    unsure = drafter == "an unsure head"
    prompts = ((2, 1, 2, 1, 2),)
    scene = Overlapped(
        P3, DRAFTERS[drafter], FixedLength(1), rule, prompts, 4, 2, schedule=SCHEDULES[schedule], unsure=unsure
    )
    result = check_distribution(scene, monkeypatch)
    assert result.origins >= {"sampled", "accepted", "recovered"}
