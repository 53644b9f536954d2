"""Greedy text of every method is the target's own, token for token, in float32.

Contract: the reference is transformers' generate(do_sample=False), prompt by prompt. Drafts: a random model, a
perturbed copy that is accepted in part (so that rows diverge), the target itself, and prompt lookup.
"""

from functools import cache

import pytest

from bass_core import Generation, ModelPair, generate

from ..models import BUILDERS, NEAR, perturbed, prompts, reference, tiny

TOKENS = 24
DRAFTS = ("random", "perturbed", "self", "prompt_lookup")


@cache
def target(architecture):
    return tiny(architecture)


@cache
def expected(architecture, batch):
    return [reference(target(architecture), prompt, TOKENS) for prompt in prompts(batch, seed=batch)]


@cache
def pair(architecture, draft):
    model = target(architecture)
    drafts = {
        "random": lambda: tiny(architecture, seed=5, layers=1),
        "perturbed": lambda: perturbed(model, NEAR[architecture]),
        "self": lambda: model,
        "prompt_lookup": lambda: None,
    }
    return ModelPair(model, drafts[draft]())


def run(architecture, draft, batch, method, length) -> Generation:
    out = generate(
        pair(architecture, draft),
        prompts(batch, seed=batch),
        method=method,
        max_new_tokens=TOKENS,
        draft_length=length,
    )
    assert [sequence.token_ids for sequence in out.sequences] == expected(architecture, batch)
    return out


@pytest.mark.parametrize("architecture", BUILDERS)
def test_texts_do_not_repeat_themselves(architecture):
    """The other tests would prove little on a text that says one token over and over."""
    distinct = [len(set(row)) for row in expected(architecture, 8)]
    assert sum(distinct) / len(distinct) > TOKENS / 4


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("architecture", BUILDERS)
def test_regular(architecture, batch):
    run(architecture, "prompt_lookup", batch, "regular", 4)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("architecture", BUILDERS)
def test_bass_ragged_batch(architecture, draft):
    out = run(architecture, draft, 3, "bass", 4)
    if draft == "self":
        assert out.metrics.acceptance_rate == 1
    if draft == "perturbed":
        assert 0.4 <= out.metrics.acceptance_rate <= 0.8


@pytest.mark.parametrize("length", [1, 4, "bass"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "opt"])
def test_speculative_one_by_one(architecture, length):
    run(architecture, "perturbed", 3, "speculative", length)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 4, "bass"])
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("architecture", BUILDERS)
def test_every_combination(architecture, draft, batch, length):
    run(architecture, draft, batch, "bass", length)
    if batch < 8:
        run(architecture, draft, batch, "speculative", length)
