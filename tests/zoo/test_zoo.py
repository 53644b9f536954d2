"""Every causal architecture of transformers writes its own text or is refused, as documented in docs/models.md.

To try some of them, use e.g. `pytest --all tests/zoo -m slow -k gemma`. All take a quarter of an hour, so unless
transformers' version has changed (tests/support/tested.py), the slow tests try every twentieth. If a new version
changes an outcome, `python -m tests.zoo` writes the table again.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bass_core import ModelPair, RequestError, generate
from tests.support.models import reference, slow_but, texts_of, tiny_pair

from .comparing import outcome
from .making import WORDS, kinds, make
from .table import RUNS, UNTRIED, documented, reason

# The architectures of the quick tests: people run them most, or they once wrote wrong texts silently.
_QUICK = {"deepseek_v3", "doge", "gpt_oss", "llama4_text", "moshi", "phimoe"}
_DOCUMENTED = documented()
_RARE = (pytest.mark.slow, pytest.mark.demand("zoo"))
_EACH = [
    pytest.param(kind, marks=() if kind in _QUICK else pytest.mark.slow if i % 20 == 0 else _RARE)
    for i, kind in enumerate(kinds())
    if _DOCUMENTED.get(kind) != UNTRIED  # no tiny model of it was made
]


@pytest.mark.parametrize("kind", _EACH)
def test_an_architecture_runs_or_is_refused_as_documented(kind: str):
    assert reason(outcome(make(kind))) == _DOCUMENTED[kind]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["bloom", "falcon", "mpt", "qwen3_5_text", "mamba2"])
def test_models_with_their_own_attention_or_states_run_in_16_bits(kind: str, dtype: torch.dtype):
    """Their code multiplies queries with cached keys, so the cache must have the model's dtype, on a CPU too.

    Layers with states compute some of them in float32.
    """
    model, rows = make(kind).to(dtype), [[5, 6, 7, 8, 9], [4, 5]]
    expected = [reference(model, row, 4) for row in rows]
    written = generate(ModelPair(model), rows, method="regular", max_new_tokens=4, eos_token_id=None)
    assert texts_of(written) == expected


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
def test_special_attention_works_with_prefixes_trees_and_all_backends(kind: str):
    """The models have sinks, chunks, windows in the mask, layers of several sizes, latents, or special masks."""
    generator = torch.Generator().manual_seed(5)
    shared, *rest = (torch.randint(3, WORDS, (size,), generator=generator).tolist() for size in (37, 5, 9, 12))
    rows = [shared + rest[0], shared + rest[1], rest[2]]
    model = make(kind)
    expected = [reference(model, row, 10) for row in rows]
    # The draft is a perturbed copy, so that some drafts are rejected. If the target drafted for itself, every
    # draft would be accepted.
    pair = tiny_pair(0.02, target=model)
    for step in (pair.target_step, pair.draft_step):
        if step is not None and step.min_shared_tokens is not None:
            step.min_shared_tokens = 16
    for way in WAYS:
        if "tree" in way and not pair.target_step.trees:
            with pytest.raises(RequestError, match="can't attend over trees"):
                generate(pair, rows, **way)
            continue
        written = generate(pair, rows, max_new_tokens=10, eos_token_id=None, **way)
        assert texts_of(written) == expected, way


def test_the_table_lists_each_architecture_once_without_names_of_models():
    assert sorted(documented()) == kinds()
    assert reason("a-model is not supported: it is odd. Choose another causal LM.") == "it is odd"


def test_most_documented_architectures_run():
    outcomes = [outcome for outcome in documented().values() if outcome != UNTRIED]
    assert outcomes.count(RUNS) > 0.6 * len(outcomes)
