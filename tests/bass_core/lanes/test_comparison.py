"""For rows that differ from regular decoding: the first position that differs, and p of both tokens there."""

from __future__ import annotations

import json
import math
from importlib import import_module
from typing import Any

import pytest
import torch

import bass_core.lanes.comparison as comparison_module
from bass_core import ModelPair, SamplingParams, generate, race
from bass_core.lanes.lane import Lane
from bass_core.sample.distribution import probabilities
from bass_core.sample.draw import draw
from bass_core.sample.noise import Role, exponentials
from tests.support.models import byte_tokenizer, prompts, tiny_pair

race_module = import_module("bass_core.lanes.race")  # the package binds this name to the function
PAIR = tiny_pair(tokenizer=byte_tokenizer())
TARGET = PAIR.target
ROWS = prompts(3)
SAMPLED = SamplingParams(temperature=3.0)
KEYS = {"at", "ours", "theirs", "p_ours", "p_theirs", "tie"}


def last_snapshot(**arguments: Any) -> dict[str, Any]:
    """Return the last snapshot of a race, passed through JSON as a client would get it."""
    arguments = {"max_new_tokens": 12, "draft_length": 3} | arguments
    *_, shot = race(PAIR, ROWS, **arguments)
    return dict(json.loads(json.dumps(shot, allow_nan=False)))


@pytest.fixture(params=[((1, 5), (2, 0))])
def altered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change tokens that the bass lane wrote, at the given (sequence, index) pairs."""

    class AlteredLane(Lane):
        def _release(self) -> None:
            super()._release()
            if self.method == "bass":
                for row, at in request.param:
                    ids = self.sequences[row].token_ids
                    ids[at] = (ids[at] + 1) % PAIR.vocab

    monkeypatch.setattr(race_module, "Lane", AlteredLane)


def expected(row: int, at: int, tokens: list[int], sampling: SamplingParams, seed: int) -> list[float]:
    """Return both tokens' probabilities and the ratio of their scores, computed from transformers' own forward."""
    regular = generate(
        PAIR, ROWS, method="regular", max_new_tokens=12, sampling=sampling, seed=seed, verification="coupled"
    )
    text = [*ROWS[row], *regular.sequences[row].token_ids[:at]]
    with torch.inference_mode():
        logits = TARGET(torch.tensor([text])).logits[0, -1]
    if sampling.greedy:
        p = torch.softmax(logits, -1)[tokens]
        scores = p
    else:
        p = probabilities(logits, sampling)[tokens]
        # `draw` gives each token a score; between these two it takes the token with the larger score.
        at_, id_, role = torch.tensor([len(text)]), torch.tensor([row]), torch.tensor([int(Role.TARGET)])
        scores = p / exponentials(seed, id_, at_, role, torch.tensor(tokens))[0]
        assert draw(p[None], seed, id_, at_, role, torch.tensor(tokens)).item() == int(scores.argmax())
    return [*p.tolist(), float(scores.min() / scores.max())]


def test_rows_that_agree_are_none_in_the_last_snapshot_only() -> None:
    shots = list(race(PAIR, ROWS, max_new_tokens=12, draft_length=3))
    assert [shot for shot in shots[:-1] if "comparison" in shot] == []
    assert shots[-1]["comparison"] == {"speculative": [None] * 3, "bass": [None] * 3}


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "coupled"])
def test_a_row_that_differs_has_its_position_tokens_and_probabilities(
    altered: None, sampling: SamplingParams
) -> None:
    shot = last_snapshot(sampling=sampling, verification="coupled", seed=4)
    assert shot["comparison"]["speculative"] == [None] * 3
    none, second, third = shot["comparison"]["bass"]
    assert none is None
    for row, at, difference in ((1, 5, second), (2, 0, third)):
        theirs = shot["lanes"]["regular"]["sequences"][row]["token_ids"][at]
        assert set(difference) == KEYS
        assert (difference["at"], difference["ours"], difference["theirs"]) == (
            at,
            (theirs + 1) % PAIR.vocab,
            theirs,
        )
        probabilities_and_tie = expected(row, at, [difference["ours"], theirs], sampling, seed=4)
        assert [difference[key] for key in ("p_ours", "p_theirs", "tie")] == pytest.approx(
            probabilities_and_tie, rel=1e-3, abs=0
        )
        # Regular decoding took the token with the larger score.
        assert 0 <= difference["tie"] < 1 and not math.isclose(difference["p_ours"], difference["p_theirs"])


def test_texts_that_need_not_agree_are_not_compared() -> None:
    """Texts need not agree under the rejection rule or with synthetic acceptance.

    Without regular decoding, or with no other lane, there is nothing to compare.
    """
    cases: list[dict[str, Any]] = [
        {"sampling": SAMPLED},
        {"lanes": ("speculative", "bass")},
        {"lanes": ("regular",)},
        {"synthetic_acceptance": 0.5},
    ]
    assert not any("comparison" in last_snapshot(**arguments) for arguments in cases)


@pytest.mark.parametrize(("limit", "value"), [("MAX_FORWARDS", 1), ("MAX_TOKENS", {"cpu": 16})])
def test_forwards_are_bounded_in_number_and_length(
    altered: None, monkeypatch: pytest.MonkeyPatch, limit: str, value: Any
) -> None:
    monkeypatch.setattr(comparison_module, limit, value)
    lengths: list[int] = []
    real = comparison_module.next_logits

    def counted(pair: ModelPair, text: list[int], backend: str) -> torch.Tensor:
        lengths.append(len(text))
        return real(pair, text, backend)

    monkeypatch.setattr(comparison_module, "next_logits", counted)
    _, second, third = last_snapshot()["comparison"]["bass"]
    assert [difference["at"] for difference in (second, third)] == [5, 0]
    assert lengths == [len(ROWS[1]) + 5] == [15]
    assert second["tie"] is not None and third["tie"] is None


@pytest.mark.parametrize("altered", [((0, 3), (1, 3), (2, 4))], indirect=True)
def test_equal_texts_share_a_forward_and_a_failure_loses_only_probabilities(
    altered: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []

    def failing(pair: ModelPair, text: list[int], backend: str) -> torch.Tensor:
        lengths.append(len(text))
        raise RuntimeError("out of memory")

    monkeypatch.setattr(comparison_module, "next_logits", failing)
    *_, shot = race(PAIR, ROWS[0], n=3, max_new_tokens=12, draft_length=3)
    differences = shot["comparison"]["bass"]
    assert [difference["at"] for difference in differences] == [3, 3, 4] and [
        difference["p_ours"] for difference in differences
    ] == [None] * 3
    assert lengths == [len(ROWS[0]) + 3, len(ROWS[0]) + 4]


def test_a_lane_that_ended_early_is_compared_up_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class ShortLane(Lane):
        def step(self) -> Any:
            round_ = super().step()
            if self.method == "bass" and len(self.trace.records) == 2:
                self.end("budget")
            return round_

    monkeypatch.setattr(race_module, "Lane", ShortLane)
    shot = last_snapshot()
    bass = shot["lanes"]["bass"]["sequences"]
    assert {sequence["finish_reason"] for sequence in bass} == {"budget"} and len(bass[0]["token_ids"]) < 12
    assert shot["comparison"]["bass"] == [None] * 3
