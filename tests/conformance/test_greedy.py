"""Every method writes the target's own text in float32, greedy or sampled under coupled verification.

Each prompt's greedy text equals that of transformers' generate(do_sample=False), and its coupled text equals that
of regular decoding with the same noise. The quick tests cover each choice of the table, the slow ones every pair
of choices. AMUSD's drafts depend on timing; its text does not.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest

from bass_core import METHODS, generate, stream
from tests.support.models import BUILDERS, slow_but, texts_of

from .table import DRAFTS, PROMPTS, TOKENS, TREES, Case, cases, expected, pair

NAMES = {name: method for name, method in METHODS.items() if method.drafts}
PARTS = 6


@pytest.mark.parametrize("architecture", BUILDERS)
@pytest.mark.parametrize("text", ["greedy", "coupled"])
def test_texts_do_not_repeat_themselves(architecture: str, text: str) -> None:
    """If a text only repeated one phrase, the other tests would prove little."""
    for row in expected(architecture, text):
        triples = list(zip(row, row[1:], row[2:], strict=False))
        assert len(set(triples)) >= 0.6 * len(triples)
        assert len(set(row)) >= TOKENS / 3


@pytest.mark.parametrize("case", cases(1), ids=str)
def test_every_choice_writes_the_targets_text(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_two_choices_write_the_targets_text(part: int) -> None:
    for case in cases(2)[part::PARTS]:
        check(case)


@pytest.mark.slow
@pytest.mark.parametrize("method", NAMES)
def test_every_draft_proposes_tokens(method: str) -> None:
    for draft in DRAFTS:
        case = Case(method, draft, "llama", "pad", 4, 6, "greedy", "different")
        assert not case.possible or check(case), str(case)


def test_accepted_paths_leave_the_first_branch() -> None:
    """If accepted paths never left the first branch, the tests above would prove little about trees."""
    seen: Counter[Any] = Counter()
    for length, text in (("tree 3 2 1", "greedy"), ("tree 3 2 1", "coupled"), ("tree 1 2", "greedy")):
        case = Case("bass", "perturbed", "llama", "sdpa", length, 6, text, "different")
        for row in (row for round_ in stream(**case.arguments()) for row in round_.rows):
            if row.parents is None or row.path is None:
                continue
            assert len(row.path) == row.accepted
            seen[length, text] += 1
            seen["other branch"] += any(row.parents.index(row.parents[draft]) != draft for draft in row.path)
    assert min(seen.values()) > 3 and len(seen) == 4, seen


def check(case: Case) -> int:
    """Check the case's text; return the number of drafted tokens."""
    out = case.run()
    assert texts_of(out) == case.expected(), str(case)
    if METHODS[case.method].drafts and case.draft == "self" and case.length:
        perfect = (1, None) if METHODS[case.method].overlaps else (1,)
        # Only one path of a tree can be accepted.
        trees = case.length in TREES and not METHODS[case.method].overlaps
        rate = out.metrics.token_acceptance if trees else out.metrics.acceptance_rate
        assert rate in perfect, str(case)
    if not METHODS[case.method].drafts or case.length == 0:
        assert not out.metrics.drafted, str(case)
    return out.metrics.drafted or 0


@pytest.mark.parametrize(
    ("architecture", "method"),
    slow_but(
        [("llama", "bass"), ("gemma3", "bass"), ("llama", "amusd")],
        # A draft model with states can't go back over several rounds.
        [case for case in product(BUILDERS, NAMES) if case != ("qwen3_5", "amusd")],
    ),
)
def test_rows_that_diverge_write_the_targets_text(architecture: str, method: str) -> None:
    """With a draft that is partly right, rows accept different numbers of tokens."""
    out = generate(
        pair(architecture, "perturbed"),
        PROMPTS["different"],
        method=method,
        drafter=DRAFTS["perturbed"].drafter,
        draft_length=4,
        max_new_tokens=TOKENS,
    )
    assert texts_of(out) == expected(architecture, "greedy")
    # If the draft overlaps with the target, the number of drafts depends on the machine's speed.
    if not METHODS[method].overlaps:
        assert 0.4 <= out.metrics.token_acceptance <= 0.9
        assert len({sequence.origins.count("accepted") for sequence in out.sequences}) > 1
