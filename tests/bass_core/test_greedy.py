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
    return [reference(target(architecture), prompt, TOKENS) for prompt in prompts(batch)]


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
        prompts(batch),
        method=method,
        max_new_tokens=TOKENS,
        draft_length=length,
    )
    assert [sequence.token_ids for sequence in out.sequences] == expected(architecture, batch)
    return out


@pytest.mark.parametrize("architecture", BUILDERS)
def test_texts_do_not_repeat_themselves(architecture):
    """The other tests would prove little on a text that says one thing over and over."""
    for text in expected(architecture, 8):
        triples = list(zip(text, text[1:], text[2:], strict=False))
        assert len(set(triples)) >= 0.6 * len(triples)
        assert len(set(text)) >= TOKENS / 3


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("architecture", BUILDERS)
def test_regular(architecture, batch):
    run(architecture, "prompt_lookup", batch, "regular", 4)


@pytest.mark.parametrize("length", [1, 4, "bass"])
@pytest.mark.parametrize("architecture", BUILDERS)
def test_rows_that_diverge(architecture, length):
    """A draft that is right in part: every row accepts its own number of tokens."""
    out = run(architecture, "perturbed", 8, "bass", length)
    metrics = out.metrics
    assert 0.4 <= metrics.token_acceptance <= 0.8
    if length != "bass":
        assert 0.4 <= metrics.acceptance_rate <= 0.8
    assert len({s.origins.count("accepted") for s in out.sequences}) > 1


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("architecture", BUILDERS)
def test_bass_with_every_draft(architecture, draft):
    metrics = run(architecture, draft, 3, "bass", 4).metrics
    if draft == "self":
        assert metrics.acceptance_rate == 1
    if draft == "random":
        assert metrics.acceptance_rate < 0.2


@pytest.mark.parametrize("length", [1, 4, "bass"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "opt"])
def test_speculative_one_by_one(architecture, length):
    run(architecture, "perturbed", 3, "speculative", length)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("architecture", BUILDERS)
def test_every_combination(architecture, draft, batch):
    for length in (1, 4, "bass"):
        for method in ("speculative", "bass"):
            run(architecture, draft, batch, method, length)
