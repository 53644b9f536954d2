"""`logprobs` are those of transformers' forward, `sampled_logprobs` those of the distribution that we draw from.

Drafts change neither `logprobs` nor `sampled_logprobs`, whether they are chains, trees or those of AMUSD.
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
    """Return plain log-probabilities by transformers' forward, and those after shaping, token by token."""
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


CASES: dict[str, dict[str, Any]] = {
    "regular": {"method": "regular"},
    "speculative": {"method": "speculative", "draft_length": 4},
    "bass": {"method": "bass", "draft_length": 4},
    "amusd": {"method": "amusd", "draft_length": 4},
    "tree": {"method": "bass", "tree": (2, 2)},
}


@pytest.mark.parametrize("sampling", [SamplingParams(), SHAPED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("case", CASES)
def test_logprobs_are_the_targets_whichever_method_drafts(
    case: str, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
):
    draft_in_step(monkeypatch)
    output = generate(PAIR, ROWS, sampling=sampling, verification="coupled", **OPTIONS, **CASES[case])
    for row, sequence in zip(ROWS, output.sequences, strict=True):
        assert sequence.logprobs is not None and sequence.sampled_logprobs is not None
        plain, drawn = expected(row, sequence.token_ids, sampling)
        assert torch.allclose(torch.tensor(sequence.logprobs), plain, atol=1e-4)
        assert torch.allclose(torch.tensor(sequence.sampled_logprobs), drawn, atol=1e-3)
    assert output.metrics.acceptance_rate or case == "regular"


def test_a_stream_gives_logprobs_per_round_and_none_after_the_end():
    uncut = generate(PAIR, ROWS[:1], method="regular", **OPTIONS).sequences[0]
    options: Any = OPTIONS | {"eos_token_id": uncut.token_ids[9], "method": "bass", "draft_length": 4}
    cut = generate(PAIR, ROWS[:1], **options).sequences[0]
    rounds = [row for round_ in stream(PAIR, ROWS[:1], **options) for row in round_.rows]
    assert len(cut.logprobs or []) == len(cut.token_ids) == sum(len(row.tokens) for row in rounds) <= 10
    assert [logprob for row in rounds for logprob in row.logprobs or []] == cut.logprobs
    assert generate(PAIR, ROWS[:1], max_new_tokens=2).sequences[0].logprobs is None


def test_the_outside_lane_refuses_logprobs():
    with pytest.raises(RequestError, match="gives no log-probabilities"):
        generate(PAIR, ROWS[:1], method="transformers", logprobs=True)
