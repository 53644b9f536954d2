"""The preset that the page starts with depends on the machine's measured costs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ui.page import presets as module
from ui.page.choices import Choices
from ui.page.form import starting_values
from ui.page.limits import Limits
from ui.page.presets import QUESTIONS, REPEAT, presets
from ui.sweep.readers import figures


@pytest.mark.parametrize(
    ("expected", "chosen"), [(None, REPEAT), (0.9, REPEAT), (1.09, REPEAT), (1.1, QUESTIONS), (1.6, QUESTIONS)]
)
def test_four_questions_come_first_where_bass_wins_them(
    expected: float | None, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        module, "expected_speedup", lambda *values, **more: asked.append((values, more)) or expected
    )
    pair: Any = SimpleNamespace(name="smollm2")
    assert module.first_preset(pair) == chosen
    race = presets()[QUESTIONS].values
    assert asked == [
        ((pair, figures()["texts"]["questions"]["acceptance"]), {"rows": 4, "draft_length": 3, "temperature": 0.0})
    ]
    assert (race["batch_size"], race["draft_length"], race["temperature"]) == (4, "3", 0.0)


def test_the_acceptance_of_another_pair_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "expected_speedup", lambda *_, **__: 9.0)
    other: Any = SimpleNamespace(name="another")
    assert module.first_preset(other) == REPEAT


def test_every_first_preset_has_fixed_rows_and_draft_lengths() -> None:
    """So the first race waits for no measurement."""
    for name in (REPEAT, QUESTIONS):
        values = starting_values(presets()[name], Limits(), Choices(preset=name))
        assert values["batch_size"] == 4 and str(values["draft_length"]).isdecimal()
    assert len(set(presets()[QUESTIONS].values["prompt"].split("\n"))) == 4
