"""NaN from the target ends the lane with one sentence; NaN from the draft changes no text."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch

from bass_core import ModelError, ModelPair, SamplingParams, generate, race
from bass_core.sample.distribution import probabilities
from bass_core.verify import rejection as verify
from tests.support.memory import left_behind
from tests.support.models import prompts, reference, slow_but, tiny

TARGET = tiny("llama")
ROW = prompts(1)[0]
TEXT = reference(TARGET, ROW, 30)
METHODS = ("regular", "speculative", "bass")


def poisoned(tokens: list[int], value: float = float("nan")) -> Any:
    """Return a copy of the target whose logits become `value` once it has read one of the tokens."""
    model = copy.deepcopy(TARGET)
    with torch.no_grad():
        model.get_input_embeddings().weight[tokens] = value
    return model


FATAL = next(token for i, token in enumerate(TEXT) if i > 5 and token not in TEXT[:i] + ROW)
UNTIL = TEXT.index(FATAL) + 1


@pytest.mark.parametrize(("value", "temperature"), [(float("nan"), 0.8), (float("inf"), 0.0)])
@pytest.mark.parametrize("method", METHODS)
def test_a_target_with_nan_raises_a_model_error(method: str, value: float, temperature: float) -> None:
    pair = ModelPair(poisoned(TEXT[:30], value), TARGET)
    with pytest.raises(ModelError, match=r"NaN or infinite.*float32"):
        generate(
            pair,
            prompts(3) if temperature else ROW,
            method=method,
            max_new_tokens=200,
            sampling=SamplingParams(temperature),
        )


@pytest.mark.parametrize("value", [float("nan"), 0.0])
@pytest.mark.parametrize(
    ("verification", "where"),
    slow_but(
        [("block", "a plain step"), ("block", "a verification")],
        product(["rejection", "block", "coupled"], ["a plain step", "a verification"]),
    ),
)
def test_invalid_probabilities_raise_a_model_error(
    monkeypatch: pytest.MonkeyPatch, verification: str, where: str, value: float
) -> None:
    """Finite logits don't guarantee valid probabilities, so the probabilities are checked too."""

    def broken(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
        probs = probabilities(logits, params)
        return torch.full_like(probs, value) if (probs.dim() == 3) == (where == "a verification") else probs

    # Compiled verification computes its own probabilities.
    monkeypatch.setattr(verify, "compiled", lambda rows: False)
    monkeypatch.setattr(verify, "probabilities", broken)
    warm = {"max_new_tokens": 20, "sampling": SamplingParams(0.8), "verification": verification}
    methods = ("regular", "speculative", "bass") if where == "a plain step" else ("speculative", "bass")
    for method in methods:
        with pytest.raises(ModelError, match="NaN or infinite"):
            generate(ModelPair(TARGET, TARGET), ROW, method=method, draft_length=3, **warm)


@pytest.mark.parametrize("temperature", [1e-300, 7e-46, 1e-38, 9.99e-6])
def test_a_temperature_too_small_to_divide_by_is_greedy(temperature: float) -> None:
    for method in METHODS:
        options = {"method": method, "max_new_tokens": 8, "sampling": SamplingParams(temperature)}
        assert generate(ModelPair(TARGET, TARGET), ROW, **options).sequences[0].token_ids == TEXT[:8]


def test_the_text_before_a_nan_is_kept_and_the_next_race_works() -> None:
    pair = ModelPair(poisoned([FATAL]), TARGET)
    before = left_behind()
    *_, last = race(pair, ROW, max_new_tokens=30, draft_length=3)
    assert last["done"]
    for lane in last["lanes"].values():
        (sequence,) = lane["sequences"]
        assert "NaN" in lane["error"] and lane["finished"] and sequence["finish_reason"] == "error"
        assert sequence["token_ids"] == TEXT[: len(sequence["token_ids"])]
        assert len(sequence["token_ids"]) <= UNTIL
    assert len(last["lanes"]["regular"]["sequences"][0]["token_ids"]) == UNTIL
    *_, last = race(pair, ROW, max_new_tokens=UNTIL - 1)
    for lane in last["lanes"].values():
        assert lane["error"] is None and lane["sequences"][0]["token_ids"] == TEXT[: UNTIL - 1]
    assert left_behind() == before


@pytest.mark.parametrize("where", ["everywhere", "on the way"])
def test_a_draft_with_nan_costs_only_speed(where: str) -> None:
    pair = ModelPair(TARGET, poisoned(list(range(96)) if where == "everywhere" else [FATAL]))
    for method in ("speculative", "bass"):
        out = generate(pair, ROW, method=method, max_new_tokens=30, draft_length=3)
        assert out.sequences[0].token_ids == TEXT
    warm = {"max_new_tokens": 30, "sampling": SamplingParams(0.9)}
    regular = generate(pair, ROW, method="regular", **warm).sequences[0].token_ids
    out = generate(pair, ROW, draft_length=3, verification="coupled", **warm)
    assert out.sequences[0].token_ids == regular
    # Under the rejection rule every draft with a NaN q is rejected, so the target draws each token.
    sampled = generate(pair, prompts(8), draft_length=3, **warm)
    assert all(len(sequence.token_ids) == 30 for sequence in sampled.sequences)
    if where == "everywhere":
        assert sampled.metrics.acceptance_rate == 0
