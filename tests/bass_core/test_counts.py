"""How many verifications a text takes, where its tokens come from, and where it ends.

Contract: counted exactly, with a draft that IS the target (accepted at 100 %) and with policies that skip rounds.
"""

from math import ceil

import pytest
import torch

from bass_core import ModelPair, SamplingParams, generate, stream
from bass_core.drafters import Proposal
from bass_core.metrics import Counts, latency, summarise
from bass_core.sequence import Round, RowRound, Sequence

from ..models import VOCAB, prompts, reference, tiny

TARGET = tiny("llama")
PAIR = ModelPair(TARGET, TARGET)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("tokens", "length"), [(1, 3), (2, 3), (9, 1), (17, 4), (30, 7)])
def test_perfect_draft_takes_the_fewest_verifications(tokens, length, temperature):
    out = generate(
        PAIR,
        prompts(3),
        max_new_tokens=tokens,
        draft_length=length,
        sampling=SamplingParams(temperature),
    )
    assert out.metrics.rounds == ceil((tokens - 1) / (length + 1))
    assert out.metrics.target_forwards == 1 + out.metrics.rounds
    assert out.metrics.acceptance_rate in (1, None)
    assert [len(s.token_ids) for s in out.sequences] == [tokens] * 3
    assert {s.finish_reason for s in out.sequences} == {"length"}


@pytest.mark.parametrize("method", ["speculative", "bass"])
@pytest.mark.parametrize("verification", ["chen", "coupled"])
@pytest.mark.parametrize("params", [SamplingParams(1.0), SamplingParams(0.7, top_k=20, top_p=0.9)])
def test_a_perfect_draft_is_never_refused(params, verification, method):
    """Not one token is lost to noise that the two sides don't share, nor to a draft that lags behind."""
    out = generate(
        PAIR,
        prompts(8),
        method=method,
        max_new_tokens=32,
        draft_length=4,
        sampling=params,
        verification=verification,
    )
    assert out.metrics.acceptance_rate == 1
    assert out.metrics.target_forwards == (8 if method == "speculative" else 1) * (1 + ceil(31 / 5))


class Scripted:
    """Knows the greedy texts, and drafts the first `right` tokens of each round as they are, the rest wrong."""

    calls = 0

    def __init__(self, texts, right):
        self.texts, self.right = texts, right

    def start(self, rows):
        return None

    def propose(self, rows, caps, keys):
        drafts = torch.zeros(len(rows), max(caps), dtype=torch.long)
        for r, row in enumerate(rows):
            coming = self.texts[row.id][len(row.token_ids) :][: caps[r]]
            for i, token in enumerate(coming):
                drafts[r, i] = token if i < self.right else (token + 1) % VOCAB
        return Proposal(drafts, caps)

    def settle(self, rows, proposal, accepted):
        pass

    def move_row(self, source, target):
        pass


@pytest.mark.parametrize("method", ["speculative", "bass"])
@pytest.mark.parametrize("right", [0, 1, 3])
def test_drafts_that_are_right_so_far(right, method):
    """Length 4 of which the first `right` stand: every count of 25 tokens is known beforehand."""
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
    assert [sequence.token_ids for sequence in out.sequences] == texts
    metrics, rounds = out.metrics, (tokens - 1) // (right + 1)
    assert metrics.rounds == rounds * (2 if method == "speculative" else 1)
    assert metrics.target_forwards == metrics.rounds + (2 if method == "speculative" else 1)
    written = ["sampled", *(["accepted"] * right + ["recovered"]) * rounds]
    # Near its end a row may write less than it would draft: it drafts what it may write, but one.
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
    """Asks for four drafts and for none in turn."""

    limit = 4
    length = 4

    def update(self, accepted):
        self.length = 4 - self.length


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_without_drafts_leave_the_draft_in_step(temperature):
    out = generate(
        PAIR,
        prompts(3),
        max_new_tokens=40,
        draft_length=EveryOther(),
        sampling=SamplingParams(temperature),
    )
    assert out.metrics.acceptance_rate == 1
    assert out.metrics.rounds == 13


def test_origins_say_where_tokens_come_from():
    sequence = generate(PAIR, prompts(1), max_new_tokens=11, draft_length=4).sequences[0]
    assert sequence.origins == ["sampled", *["accepted"] * 4, "bonus", *["accepted"] * 4, "bonus"]
    worst = generate(ModelPair(TARGET, tiny("llama", seed=9)), prompts(1), max_new_tokens=12, draft_length=2)
    assert set(worst.sequences[0].origins) <= {"sampled", "recovered", "accepted", "bonus"}
    assert worst.sequences[0].origins.count("recovered") >= 8


