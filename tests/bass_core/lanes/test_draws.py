"""Draws of one token: both decoders follow p, and a broken verification would be seen."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from scipy import stats

from bass_core import Options, RequestError, SamplingParams, draws, generate
from bass_core.lanes import draws as module
from bass_core.sample.distribution import dense, probabilities
from tests.support.models import prompts, tiny_pair

PAIR = tiny_pair()
OPTIONS = Options(n=2, sampling=SamplingParams(0.9), drafter="model", seed=3)
PROMPTS = prompts(2)


def drawn(**changed: Any) -> Any:
    tokens = changed.pop("tokens", text(1)[:4])
    options = Options(**{**vars(OPTIONS), **changed.pop("options", {})})
    return draws(PAIR, PROMPTS, row=1, tokens=tokens, options=options, **changed)


def text(row: int) -> list[int]:
    out = generate(PAIR, PROMPTS, method="regular", options=Options(**{**vars(OPTIONS), "eos_token_id": None}))
    return out.sequences[row].token_ids


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_both_decoders_follow_the_targets_distribution(rule: str) -> None:
    result = drawn(options={"verification": rule})
    before = [*PROMPTS[1], *text(1)[:4]]
    with torch.inference_mode():
        p, q = (
            probabilities(model(torch.tensor([before])).logits[:, -1], OPTIONS.sampling)[0]
            for model in (PAIR.target, PAIR.draft)
        )
    listed = result["tokens"][:-1]
    for entry in listed:
        assert entry["p"] == pytest.approx(float(p[entry["token"]]), rel=1e-4)
        assert entry["q"] == pytest.approx(float(q[entry["token"]]), rel=1e-4)
    assert sum(entry["p"] for entry in result["tokens"]) == pytest.approx(1, abs=1e-6)
    for name in ("plain", "speculated"):
        assert sum(entry[name] for entry in result["tokens"]) == result["count"] == 1000
        assert result[name]["chance"] > 0.001 and result[name]["cells"] > 3
    # Both lists differ, because the decoders use different random numbers.
    assert [entry["plain"] for entry in listed] != [entry["speculated"] for entry in listed]
    assert 0 < result["accepted"] < 1000
    assert result["accepted"] / 1000 == pytest.approx(float(torch.minimum(p, q).sum()), abs=0.06)


def test_draws_from_q_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """If every draft were accepted, the draws would follow q, and their fit to p would be bad."""

    def accept_all(request: Any, proposal: Any, logits: Any, keys: Any) -> Any:
        q = dense(proposal.probs)[0, 0]
        for token in torch.multinomial(q, len(keys.sequence_ids), replacement=True).tolist():
            yield token, True

    monkeypatch.setattr(module, "_speculate", accept_all)
    result = drawn()
    assert result["speculated"]["chance"] < 1e-6 < result["plain"]["chance"]


def test_the_fit_is_that_of_scipy() -> None:
    p = torch.tensor([0.5, 0.3, 0.1, 0.096, 0.003, 0.001], dtype=torch.float64)
    counts = Counter({0: 520, 1: 290, 2: 95, 3: 90, 4: 3, 5: 2})
    result = module.fit(counts, p)
    expected = stats.chisquare([520, 290, 95, 95], [500, 300, 100, 100])
    assert result["cells"] == 4
    assert (result["statistic"], result["chance"]) == pytest.approx((expected.statistic, expected.pvalue))


@pytest.mark.parametrize(
    "changed",
    [
        {"options": {"sampling": SamplingParams(0.0)}},
        {"options": {"verification": "coupled"}},
        {"tokens": []},
    ],
)
def test_other_texts_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        drawn(**changed)
