"""A pair's first forwards run once, before any lane's clock starts."""

from __future__ import annotations

from typing import Any

import pytest

from bass_core import ModelPair, generate, race
from bass_core.lanes import warmup

from ...models import perturbed, prompts, reference, tiny

TARGET = tiny("llama")


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The decoders made for a warm-up."""
    made: list[Any] = []
    build = warmup.build_bass

    def remembered(*arguments: Any) -> Any:
        made.append(build(*arguments))
        return made[-1]

    monkeypatch.setattr(warmup, "build_bass", remembered)
    return made


@pytest.mark.parametrize("draft", [None, perturbed(TARGET, 0.02)])
def test_once_a_pair(built: list[Any], draft: Any) -> None:
    pair, other, row = ModelPair(TARGET, draft), ModelPair(TARGET, draft), prompts(1)[0]
    for _ in range(2):
        assert generate(pair, row, max_new_tokens=9).sequences[0].token_ids == reference(TARGET, row, 9)
    assert len(built) == 1
    first = next(race(other, row, max_new_tokens=9))
    assert len(built) == 2
    # The warm-up's prefill and one round, which no lane counts.
    assert [decoder.target_forwards for decoder in built] == [2, 2]
    assert all(lane["metrics"]["target_forwards"] <= 9 for lane in first["lanes"].values())


def test_a_warm_up_that_fails_leaves_the_failure_to_the_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("cold")

    monkeypatch.setattr(warmup, "build_bass", fail)
    row = prompts(1)[0]
    assert generate(ModelPair(TARGET), row, max_new_tokens=5).sequences[0].token_ids == reference(TARGET, row, 5)
