"""Rows that differ from regular decoding's: the first position that differs, and the target's p of both tokens."""

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
WARM = SamplingParams(temperature=3.0)
KEYS = {"at", "ours", "theirs", "p_ours", "p_theirs", "tie"}


def last(**arguments: Any) -> dict[str, Any]:
    """The last snapshot of a race, passed through JSON as a client would get it."""
    arguments = {"max_new_tokens": 12, "draft_length": 3} | arguments
    *_, shot = race(PAIR, ROWS, **arguments)
    return dict(json.loads(json.dumps(shot, allow_nan=False)))


@pytest.fixture(params=[((1, 5), (2, 0))])
def altered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes tokens that the bass lane wrote, at the given (sequence, index) pairs."""

    class Altered(Lane):
        def _release(self) -> None:
            super()._release()
            if self.method == "bass":
                for row, at in request.param:
                    ids = self.sequences[row].token_ids
                    ids[at] = (ids[at] + 1) % PAIR.vocab

    monkeypatch.setattr(race_module, "Lane", Altered)


def expected(row: int, at: int, tokens: list[int], sampling: SamplingParams, seed: int) -> list[float]:
    """The probabilities of both tokens and the tie ratio, from transformers' own forward."""
    written = generate(
        PAIR, ROWS, method="regular", max_new_tokens=12, sampling=sampling, seed=seed, verification="coupled"
    )
    text = [*ROWS[row], *written.sequences[row].token_ids[:at]]
    with torch.inference_mode():
        logits = TARGET(torch.tensor([text])).logits[0, -1]
    if sampling.greedy:
        p = torch.softmax(logits, -1)[tokens]
        scores = p
    else:
        p = probabilities(logits, sampling)[tokens]
        # A draw between these two tokens takes the one with the larger score; the scores are those of `draw`.
        at_, id_, role = torch.tensor([len(text)]), torch.tensor([row]), torch.tensor([int(Role.TARGET)])
        scores = p / exponentials(seed, id_, at_, role, torch.tensor(tokens))[0]
        assert draw(p[None], seed, id_, at_, role, torch.tensor(tokens)).item() == int(scores.argmax())
    return [*p.tolist(), float(scores.min() / scores.max())]


def test_rows_that_agree_are_none_and_the_last_snapshot_alone_says_so() -> None:
    shots = list(race(PAIR, ROWS, max_new_tokens=12, draft_length=3))
    assert [shot for shot in shots[:-1] if "comparison" in shot] == []
    assert shots[-1]["comparison"] == {"speculative": [None] * 3, "bass": [None] * 3}


@pytest.mark.parametrize("sampling", [SamplingParams(), WARM], ids=["greedy", "coupled"])
def test_a_row_that_differs_has_its_place_both_tokens_and_both_probabilities(
    altered: None, sampling: SamplingParams
) -> None:
    shot = last(sampling=sampling, verification="coupled", seed=4)
    assert shot["comparison"]["speculative"] == [None] * 3
    none, second, third = shot["comparison"]["bass"]
    assert none is None
    for row, at, found in ((1, 5, second), (2, 0, third)):
        theirs = shot["lanes"]["regular"]["sequences"][row]["token_ids"][at]
        assert set(found) == KEYS
        assert (found["at"], found["ours"], found["theirs"]) == (at, (theirs + 1) % PAIR.vocab, theirs)
        wanted = expected(row, at, [found["ours"], theirs], sampling, seed=4)
        assert [found[key] for key in ("p_ours", "p_theirs", "tie")] == pytest.approx(wanted, rel=1e-3, abs=0)
        # Regular decoding took the token with the larger score.
        assert 0 <= found["tie"] < 1 and not math.isclose(found["p_ours"], found["p_theirs"])


def test_nothing_is_claimed_where_the_texts_need_not_agree() -> None:
    """Under the rejection rule, without regular decoding or with it alone, and of synthetic acceptance."""
    asked: list[dict[str, Any]] = [
        {"sampling": WARM},
        {"lanes": ("speculative", "bass")},
        {"lanes": ("regular",)},
        {"synthetic_acceptance": 0.5},
    ]
    assert not any("comparison" in last(**arguments) for arguments in asked)


@pytest.mark.parametrize(("limit", "value"), [("MOST_FORWARDS", 1), ("MOST_TOKENS", {"cpu": 16})])
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
    _, second, third = last()["comparison"]["bass"]
    assert [found["at"] for found in (second, third)] == [5, 0]
    assert lengths == [len(ROWS[1]) + 5] == [15]
    assert second["tie"] is not None and third["tie"] is None


@pytest.mark.parametrize("altered", [((0, 3), (1, 3), (2, 4))], indirect=True)
def test_equal_texts_are_computed_once_and_a_failure_costs_the_numbers_alone(
    altered: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []

    def failing(pair: ModelPair, text: list[int], backend: str) -> torch.Tensor:
        lengths.append(len(text))
        raise RuntimeError("out of memory")

    monkeypatch.setattr(comparison_module, "next_logits", failing)
    *_, shot = race(PAIR, ROWS[0], n=3, max_new_tokens=12, draft_length=3)
    found = shot["comparison"]["bass"]
    assert [one["at"] for one in found] == [3, 3, 4] and [one["p_ours"] for one in found] == [None] * 3
    assert lengths == [len(ROWS[0]) + 3, len(ROWS[0]) + 4]


def test_a_lane_that_ended_early_is_compared_as_far_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(Lane):
        def step(self) -> Any:
            done = super().step()
            if self.method == "bass" and len(self.trace.records) == 2:
                self.end("budget")
            return done

    monkeypatch.setattr(race_module, "Lane", Short)
    shot = last()
    bass = shot["lanes"]["bass"]["sequences"]
    assert {one["finish_reason"] for one in bass} == {"budget"} and len(bass[0]["token_ids"]) < 12
    assert shot["comparison"]["bass"] == [None] * 3
