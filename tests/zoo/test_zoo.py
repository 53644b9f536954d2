"""Every causal architecture of transformers writes its own text here, or is refused at load in a sentence.

Contract: one test an architecture (`BASS_ZOO=1 pytest tests/zoo -m slow -k gemma`), against docs/models.md; a new
version of transformers that brings another outcome fails here. Without BASS_ZOO the slow tests try every eighth,
as all take a quarter of an hour. `python -m tests.zoo` writes the table anew.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from bass_core import RequestError, generate
from tests.support.models import reference, slow_but, texts_of, tiny_pair

from .comparing import outcome
from .making import WORDS, kinds, make
from .table import RUNS, UNTRIED, documented, reason

# What people run most, or what once wrote other texts without a word: in the quick tests.
_QUICK = {"deepseek_v3", "doge", "gpt_oss", "llama4_text", "moshi", "phimoe"}
_TRIED = [kind for i, kind in enumerate(kinds()) if kind in _QUICK or i % 8 == 0 or "BASS_ZOO" in os.environ]
_EACH = [pytest.param(kind, marks=() if kind in _QUICK else pytest.mark.slow) for kind in _TRIED]


@pytest.mark.parametrize("kind", _EACH)
def test_an_architecture_runs_or_is_refused_as_documented(kind: str):
    said = documented()[kind]
    if said == UNTRIED:
        pytest.skip("no tiny model of it was made")
    assert reason(outcome(make(kind))) == said


WAYS: list[dict[str, Any]] = [
    {"method": "regular"},
    {"method": "bass", "draft_length": 3},
    {"method": "bass", "tree": (3, 3, 2)},
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
    # Drafts that the target refuses in part: of those of its own, a tree's first branch is the text.
    pair = tiny_pair(0.02, target=model)
    for step in (pair.target_step, pair.draft_step):
        if step is not None and step.least_saved is not None:
            step.least_saved = 16
    for way in WAYS:
        if "tree" in way and not pair.target_step.trees:
            with pytest.raises(RequestError, match="can't attend over trees"):
                generate(pair, rows, **way)
            continue
        written = generate(pair, rows, max_new_tokens=10, eos_token_id=None, **way)
        assert texts_of(written) == wanted, way


def test_the_table_names_each_architecture_once_and_leaves_a_refused_model_s_name_out():
    assert sorted(documented()) == kinds()
    assert reason("a-model is not supported: it is odd. Choose another causal LM.") == "it is odd"


def test_the_table_shows_that_most_architectures_run():
    outcomes = [one for one in documented().values() if one != UNTRIED]
    assert outcomes.count(RUNS) > 0.6 * len(outcomes)
