"""Every causal architecture of transformers writes its own text here, or is refused at load in a sentence.

Contract: one test an architecture (`pytest tests/zoo -m slow -k gemma`), against docs/models.md; a new version of
transformers that brings another outcome fails here. `python -m tests.zoo` writes the table anew.
"""

from __future__ import annotations

import pytest

from .comparing import outcome
from .making import kinds, make
from .table import RUNS, UNTRIED, documented, reason

# What people run most, or what once wrote other texts without a word: in the quick tests.
_QUICK = {"deepseek_v3", "doge", "gpt_oss", "llama4_text", "moshi", "phimoe"}
_EACH = [pytest.param(kind, marks=() if kind in _QUICK else pytest.mark.slow) for kind in kinds()]


@pytest.mark.parametrize("kind", _EACH)
def test_an_architecture_runs_or_is_refused_as_documented(kind: str):
    said = documented().get(kind, UNTRIED)
    if said == UNTRIED:
        pytest.skip("no tiny model of it was made")
    assert reason(outcome(make(kind))) == said


def test_the_table_shows_that_most_architectures_run():
    outcomes = list(documented().values())
    assert outcomes.count(RUNS) > 0.6 * len(outcomes)
