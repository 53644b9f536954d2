"""The exact number of verifications of a text, and the origins of its tokens.

Counts are known in advance if the draft is the target, if only the first few drafts are right, or if a policy
drafts only in some rounds.
"""

from math import ceil

import pytest
import torch

from bass_core import METHODS, ModelPair, SamplingParams, generate, stream
from bass_core.draft.base import Proposal
from tests.support.models import VOCAB, prompts, reference, slow_but, texts_of, tiny_pair

PAIR = tiny_pair("self")
TARGET = PAIR.target
COUNTED = [name for name, method in METHODS.items() if method.drafts and not method.overlaps]
DRAFTING = [name for name, method in METHODS.items() if method.drafts]


def times(method, rows):
    """Return how many times a method repeats its rounds for `rows` rows: 1 if it decodes them as a batch."""
    return 1 if METHODS[method].batched else rows


@pytest.mark.parametrize("method", COUNTED)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("tokens", "length"), slow_but([(2, 3), (17, 4)], [(1, 3), (2, 3), (9, 1), (17, 4)]))
def test_perfect_draft_takes_the_fewest_verifications(tokens, length, temperature, method):
    out = generate(
        PAIR,
        prompts(3),
        method=method,
        max_new_tokens=tokens,
        draft_length=length,
        sampling=SamplingParams(temperature),
    )
    assert out.metrics.rounds == ceil((tokens - 1) / (length + 1)) * times(method, 3)
    assert out.metrics.target_forwards == times(method, 3) + out.metrics.rounds
    assert out.metrics.acceptance_rate in (1, None)
    assert [len(s.token_ids) for s in out.sequences] == [tokens] * 3
    assert {s.finish_reason for s in out.sequences} == {"length"}


@pytest.mark.parametrize("method", DRAFTING)
@pytest.mark.parametrize("verification", ["rejection", "block", "coupled"])
def test_a_perfect_draft_is_never_rejected(verification, method):
    """No draft is rejected even if draft and target have different noise, or the draft lags behind."""
    out = generate(
        PAIR,
        prompts(4),
        method=method,
        max_new_tokens=22,
        draft_length=4,
        sampling=SamplingParams(0.7, top_k=20, top_p=0.9),
        verification=verification,
    )
    assert out.metrics.acceptance_rate == 1
    if not METHODS[method].overlaps:
        assert out.metrics.target_forwards == times(method, 4) * (1 + ceil(21 / 5))


class Scripted:
    """A drafter that knows the greedy texts. Its first `right` drafts of each round are right, the rest wrong."""

    calls = 0

    def __init__(self, texts, right):
        self.texts, self.right = texts, right

    def start(self, rows):
        return None

    def propose(self, rows, max_drafts, keys):
        drafts = torch.zeros(len(rows), max(max_drafts), dtype=torch.long)
        for r, row in enumerate(rows):
            next_tokens = self.texts[row.id][len(row.token_ids) :][: max_drafts[r]]
            for i, token in enumerate(next_tokens):
                drafts[r, i] = token if i < self.right else (token + 1) % VOCAB
        return Proposal(drafts, max_drafts)

    def on_verified(self, rows, proposal, accepted):
        pass

    def move_row(self, source, target):
        pass


@pytest.mark.parametrize("method", COUNTED)
@pytest.mark.parametrize("right", [0, 1, 3])
def test_counts_of_partly_right_drafts_are_exact(right, method):
    """Of 4 drafts the first `right` are accepted, so every count for 25 tokens is known."""
    rows, tokens, length = prompts(2), 25, 4
    texts = [reference(TARGET, row, tokens) for row in rows]
    out = generate(
        ModelPair(TARGET),
        rows,
        method=method,
        drafter=Scripted(texts, right),
        max_new_tokens=tokens,
        draft_length=length,
    )
    assert texts_of(out) == texts
    metrics, rounds = out.metrics, (tokens - 1) // (right + 1)
    assert metrics.rounds == rounds * (2 if method == "speculative" else 1)
    assert metrics.target_forwards == metrics.rounds + (2 if method == "speculative" else 1)
    written = ["sampled", *(["accepted"] * right + ["recovered"]) * rounds]
    # Near the end of a row, the number of drafts is one less than the number of tokens it may still write.
    lengths = [min(length, tokens - 1 - i * (right + 1) - 1) for i in range(rounds)]
    for sequence in out.sequences:
        assert sequence.origins[:-1] == written[:-1]
    assert metrics.drafted == 2 * sum(lengths)
    assert metrics.accepted == 2 * sum(min(right, drafted) for drafted in lengths)
    expected = [
        sum(n > i for n in lengths if i < right) / max(1, sum(n > i for n in lengths)) for i in range(length)
    ]
    assert metrics.per_position_acceptance == expected
    assert metrics.mean_acceptance_length == 1 + metrics.accepted / (2 * sum(n > 0 for n in lengths))


class EveryOther:
    """A policy that asks for four drafts in every other round, and for none in between."""

    limit = 4

    def __init__(self):
        self.length = 4

    def lengths(self, offers):
        return [self.length] * len(offers)

    def observe(self, feedback):
        if self.length in feedback.drafted:
            self.length = 4 - self.length


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_without_drafts_keep_the_draft_in_step(temperature):
    out = generate(
        PAIR,
        prompts(3),
        max_new_tokens=40,
        draft_length=EveryOther(),
        sampling=SamplingParams(temperature),
    )
    assert out.metrics.acceptance_rate == 1
    assert out.metrics.rounds == 13


def test_a_perfect_draft_leaves_only_accepted_and_bonus_tokens():
    sequence = generate(PAIR, prompts(1), max_new_tokens=11, draft_length=4).sequences[0]
    assert sequence.origins == ["sampled", *["accepted"] * 4, "bonus", *["accepted"] * 4, "bonus"]


def test_the_block_rule_accepts_more_drafts_than_rejection():
    """Rounds under the block rule ("auto") also record how many drafts the rejection rule would have accepted."""
    pair = tiny_pair(target=TARGET)
    options = {"draft_length": 6, "sampling": SamplingParams(1.0), "max_new_tokens": 60, "eos_token_id": None}
    rows = [row for round_ in stream(pair, prompts(16), **options) for row in round_.rows if row.drafted]
    saved = [row.accepted - row.one_by_one for row in rows]
    assert sum(saved) > 0 and min(saved) < 0, "each rule wins some rounds"
    assert sum(row.saved for row in rows) == sum(max(0, n) for n in saved)
    for row in rows:
        last = max((i for i, (u, h) in enumerate(zip(row.u, row.chance, strict=True), 1) if u < h), default=0)
        assert row.accepted == last
    texts = {
        name: texts_of(generate(pair, prompts(6), verification=name, **options))
        for name in ("auto", "block", "rejection", "chen")
    }
    assert texts["auto"] == texts["block"] != texts["rejection"] == texts["chen"]
