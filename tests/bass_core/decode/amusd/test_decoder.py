"""The target's side of AMUSD: a script decides which drafts arrive, and whether before or during a step."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bass_core import SamplingParams
from bass_core.decode.amusd.decoder import AmusdDecoder
from bass_core.decode.amusd.draft import DraftThread
from bass_core.decode.amusd.session import QueuedDraft
from bass_core.decode.base import DecodingParams
from bass_core.model.runner import ModelRunner
from bass_core.sequence import Sequence
from tests.support.models import prompts, reference, tiny_pair

PAIR = tiny_pair(None)
TARGET = PAIR.target
TOKENS = 12
(PROMPT,) = prompts(1)
TEXT = reference(TARGET, PROMPT, TOKENS + 4)


class ScriptedDraft(DraftThread):
    """No thread: `arrivals(call, position)` returns the drafts that the call-th look finds at `position`."""

    def __init__(self, row: Sequence, arrivals: Callable[[int, int], list[int]]) -> None:
        super().__init__([row])
        self._arrivals, self._calls = arrivals, 0

    def look(self, timeout_s: float = 0.0) -> dict[int, list[QueuedDraft]]:
        (row,) = self.rows.values()
        tokens = self._arrivals(self._calls, len(row.text) + len(row.drafts) - len(PROMPT))
        self._calls += 1
        row.drafts += [QueuedDraft(token) for token in tokens]
        self.forwards, self.drawn = self.forwards + len(tokens), self.drawn + len(tokens)
        return {row.index: list(row.drafts)}


def decode(arrivals: Callable[[int, int], list[int]]) -> tuple[AmusdDecoder, list[int]]:
    """Decode to the end; return the decoder and the number of drafts verified in each round."""
    row = Sequence(0, 0, PROMPT, TOKENS, frozenset())
    runner = ModelRunner(PAIR.target_step, 1, 96, PAIR.vocab, "pad")
    draft = ScriptedDraft(row, arrivals)
    decoder = AmusdDecoder([row], runner, DecodingParams(SamplingParams()), draft, 4, False, False)
    drafted, forwards_and_tokens = [], [0, 0]
    while not decoder.finished:
        round_ = decoder.step()
        drafted.append(sum(len(record.drafted) for record in round_.rows))
        forwards_and_tokens = [
            forwards_and_tokens[0] + round_.draft_forwards,
            forwards_and_tokens[1] + round_.draft_tokens,
        ]
        assert decoder.finished or runner.lengths[0] == len(row.tokens) - 1
    assert row.token_ids == TEXT[:TOKENS]
    assert forwards_and_tokens == [draft.forwards, draft.drawn], "a forward or token is missing from the rounds"
    return decoder, drafted


def right(position: int, count: int = 1) -> list[int]:
    return TEXT[position : position + count]


def wrong(position: int) -> list[int]:
    return [(TEXT[position] + 1) % 90]


def test_a_late_draft_that_is_right_is_accepted_and_fed_next() -> None:
    """One draft arrives before each step of the target, and the next one during it."""
    decoder, drafted = decode(lambda call, at: right(at))
    assert decoder.timeline.rolled_back == 0 and max(drafted) == 2


@pytest.mark.parametrize("fed", [1, 3])
def test_a_late_draft_that_is_wrong_is_rejected(fed: int) -> None:
    """All drafts fed to the target are accepted, and its own next token replaces the late draft."""
    _, drafted = decode(lambda call, at: wrong(at) if call % 2 else right(at, fed))
    assert max(drafted) > fed


def test_a_late_draft_after_a_wrong_one_is_not_verified() -> None:
    _, drafted = decode(lambda call, at: right(at) if call % 2 else wrong(at))
    assert max(drafted) == 1
