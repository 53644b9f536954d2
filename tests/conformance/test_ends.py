"""A text ends at an end token, its length, the model's context, or the lane's time budget.

Nothing is written after an end, drafts after it are not counted, and rows that end do not change the others. The
draft is the target itself, so that all drafts are accepted and texts also end at accepted drafts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest

from bass_core import METHODS, ModelPair, SamplingParams, generate, stream
from bass_core.lanes.clock import LaneClock
from tests.support.models import VOCAB, byte_tokenizer, prompts, reference, slow_but, texts_of, tiny, tiny_pair

from .table import drafting_of, serves

PAIR = tiny_pair("self")
TARGET = PAIR.target
ROWS = prompts(5)
TEXTS = [reference(TARGET, row, 30) for row in ROWS]


def cut(text: list[int], ends: list[int]) -> list[int]:
    return next((text[: i + 1] for i, token in enumerate(text) if token in ends), text)


def written(pair: ModelPair = PAIR, rows: Any = ROWS, **arguments: Any) -> list[list[int]]:
    length = {} if "tree" in arguments else {"draft_length": 5}
    out = generate(pair, rows, **({"max_new_tokens": 30} | length | arguments))
    return texts_of(out)


@pytest.mark.parametrize(
    ("place", "method"), slow_but([(0, "regular"), *product((1, 5, 6), ("bass",))], product(range(8), METHODS))
)
def test_a_text_ends_at_any_place_of_a_round(place: int, method: str) -> None:
    """Place 0 is the prefill's token, 1 to 5 are drafts, 6 is the bonus token, and 7 is a draft again."""
    ends = [TEXTS[0][place], TEXTS[3][14]]
    out = generate(PAIR, ROWS, method=method, max_new_tokens=30, draft_length=5, eos_token_id=ends)
    for sequence, text in zip(out.sequences, TEXTS, strict=True):
        assert sequence.token_ids == cut(text, ends)
        assert sequence.finish_reason == ("eos" if sequence.token_ids[-1] in ends else "length")
        assert len(sequence.origins) == len(sequence.times_ms) == len(sequence.token_ids)
    accepted = sum(sequence.origins.count("accepted") for sequence in out.sequences)
    assert out.metrics.drafted == out.metrics.accepted == accepted
    assert out.metrics.new_tokens == sum(len(sequence.token_ids) for sequence in out.sequences)


@pytest.mark.slow
@pytest.mark.parametrize("place", range(6))
def test_a_text_ends_at_any_place_of_an_accepted_path(place: int) -> None:
    """The accepted path is cut after an end token; without one it's as deep as the tree."""
    ends = [TEXTS[0][place], TEXTS[3][14]]
    options: dict[str, Any] = {"max_new_tokens": 30, "tree": (3, 2, 2, 1), "eos_token_id": ends}
    out = generate(PAIR, ROWS, **options)
    for sequence, text in zip(out.sequences, TEXTS, strict=True):
        assert sequence.token_ids == cut(text, ends)
        assert len(sequence.origins) == len(sequence.times_ms) == len(sequence.token_ids)
    accepted = sum(sequence.origins.count("accepted") for sequence in out.sequences)
    assert out.metrics.accepted == accepted and out.metrics.token_acceptance == 1
    assert out.metrics.drafted > accepted, "a tree has siblings"
    for round_ in stream(PAIR, ROWS, **options):
        for row in (row for row in round_.rows if row.parents is not None):
            assert row.path is not None and not set(row.tokens[:-1]) & set(ends)
            assert [row.drafted[i] for i in row.path] == row.tokens[: row.accepted]
            assert [row.parents[i] for i in row.path] == [-1, *row.path][: row.accepted]
            assert len(row.parents) == len(row.p) == len(row.q) == len(row.u) == len(row.drafted)
            if row.finish_reason == "eos" and row.tokens[-1] in row.drafted and row.accepted == len(row.tokens):
                assert row.path[-1] not in row.parents


def test_rounds_contain_no_draft_after_an_end() -> None:
    ends = [TEXTS[0][3]]
    for round_ in stream(PAIR, ROWS, max_new_tokens=30, draft_length=5, eos_token_id=ends):
        for row in round_.rows:
            assert not set(row.tokens[:-1]) & set(ends) and not set(row.drafted[:-1]) & set(ends)
            assert len(row.p) == len(row.q) == len(row.u) == len(row.drafted)


def test_the_request_or_the_model_sets_the_end_tokens() -> None:
    end, other = TEXTS[0][5], TEXTS[0][2]
    configured = copy.deepcopy(TARGET)
    configured.generation_config.eos_token_id = end
    pair = ModelPair(configured, configured)
    first = {"rows": ROWS[0]}
    assert written(pair, **first) == written(pair, **first, eos_token_id="auto") == [cut(TEXTS[0], [end])]
    assert written(pair, **first, eos_token_id=None) == [TEXTS[0]]
    assert written(pair, **first, eos_token_id=other) == [cut(TEXTS[0], [other])]
    assert written(pair, **first, eos_token_id=[end, other]) == [cut(TEXTS[0], [end, other])]
    configured.generation_config.eos_token_id = [end, other]
    assert written(pair, **first) == [cut(TEXTS[0], [end, other])]
    configured.generation_config.eos_token_id = None
    assert written(pair, **first) == [TEXTS[0]]