def test_end_of_text_inside_an_accepted_span():
    prompt = prompts(1)[0]
    text = reference(TARGET, prompt, 20)
    eos = text[7]
    cut = text.index(eos) + 1
    out = generate(PAIR, prompt, max_new_tokens=20, draft_length=6, eos_token_id=[eos, 95])
    sequence = out.sequences[0]
    assert sequence.token_ids == text[:cut]
    assert sequence.finish_reason == "eos"
    # Drafts behind the end count neither as drafted nor as accepted.
    accepted = sequence.origins.count("accepted")
    assert out.metrics.drafted == out.metrics.accepted == accepted
    assert generate(PAIR, prompt, max_new_tokens=20, eos_token_id=None).sequences[0].token_ids == text


def test_rows_end_apart_and_the_others_go_on():
    rows = prompts(5)
    texts = [reference(TARGET, row, 30) for row in rows]
    eos = [texts[1][3], texts[3][9]]
    ends = [next((i + 1 for i, token in enumerate(text) if token in eos), 30) for text in texts]
    assert len(set(ends)) > 1
    for method in ("regular", "speculative", "bass"):
        out = generate(PAIR, rows, method=method, max_new_tokens=30, eos_token_id=eos)
        assert [s.token_ids for s in out.sequences] == [t[:e] for t, e in zip(texts, ends, strict=True)]


def test_a_text_ends_where_the_context_does():
    prompt = prompts(1)[0] * 200
    out = generate(PAIR, prompt[:505], max_new_tokens=50, draft_length=4)
    assert len(out.sequences[0].token_ids) == 512 - 505


def test_a_draft_with_a_shorter_context_falls_silent():
    short = tiny("llama")
    short.config.max_position_embeddings = 40
    rows = prompts(3)
    out = generate(ModelPair(TARGET, short), rows, max_new_tokens=60, draft_length=4)
    assert [s.token_ids for s in out.sequences] == [reference(TARGET, row, 60) for row in rows]
    assert 0 < out.metrics.acceptance_rate <= 1


def test_a_spent_time_budget_ends_the_lane():
    out = generate(PAIR, prompts(2), method="speculative", max_new_tokens=400, time_budget_ms=20)
    assert {s.finish_reason for s in out.sequences} <= {"budget", "length"}
    assert out.sequences[1].finish_reason == "budget"


@pytest.mark.parametrize("method", ["regular", "speculative", "bass"])
def test_stream_adds_up_to_generate(method):
    rounds = list(stream(PAIR, prompts(3), method=method, max_new_tokens=20, draft_length=3))
    texts = {index: [] for index in range(3)}
    for round_ in rounds:
        for row in round_.rows:
            texts[row.sequence] += row.tokens
    out = generate(PAIR, prompts(3), method=method, max_new_tokens=20, draft_length=3)
    assert list(texts.values()) == [s.token_ids for s in out.sequences]
    assert [r.time_ms for r in rounds] == sorted(r.time_ms for r in rounds)


def _row(drafted, accepted):
    return RowRound(0, [0] * drafted, [], [], [], accepted, [0] * (accepted + 1), [], None)


def test_figures_of_hand_made_rounds():
    counts = Counts()
    counts.add(Round("prefill", rows=[_row(0, 0), _row(0, 0)]))
    counts.add(Round("verify", 3, [_row(3, 3), _row(3, 1)]))
    counts.add(Round("verify", 3, [_row(2, 0), _row(0, 0)]))
    done = Sequence(0, 0, [1], 9, frozenset(), [1] * 5, [], [10.0, 20.0, 30.0, 40.0, 50.0], "length")
    slow = Sequence(1, 1, [1], 9, frozenset(), [1] * 5, [], [10.0, 30.0, 50.0, 70.0, 90.0], "eos")
    figures = summarise(counts, [done, slow], 95.0, 10.0, 3)
    assert figures.acceptance_rate == 4 / 8
    assert figures.token_acceptance == 4 / (3 + 2 + 1)
    assert figures.mean_acceptance_length == 1 + 4 / 3
    assert figures.per_position_acceptance == [2 / 3, 1 / 3, 1 / 2]
    assert figures.rounds == 2
    assert figures.ms_per_token == 2 * 80 / 10
    assert (figures.ptl_first_ms, figures.ptl_last_ms, figures.ptl_all_ms) == (10, 20, 15)
    assert figures.throughput_tps == 1000 * 10 / 90
    assert latency(Sequence(0, 0, [1], 9, frozenset(), [1], [], [5.0], "eos"), 0.0) is None
    assert summarise(Counts(), [done], 50.0, 10.0, 1).acceptance_rate is None
