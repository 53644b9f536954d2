"""Log-probabilities of what was written are the target's, whoever drafted.

Contract: the plain ones are those of transformers' own forward over prompt and text; the sampled ones are the
logarithms of the p that was drawn from. Both are the same with and without drafts, in chains, trees and AMUSD.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bass_core import RequestError, SamplingParams, generate, stream
from bass_core.sample.distribution import probabilities
from bass_core.sample.shaping import shaped
from bass_core.sequence import Sequence
from tests.support.models import prompts, tiny_pair
from tests.support.schedule import draft_in_step

PAIR = tiny_pair()
TARGET = PAIR.target
ROWS = prompts(3)
SHAPED = SamplingParams(0.9, top_k=20, min_p=0.02, repetition_penalty=1.2, frequency_penalty=0.3)
OPTIONS: Any = {"max_new_tokens": 20, "eos_token_id": None, "logprobs": True}


def expected(row: list[int], text: list[int], sampling: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """By transformers' forward over the whole text, and token by token."""
    with torch.inference_mode():
        logits = TARGET(torch.tensor([[*row, *text]])).logits[0, len(row) - 1 : -1]
    plain = logits.log_softmax(-1)[range(len(text)), text]
    drawn = []
    for at, token in enumerate(text):
        before = Sequence(0, 0, row, len(text) + 1, frozenset())
        before.write(text[:at], ["sampled"] * at)
        drawn.append(
            probabilities(shaped(logits[None, at : at + 1], sampling, [before]), sampling)[0, 0, token].log()
        )
    return plain, torch.stack(drawn)


WAYS: dict[str, dict[str, Any]] = {
    "regular": {"method": "regular"},
    "speculative": {"method": "speculative", "draft_length": 4},
    "bass": {"method": "bass", "draft_length": 4},
    "amusd": {"method": "amusd", "draft_length": 4},
    "tree": {"method": "bass", "tree": (2, 2)},
}


@pytest.mark.parametrize("sampling", [SamplingParams(), SHAPED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("way", WAYS)
def test_they_are_the_target_s_whoever_drafted(
    way: str, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
):
    draft_in_step(monkeypatch)
    out = generate(PAIR, ROWS, sampling=sampling, verification="coupled", **OPTIONS, **WAYS[way])
    for row, one in zip(ROWS, out.sequences, strict=True):
        assert one.logprobs is not None and one.sampled_logprobs is not None
        plain, drawn = expected(row, one.token_ids, sampling)
        assert torch.allclose(torch.tensor(one.logprobs), plain, atol=1e-4)
        assert torch.allclose(torch.tensor(one.sampled_logprobs), drawn, atol=1e-3)
    assert out.metrics.acceptance_rate or way == "regular"


def test_a_stream_has_them_by_round_and_an_end_cuts_them():
    free = generate(PAIR, ROWS[:1], method="regular", **OPTIONS).sequences[0]
    ends: Any = OPTIONS | {"eos_token_id": free.token_ids[9], "method": "bass", "draft_length": 4}
    cut = generate(PAIR, ROWS[:1], **ends).sequences[0]
    rounds = [row for round_ in stream(PAIR, ROWS[:1], **ends) for row in round_.rows]
    assert len(cut.logprobs or []) == len(cut.token_ids) == sum(len(row.tokens) for row in rounds) <= 10
    assert [one for row in rounds for one in row.logprobs or []] == cut.logprobs
    assert generate(PAIR, ROWS[:1], max_new_tokens=2).sequences[0].logprobs is None


def test_the_outside_lane_has_none():
    with pytest.raises(RequestError, match="gives no log-probabilities"):
        generate(PAIR, ROWS[:1], method="transformers", logprobs=True)