def test_a_sampled_end_token_ends_the_text() -> None:
    ends = list(range(0, VOCAB, 9))
    warm = {"sampling": SamplingParams(1.0), "verification": "coupled", "max_new_tokens": 60}
    whole = written(**warm, method="regular", eos_token_id=None)
    for method in (name for name, each in METHODS.items() if serves(each, "self", 5, "coupled")):
        assert written(**warm, method=method, eos_token_id=ends) == [cut(text, ends) for text in whole]


@pytest.mark.parametrize(
    ("method", "length"),
    slow_but(
        [("bass", 4), ("bass", "tree 3 2 1")],
        [
            (name, n)
            for name, method in METHODS.items()
            for n in (0, 4, "bass", "tree 3 2 1")
            # Methods outside our code count new tokens from the end of the longest prompt.
            if serves(method, "self", n) and not method.outside
        ],
    ),
)
def test_the_context_ends_a_text(method: str, length: Any) -> None:
    """Prompts leave room for 1, 2, 6 and 30 tokens. The last row's rounds could pad others past the context."""
    rows = [(ROWS[i] * 200)[: 512 - room] for i, room in enumerate((1, 2, 6))] + [ROWS[3]]
    out = written(rows=rows, method=method, **drafting_of(length))
    assert [len(text) for text in out] == [1, 2, 6, 30]
    assert out == [reference(TARGET, row, len(text)) for row, text in zip(rows, out, strict=True)]


@pytest.mark.parametrize(
    ("context", "method"), slow_but([(12, "bass"), (40, "bass")], product([4, 12, 40], ["bass", "amusd"]))
)
def test_a_draft_with_a_shorter_context_changes_no_text(context: int, method: str) -> None:
    """The draft stops proposing once its context is full, for some rows from the start."""
    short = tiny("llama")
    short.config.max_position_embeddings = context
    pair = ModelPair(TARGET, short)
    assert written(pair, method=method) == TEXTS
    out = generate(pair, ROWS, method=method, max_new_tokens=30, draft_length=5)
    room = sum(max(0, context - len(row)) for row in ROWS)
    assert (out.metrics.drafted or 0) <= room + 5 * len(ROWS)
    if context == 40:
        assert out.metrics.acceptance_rate == 1


@pytest.mark.parametrize("method", slow_but(["bass"], ["speculative", "bass", "amusd"]))
def test_a_draft_with_less_context_than_the_shared_prefix_changes_no_text(method: str) -> None:
    short = tiny("llama")
    short.config.max_position_embeddings = 40
    rows = [(ROWS[0] * 200)[:200] + [last] for last in (1, 2)]
    out = written(ModelPair(TARGET, short), rows=rows, method=method, max_new_tokens=6)
    assert out == [reference(TARGET, row, 6) for row in rows]


class Late:
    """A policy that asks for no drafts for `silent` rounds, then for four."""

    limit = 4

    def __init__(self, silent: int) -> None:
        self.silent, self.rounds = silent, 0

    def lengths(self, offers: Any) -> list[int]:
        return [0 if self.rounds < self.silent else 4] * len(offers)

    def observe(self, feedback: Any) -> None:
        self.rounds += 1


@pytest.mark.slow
@pytest.mark.parametrize("method", ["speculative", "bass"])
def test_the_draft_catches_up_after_rounds_without_drafts(method: str) -> None:
    """The draft is fed a dozen tokens of one row at once, while the other row is at the end of its context."""
    rows = [ROWS[0], (ROWS[1] * 200)[: 512 - 12]]
    for silent in (9, 10, 11):
        out = generate(PAIR, rows, method=method, max_new_tokens=30, draft_length=Late(silent))
        expected = [reference(TARGET, row, n) for row, n in zip(rows, (30, 12), strict=True)]
        assert texts_of(out) == expected
        assert out.metrics.acceptance_rate == 1


@pytest.mark.parametrize("method", slow_but(["speculative", "bass"], METHODS))
def test_a_spent_budget_ends_the_lane(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step takes ten milliseconds. The step that exceeds the time budget keeps its tokens."""

    @contextmanager
    def ten_ms(self: LaneClock) -> Iterator[None]:
        yield
        self.ms += 10

    monkeypatch.setattr(LaneClock, "running", ten_ms)
    out = generate(PAIR, ROWS[:2], method=method, max_new_tokens=30, draft_length=2, time_budget_ms=45)
    assert max(max(s.times_ms, default=0) for s in out.sequences) <= 10 * 5
    assert {s.finish_reason for s in out.sequences} == {"budget"}
    for sequence, text in zip(out.sequences, TEXTS[:2], strict=True):
        assert sequence.token_ids == text[: len(sequence.token_ids)]
    if method == "speculative":
        assert out.sequences[0].token_ids and not out.sequences[1].token_ids


def test_outputs_beyond_the_vocabulary_are_ignored() -> None:
    """If a model has more outputs than the tokenizer has tokens, its logits are cut to the tokenizer's."""
    wide = copy.deepcopy(TARGET)
    wide.resize_token_embeddings(VOCAB + 32)
    tokenizer = byte_tokenizer()
    tokenizer.__class__ = type("Short", (type(tokenizer),), {"__len__": lambda self: VOCAB})
    for target, draft in ((TARGET, wide), (wide, TARGET)):
        pair = ModelPair(target, draft, tokenizer)
        assert written(pair, eos_token_id=None) == TEXTS
