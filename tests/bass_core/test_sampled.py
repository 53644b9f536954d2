"""Sampled text has the target's distribution, whatever the draft.

Contract: a vocabulary of 8, a target and a draft that differ by a total variation of about 0.4, and the joint
distribution of five new tokens against exact enumeration: chi-squared of tokens 1-3 and of tokens 3-5, p > 0.001,
and not one token of probability 0. Seeds are fixed, so a result never changes.
"""

from functools import cache

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM

from bass_core import ModelPair, SamplingParams, generate
from bass_core.drafters import Proposal
from bass_core.sampling import probabilities

VOCAB, TOKENS, PROMPT = 8, 5, [1, 2, 3]
PLAIN = SamplingParams(1.0)
FILTERS = [SamplingParams(0.7), SamplingParams(1.0, top_k=4), SamplingParams(1.0, top_p=0.8)]


def model(seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    made = LlamaForCausalLM(config).eval().requires_grad_(False)
    for parameter in made.parameters():
        if parameter.dim() > 1:
            parameter.mul_(8)
    return made


TARGET, DRAFT = model(0), model(1)
PAIR = ModelPair(TARGET, DRAFT)


class Stubborn:
    """Always proposes the same token: a point mass, often of probability 0 under the target."""

    calls = 0

    def start(self, rows):
        return None

    def propose(self, rows, caps, keys):
        return Proposal(torch.full((len(rows), max(caps)), 3), caps)

    def settle(self, rows, proposal, accepted):
        pass

    def move_row(self, source, target):
        pass


@cache
def enumerated(params):
    """The probability of each of the 8^5 texts under the target, float64."""
    joint = torch.ones(1, dtype=torch.float64)
    contexts = torch.tensor([PROMPT])
    for _ in range(TOKENS):
        step = probabilities(TARGET(contexts).logits[:, -1], params).double()
        joint = (joint[:, None] * step).flatten()
        contexts = torch.cat(
            (contexts.repeat_interleave(VOCAB, 0), torch.arange(VOCAB).repeat(len(contexts))[:, None]), 1
        )
    return joint.numpy().reshape([VOCAB] * TOKENS)


def sample(batches, size, **arguments):
    """How often each row of the batch wrote each text, [size] + [8] * 5; and the origins seen."""
    counts = np.zeros([size] + [VOCAB] * TOKENS, dtype=int)
    origins = set()
    for seed in range(batches):
        out = generate(PAIR, PROMPT, n=size, max_new_tokens=TOKENS, seed=seed, **arguments)
        for row, sequence in enumerate(out.sequences):
            counts[(row, *sequence.token_ids)] += 1
            origins.update(sequence.origins)
    return counts, origins


def agrees(counts, params):
    joint = enumerated(params)
    assert counts[joint == 0].sum() == 0, "a token of probability 0 was written"
    for kept, summed in (("1-3", (3, 4)), ("3-5", (0, 1))):
        pvalue = chi_squared(counts.sum(summed).ravel(), joint.sum(summed).ravel())
        assert pvalue > 1e-3, f"tokens {kept}: p = {pvalue:.2g}"


def chi_squared(seen, chances):
    expected = chances * seen.sum()
    large = expected >= 5
    seen = np.append(seen[large], seen[~large].sum())
    expected = np.append(expected[large], expected[~large].sum())
    # A pool too thin to test on its own joins the last cell.
    if expected[-1] < 5:
        seen = np.append(seen[:-2], seen[-2:].sum())
        expected = np.append(expected[:-2], expected[-2:].sum())
    return stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue


def test_target_and_draft_really_differ():
    contexts = torch.randint(0, VOCAB, (400, 5), generator=torch.Generator().manual_seed(0))
    p, q = (probabilities(m(contexts).logits[:, -1], PLAIN) for m in (TARGET, DRAFT))
    assert 0.3 < float((p - q).abs().sum(-1).mean() / 2) < 0.5


@pytest.mark.parametrize("length", [1, 3])
def test_bass(length):
    counts, origins = sample(100, 64, sampling=PLAIN, draft_length=length)
    agrees(counts.sum(0), PLAIN)
    assert origins == {"sampled", "accepted", "recovered", "bonus"}


@pytest.mark.parametrize("params", FILTERS)
def test_filtered(params):
    counts, _ = sample(60, 64, sampling=params, draft_length=3)
    agrees(counts.sum(0), params)


@pytest.mark.parametrize(
    "arguments",
    [
        {"method": "regular"},
        {"draft_length": 3, "drafter": Stubborn()},
        {"draft_length": 3, "verification": "coupled"},
        {"draft_length": "bass"},
    ],
)
def test_other_ways(arguments):
    counts, _ = sample(60, 64, sampling=PLAIN, **arguments)
    agrees(counts.sum(0), PLAIN)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("params", [PLAIN, *FILTERS])
def test_bass_20000_sequences(params, length):
    counts, origins = sample(313, 64, sampling=params, draft_length=length)
    agrees(counts.sum(0), params)
    assert origins == {"sampled", "accepted", "recovered", "bonus"}


@pytest.mark.slow
# Both lengths with each of the filters are above; here they alternate, a minute each.
@pytest.mark.parametrize(("params", "length"), zip([PLAIN, *FILTERS], [3, 1, 3, 1], strict=True))
def test_first_and_last_row_of_2000_batches(params, length):
    counts, _ = sample(2000, 8, sampling=params, draft_length=length)
    agrees(counts[0], params)
    agrees(counts[7], params)
