"""The decoding loop writes the same tokens as bass_core/reference.py, given the same noise, in float32."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

from bass_core import SamplingParams, generate, reference
from bass_core.sample.noise import Role
from tests.support import ROOT
from tests.support.models import VOCAB, prompts, texts_of, tiny_pair

README = ROOT / "README.md"
PAIR = tiny_pair()
TARGET, DRAFT = PAIR.target, PAIR.draft
METHODS = {"speculative": reference.speculative, "bass": reference.bass}


@pytest.mark.parametrize("length", ["bass", 3])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_loop_writes_the_tokens_of_the_reference(rule, method, temperature, rows, length):
    texts = prompts(rows, seed=rows)
    output = generate(
        PAIR,
        texts,
        method=method,
        max_new_tokens=40,
        sampling=SamplingParams(temperature),
        draft_length=length,
        drafter="model",
        verification=rule,
        seed=11,
        eos_token_id=None,
    )
    fixed = None if length == "bass" else length
    with torch.inference_mode():
        together = rule == "block"
        expected = METHODS[method](TARGET, DRAFT, texts, 40, temperature, length=fixed, seed=11, together=together)
    assert expected == texts_of(output)
    origins = {origin for sequence in output.sequences for origin in sequence.origins}
    assert {"accepted", "recovered"} <= origins, "drafts were never accepted, or never rejected"


def test_a_step_draws_from_the_targets_distribution():
    """With one draft, the first token has distribution p, summed exactly over all drafts and verdicts."""
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], dtype=torch.float64)
    q = torch.tensor([0.2, 0.7, 0.1], dtype=torch.float64)

    class ScriptedNoise:
        """Uses a fixed u, and records the weights of the next draw."""

        def __init__(self, r):
            self.number = r

        def r(self, i):
            return self.number

        def draw(self, weights, i, role):
            self.weights, self.role = weights / weights.sum(), role
            return 0

    distribution = torch.zeros(3, dtype=torch.float64)
    for x in range(3):
        chance = min(1.0, float(p[0, x] / q[x]))
        accepted, rejected = ScriptedNoise(chance - 1e-9), ScriptedNoise(chance + 1e-9)
        assert reference.judge([x], [q], p, accepted) == [x, 0] and accepted.role is Role.TARGET
        assert torch.equal(accepted.weights, p[1])
        distribution[x] += q[x] * chance
        if chance < 1:
            assert reference.judge([x], [q], p, rejected) == [0] and rejected.role is Role.RESIDUAL
            distribution += q[x] * (1 - chance) * rejected.weights
    assert torch.allclose(distribution, p[0])


def test_a_model_may_be_a_function_that_returns_logits():
    texts = prompts(2)
    with torch.inference_mode():
        rows = reference.bass(lambda ids: TARGET(ids).logits, lambda ids: DRAFT(ids).logits, texts, 8, 1.0)
        assert rows == reference.bass(TARGET, DRAFT, texts, 8, 1.0)
    assert all(0 <= token < VOCAB for row in rows for token in row)


def test_the_readme_shows_the_reference():
    """The README's second Python block is copied from bass_core/reference.py."""
    block = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[1]
    assert block.strip() and block.strip() in inspect.getsource(reference)
    assert "def judge" in block
