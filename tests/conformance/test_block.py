"""Text sampled under block verification has the target's distribution, with drafts that say the opposite.

Contract: target and head of test_stopping.py, which give the same p and q at every position, so that each token is
tested on its own, also behind a refusal: block verification reads the noise of drafts behind its own end, and the
next round must not meet it again. Lengths are fixed, or decided by earlier drafts. Seeds are fixed.
"""

from __future__ import annotations

from typing import Any

import pytest

from bass_core import ModelPair, SamplingParams, generate, stream
from bass_core.draft import registry
from bass_core.length.cost_aware import CostAware

from ..models import NEAR, perturbed, prompts, tiny
from .test_stopping import COSTS, Leaking, agree


@pytest.mark.parametrize("length", [2, 3])
def test_fixed_lengths(length: int) -> None:
    origins = agree(6000, 7, length, method="bass", verification="block")
    assert min(origins["accepted"], origins["recovered"], origins["bonus"]) > 1000


@pytest.mark.parametrize("confidence", [0.2, 0.3])
def test_a_head_that_stops_by_itself(confidence: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind an unlikely token, and where it is unsure: some rows then draft less than others."""
    monkeypatch.setattr(registry, "CONFIDENCE", confidence)
    monkeypatch.setattr("bass_core.draft.head.HEADROOM", 1.0)
    origins = agree(6000, 7, 3, method="bass", verification="block")
    assert min(origins["accepted"], origins["recovered"], origins["bonus"]) > 1000


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Leaking(), "bass", CostAware(COSTS)], ids=["leaking", "bass", "cost"])
def test_lengths_that_earlier_drafts_decide(policy: Any) -> None:
    agree(3000, 7, policy, verification="block")


def test_more_drafts_stand_than_one_by_one() -> None:
    """On the decoder, with the same drafts: rounds say how many the other rule would have accepted."""
    target = tiny("llama")
    pair = ModelPair(target, perturbed(target, NEAR["llama"]))
    sampling = SamplingParams(1.0)
    rounds = stream(
        pair, prompts(16), draft_length=6, sampling=sampling, max_new_tokens=60, drafter="model", eos_token_id=None
    )
    rows = [row for round_ in rounds for row in round_.rows if row.drafted]
    saved = [row.accepted - row.one_by_one for row in rows]
    assert sum(saved) > 0 and min(saved) < 0, "each rule wins some rounds"
    assert sum(row.saved for row in rows) == sum(max(0, n) for n in saved)
    for row in rows:
        last = max((i for i, (u, h) in enumerate(zip(row.u, row.chance, strict=True), 1) if u < h), default=0)
        assert row.accepted == last


def test_auto_is_block_for_chains_and_the_rules_differ() -> None:
    target = tiny("llama")
    pair = ModelPair(target, perturbed(target, NEAR["llama"]))

    def texts(**ways: Any) -> list[list[int]]:
        out = generate(pair, prompts(6), draft_length=5, max_new_tokens=40, sampling=SamplingParams(1.0), **ways)
        return [sequence.token_ids for sequence in out.sequences]

    block = texts(verification="block")
    assert texts() == texts(verification="auto") == block
    assert texts(verification="chen") == texts(verification="rejection") != block
