"""Sampled text has the target's distribution, whatever the draft.

With a vocabulary of 5 and seven new tokens, the joint distribution is enumerated exactly. Chi-squared tests of
tokens 1-3 and of tokens 5-7 (the second round and later) must give p > 0.001, and no token of probability 0 may
occur. Seeds are fixed, so results repeat, except under AMUSD, where timing decides which noise a position uses.
For AMUSD, p > 0.00001 is enough, and more than a tenth of the tokens must have been verified. test_enumeration.py
covers length policies and drafters that stop by themselves.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from bass_core import METHODS, ModelPair, SamplingParams, generate
from bass_core.draft import registry as drafting
from bass_core.draft.window import WindowDrafter
from bass_core.model.forward import ForwardBatch, ForwardOutput
from bass_core.sample.distribution import probabilities
from bass_core.sequence import WindowWork
from tests.support.models import small_window, tiny, tiny_eagle, tiny_head

VOCAB, TOKENS, PROMPT = 5, 7, [1, 2, 3]
# Rows per batch. In such a large batch, a row takes a tenth of the time that it takes in a batch of 64.
BATCH = 2048
# AMUSD handles rows one by one, so its draft would not keep up with a larger batch.
BATCH_OF = {"amusd": 256}
PLAIN = SamplingParams(1.0)


def model(seed: int) -> Any:
    return tiny(
        "llama", seed, layers=1, scale=8, vocab_size=VOCAB, hidden_size=32, intermediate_size=32,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip


TARGET = model(0)


@cache
def pair(draft: str) -> ModelPair:
    """Return the target with a draft that differs, agrees, reverses p, inverts p, or knows only three tokens."""
    builders = {
        "other": lambda: model(1),
        "same": lambda: TARGET,
        "reduced": lambda: tiny_head(TARGET, reads_layers=(0,), size=3),
        "eagle": lambda: tiny_eagle(TARGET, reads_layers=(0,), size=3),
    }
    return ModelPair(TARGET, builders[draft]() if draft in builders else changed_head(draft))


def changed_head(draft: str) -> Any:
    """Return a draft with q(i) = p(last - i) ("reversed") or q proportional to 1 / p ("opposite")."""
    draft_model = copy.deepcopy(TARGET)
    weight = draft_model.lm_head.weight
    weight.copy_({"reversed": weight.flip(0), "opposite": -weight}[draft].clone())
    return draft_model


@cache
def enumerated(params: SamplingParams) -> np.ndarray:
    joint = torch.ones(1, dtype=torch.float64)
    contexts = torch.tensor([PROMPT])
    for _ in range(TOKENS):
        step = probabilities(TARGET(contexts).logits[:, -1], params).double()
        joint = (joint[:, None] * step).flatten()
        contexts = torch.cat(
            (contexts.repeat_interleave(VOCAB, 0), torch.arange(VOCAB).repeat(len(contexts))[:, None]), 1
        )
    return joint.numpy().reshape([VOCAB] * TOKENS)


@dataclass(frozen=True)
class Case:
    """A method, a draft and sampling parameters to test, with that many rows.

    `other` holds further arguments of generate().
    """

    method: str = "bass"
    draft: str = "other"
    params: SamplingParams = PLAIN
    rows: int = 3 * BATCH
    other: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        filters = f"{self.params.temperature}-{self.params.top_k}-{self.params.top_p}"
        ways = [str(value).replace(", ", "_") for value in self.other.values()]
        return "-".join([self.method, self.draft, filters, *ways])

    def counts(self) -> tuple[np.ndarray, Counter[str]]:
        """Generate all rows, each with a different sequence id; return the counts of texts and of origins."""
        counts = np.zeros([VOCAB] * TOKENS, dtype=int)
        origins: Counter[str] = Counter()
        batch = BATCH_OF.get(self.method, BATCH)
        for start in range(0, self.rows, batch):
            n = min(batch, self.rows - start)
            arguments = {"draft_length": 3, "max_new_tokens": TOKENS, "sampling": self.params} | self.other
            ids = range(start, start + n)
            out = generate(pair(self.draft), PROMPT, method=self.method, n=n, sequence_ids=ids, **arguments)
            for sequence in out.sequences:
                counts[tuple(sequence.token_ids)] += 1
                origins.update(sequence.origins)
        return counts, origins


def compare(case: Case) -> Counter[str]:
    """Compare the texts with the enumeration; return the number of tokens of each origin."""
    counts, origins = case.counts()
    joint = enumerated(case.params)
    assert counts.sum() == case.rows
    assert counts[joint == 0].sum() == 0, "a token of probability 0 was written"
    for name, summed in (("1-3", (3, 4, 5, 6)), ("5-7", (0, 1, 2, 3))):
        pvalue = chi_squared(counts.sum(summed).ravel(), joint.sum(summed).ravel())
        assert pvalue > (1e-5 if METHODS[case.method].overlaps else 1e-3), f"tokens {name}: p = {pvalue:.2g}"
    return origins


def chi_squared(counts: np.ndarray, chances: np.ndarray) -> float:
    expected = chances * counts.sum()
    large = expected >= 5
    counts = np.append(counts[large], counts[~large].sum())
    expected = np.append(expected[large], expected[~large].sum())
    # The rare texts form one cell. If it's too small by itself, join it with the cell before it.
    if expected[-1] < 5:
        counts = np.append(counts[:-2], counts[-2:].sum())
        expected = np.append(expected[:-2], expected[-2:].sum())
    return float(stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue)


def test_the_drafts_match_their_names() -> None:
    contexts = torch.randint(0, VOCAB, (400, 5), generator=torch.Generator().manual_seed(0))

    def distribution(model: Any) -> torch.Tensor:
        return probabilities(model(contexts).logits[:, -1], PLAIN)

    p = distribution(TARGET)
    distance = {
        name: float((p - distribution(pair(name).draft)).abs().sum(-1).mean() / 2)
        for name in ("other", "opposite")
    }
    assert 0.3 < distance["other"] < 0.6 and distance["opposite"] > 0.3
    torch.testing.assert_close(distribution(pair("reversed").draft), p.flip(-1))
    opposite = 1 / p
    torch.testing.assert_close(distribution(pair("opposite").draft), opposite / opposite.sum(-1, keepdim=True))
    assert len(pair("reduced").draft.vocabulary) == 3


REJECTION = {"verification": "rejection"}


def trees(
    draft: str, params: SamplingParams = PLAIN, rows: int = BATCH, shape: Any = (2, 1), **other: Any
) -> Case:
    return Case("bass", draft, params, rows, {"draft_length": "auto", "tree": shape} | other)


QUICK = [
    Case(other=REJECTION),
    Case(draft="reduced", params=SamplingParams(1.0, top_k=3)),
    Case(method="amusd", rows=BATCH),
    trees("opposite"),
]
SLOW = [
    *(Case(method="amusd", draft=draft, rows=BATCH) for draft in ("same", "reversed", "reduced", "eagle")),
    Case(method="amusd", params=SamplingParams(0.8, 4, 0.9), rows=BATCH),
    Case(method="amusd", draft="reversed", rows=BATCH, other=REJECTION),
    Case(method="regular"),
    Case(method="transformers", params=SamplingParams(0.8, 4, 0.9), rows=BATCH),  # another batch would be equal
    *(Case(draft=draft) for draft in ("same", "reversed", "opposite", "reduced", "eagle")),
    *(Case(draft=draft, other=REJECTION) for draft in ("opposite", "reduced")),
    Case(params=SamplingParams(1.4, 4, 0.9), other={"draft_length": 6}),
    Case(params=SamplingParams(1.0, top_p=0.8), other={"draft_length": "bass"}),
    *(Case(draft=draft, other={"drafter": "adaptive"}) for draft in ("reduced", "other")),
    Case(other={"drafter": "window"}),
    Case(other={"drafter": "window_model", "draft_length": 5}),
    Case(draft="opposite", params=SamplingParams(0.7), other={"drafter": "window_model"}),
    Case(draft="reduced", other={"drafter": "window_model", "draft_length": 5}),
    Case(other={"drafter": "prompt_lookup"}),
    *(trees(draft, rows=2 * BATCH) for draft in ("other", "same")),
    trees("reversed", SamplingParams(1.0, top_p=0.9), shape=(3,)),
    trees("opposite", SamplingParams(1.4, 4, 0.9), rows=2 * BATCH, shape=(3, 2, 1)),
    trees("reduced", drafter="adaptive"),
    trees("other", verification="coupled"),
    Case(other={"verification": "coupled"}),
    Case(other={"attention": "split", "draft_length": 2}, rows=BATCH),
]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_texts_have_the_distribution(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_more_texts_have_the_distribution(case: Case) -> None:
    check(case)


class Reversed(WindowDrafter):
    """A windowed target whose distribution differs much from the target's: p_w(i) = p(last - i)."""

    def forward(self, fed: ForwardBatch, work: WindowWork) -> ForwardOutput:
        output = super().forward(fed, work)
        return ForwardOutput(output.logits.flip(-1), output.states)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["window", "window_model"])
def test_both_verifications_of_a_windowed_draft_use_separate_noise(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If they shared noise, the verdicts of the windowed target would bias those of the target."""
    monkeypatch.setattr(drafting, "WindowDrafter", Reversed)
    check(Case(other={"drafter": drafter, "draft_length": 4}))


def check(case: Case) -> None:
    origins = compare(case)
    if not METHODS[case.method].drafts or case.other.get("draft_length") == 0:
        assert set(origins) == {"sampled"}
    elif case.draft == "same":
        assert set(origins) - {"bonus"} == {"sampled", "accepted"}
        assert "bonus" in origins or case.method == "amusd"  # in AMUSD a late draft may replace the bonus token
    else:
        assert set(origins) >= {"sampled", "accepted", "recovered"}
    if case.method == "amusd":
        assert origins["accepted"] + origins["recovered"] > origins.total() / 10, "too few tokens met a draft"


@pytest.fixture(autouse=True)
def tiny_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let windowed drafts see only the first token and the last two, from the first round on."""
    small_window(monkeypatch, sinks=1, unit=1, window=1)
