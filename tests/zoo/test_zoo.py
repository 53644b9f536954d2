"""Every causal architecture of transformers writes its own text here, or is refused at load in a sentence.

Contract: one test an architecture (`pytest tests/zoo -m slow -k gemma`), against docs/models.md; a new version of
transformers that brings another outcome fails here. `python -m tests.zoo` writes the table anew.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bass_core import ModelPair, generate

from ..models import reference, slow_but
from .comparing import outcome
from .making import WORDS, kinds, make
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


WAYS: list[dict[str, Any]] = [
    {"method": "regular"},
    {"method": "bass", "draft_length": 3},
    {"method": "bass", "tree": (2, 2)},
    {"method": "bass", "draft_length": 3, "attention": "pad"},
    {"method": "bass", "draft_length": 3, "attention": "split"},
]


@pytest.mark.parametrize(
    "kind",
    slow_but(["gpt_oss"], ["gpt_oss", "gemma4_text", "llama4_text", "mimo_v2_flash", "deepseek_v3", "bloom"]),
)
def test_what_a_model_adds_to_attention_holds_behind_prefixes_in_trees_and_under_each_backend(kind: str):
    """Sinks, chunks, windows in the mask, layers of several sizes, latents, and masks of a model's own."""
    generator = torch.Generator().manual_seed(5)
    shared, *rest = (torch.randint(3, WORDS, (size,), generator=generator).tolist() for size in (37, 5, 9, 12))
    rows = [shared + rest[0], shared + rest[1], rest[2]]
    model = make(kind)
    wanted = [reference(model, row, 10) for row in rows]
    pair = ModelPair(model, model)
    for step in (pair.target_step, pair.draft_step):
        if step is not None and step.least_saved is not None:
            step.least_saved = 16
    for way in WAYS:
        written = generate(pair, rows, max_new_tokens=10, eos_token_id=None, **way)
        assert [one.token_ids for one in written.sequences] == wanted, way


def test_the_table_shows_that_most_architectures_run():
    outcomes = [one for one in documented().values() if one != UNTRIED]
    assert outcomes.count(RUNS) > 0.6 * len(outcomes)
