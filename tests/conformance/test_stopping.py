"""Sampled text has the target's distribution even when earlier drafts decide how much is drafted.

Contract: target and head give the same distribution at every position, so each token is tested on its own. The
head stops where it is unsure, and policies and drafters read how far it got: thrown-away drafts of a position must
reveal nothing about that position's drafts in the next round. Seeds are fixed.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM

from bass_core import ModelPair, SamplingParams, generate
from bass_core.decode.calibrate import CostTable
from bass_core.length.cost_aware import CostAware
from bass_core.model.draft_head import DraftHead, HeadConfig
from bass_core.sample.distribution import probabilities

SIZE, P, Q = 16, torch.tensor([0.3, 0.7]), torch.tensor([0.66, 0.34])
PROMPT = [1, 0]
# Milliseconds, chosen so that three drafts barely pay.
COSTS = CostTable({1: [(1, 10), (9, 14)]}, {1: 1.5}, padded=False)
WARM = SamplingParams(1.0)


def constant_pair() -> ModelPair:
    """A target that gives P at every position, and a draft head that gives Q."""
    config = LlamaConfig(
        vocab_size=2, hidden_size=SIZE, intermediate_size=SIZE, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    target = LlamaForCausalLM(config).eval().requires_grad_(False)
    head = DraftHead(target, HeadConfig(1, SIZE), torch.arange(2)).eval().requires_grad_(False)
    for model in (target, head.body):
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
    # Every embedding is the first unit vector, which the head maps to the second; the norm makes them 4 long.
    target.model.embed_tokens.weight.zero_()[:, 0] = 1.0
    head.fuse.weight.zero_()[1, 0] = 1.0
    for column, chances in enumerate((P, Q)):
        target.lm_head.weight[:, column] = head.body.lm_head.weight[:, column] = chances.log() / SIZE**0.5
    return ModelPair(target, head)


PAIR = constant_pair()


class Leaking:
    """Asks for three drafts at first; then for one after a round that drafted fewer than three, else for none."""

    limit = 3

    def __init__(self) -> None:
        self.length = 3

    def lengths(self, offers: Any) -> list[int]:
        return [self.length] * len(offers)

    def observe(self, feedback: Any) -> None:
        self.length = int(max(feedback.drafted) < 3)


def test_the_pair_is_what_it_is_called() -> None:
    ids = torch.randint(0, 2, (3, 5))
    torch.testing.assert_close(probabilities(PAIR.target(ids).logits, WARM), P.expand(3, 5, 2))
    out = PAIR.draft.body(inputs_embeds=PAIR.draft.inputs(ids, torch.randn(3, 5, SIZE)))
    torch.testing.assert_close(probabilities(out.logits, WARM), Q.expand(3, 5, 2))


def agree(runs: int, tokens: int, policy: Any, method: str = "speculative", **arguments: Any) -> Counter[str]:
    """Tests each token against P, over all `runs` texts and over those with an earlier refusal; counts origins."""
    out = generate(
        PAIR, PROMPT, method=method, n=runs, max_new_tokens=tokens, sampling=WARM, draft_length=policy,
        drafter="adaptive", **arguments,
    )  # fmt: skip
    origins: Counter[str] = Counter()
    for at in range(tokens):
        every = Counter(sequence.token_ids[at] for sequence in out.sequences)
        refused = Counter(s.token_ids[at] for s in out.sequences if "recovered" in s.origins[:at])
        for seen in (every, refused):
            if seen.total() > 100:
                expected = [seen.total() * float(chance) for chance in P]
                pvalue = stats.chisquare([seen[0], seen[1]], expected).pvalue
                assert pvalue > 1e-3, f"token {at}: {seen[0] / seen.total():.3f} are 0, of {seen.total()}"
    for sequence in out.sequences:
        origins.update(sequence.origins)
    return origins


@pytest.mark.parametrize("policy", [Leaking()], ids=["leaking"])
def test_quick(policy: Any) -> None:
    agree(1500, 5, policy)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [Leaking(), "bass", CostAware(COSTS), 3],
    ids=["leaking", "bass", "cost-aware", "fixed"],
)
def test_thorough(policy: Any) -> None:
    agree(6000, 8, policy)
