"""The page's first race depends on the machine's measured costs, and on earlier races like it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ui.page import first as module
from ui.page.choices import Choices
from ui.page.form import starting_values
from ui.page.limits import Limits
from ui.page.presets import H100, QUESTIONS, REPEAT, First, presets
from ui.page.request import make_request
from ui.sweep.readers import figures

PAIR: Any = SimpleNamespace(name="smollm2")


@pytest.fixture(autouse=True)
def costs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    monkeypatch.setattr(module, "costs_file", lambda pair: path)
    return path


def predict(monkeypatch: pytest.MonkeyPatch, speedups: dict[tuple[str, int], float | None]) -> list[Any]:
    """Let races of these texts (their names in readers.json) and rows have these predictions, and all others 1."""
    asked: list[Any] = []
    names = {tuple(known["acceptance"]): name for name, known in figures()["texts"].items()}

    def expected(pair: Any, acceptance: list[float], *, rows: int, **more: Any) -> float | None:
        name = next(name for all_, name in names.items() if list(all_[:rows]) == acceptance)
        asked.append((name, rows, more["draft_length"], more["temperature"]))
        return speedups.get((name, rows), 1.0)

    monkeypatch.setattr(module, "expected_speedup", expected)
    return asked


@pytest.mark.parametrize(
    ("speedups", "name", "rows"),
    [
        ({("questions", 4): 1.3, ("repeat", 8): 3.0}, QUESTIONS, 4),
        ({("questions", 4): 1.29, ("questions", 2): 1.4, ("questions", 1): 1.8}, QUESTIONS, 2),
        ({("repeat", 4): 1.4, ("repeat", 2): 2.0}, REPEAT, 4),
        ({("repeat", 1): 1.4}, REPEAT, 1),
    ],
)
def test_the_first_race_is_the_largest_clear_win(
    speedups: dict[tuple[str, int], float | None], name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = predict(monkeypatch, speedups)
    first = module.first_race(PAIR)
    assert (first.name, first.rows) == (name, rows)
    assert first.said.startswith("Predicted for this machine: BASS is about ")
    assert asked[0] == ("questions", 4, "auto", 0.0)
    assert ("repeat", 8, 3, 0.0) in asked or name == QUESTIONS
    values = starting_values(presets(first)[name], Limits(), Choices(first=first))
    assert values["batch_size"] == rows
    if name == QUESTIONS:
        assert len(values["prompt"].split("\n")) == rows
        assert (presets()[QUESTIONS].look_for in presets(first)[QUESTIONS].look_for) == (rows == 4)


def test_a_machine_that_wins_nothing_says_so_and_predicts_another(monkeypatch: pytest.MonkeyPatch) -> None:
    predict(monkeypatch, {})
    first = module.first_race(PAIR)
    assert (first.name, first.said) == (H100, module.NO_WIN)
    assert presets(first)[H100].values == presets()[H100].values


def test_the_operators_limit_and_errors_of_measuring_are_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = predict(monkeypatch, {("repeat", 8): 3.0, ("repeat", 2): 1.5})
    assert (module.first_race(PAIR, 2).name, module.first_race(PAIR, 2).rows) == (REPEAT, 2)
    assert max(rows for _, rows, *_ in asked) == 2

    def fails(*_: Any, **__: Any) -> float:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(module, "expected_speedup", fails)
    assert module.first_race(PAIR) == First()


def test_unknown_costs_and_other_pairs_start_with_the_repeated_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "expected_speedup", lambda *_, **__: None)
    assert module.first_race(PAIR) == First()
    # The acceptance of another pair's drafts is unknown.
    monkeypatch.setattr(module, "expected_speedup", lambda *_, **__: 9.0)
    assert module.first_race(SimpleNamespace(name="another")) == First() == First(REPEAT, 4)  # type: ignore[arg-type]


def lanes(speedup: float, **changed: Any) -> Any:
    return {"bass": {"error": None, "finished": True, "metrics": {"speedup": speedup}} | changed}


def settings(name: str, rows: int, **changed: Any) -> dict[str, Any]:
    """Return the settings of the race that the page runs for a preset."""
    first = First(name, rows)
    values = starting_values(presets(first)[name], Limits(), Choices(first=first))
    return make_request(values | changed, Limits()).settings()


def test_a_race_that_contradicts_the_prediction_corrects_it(monkeypatch: pytest.MonkeyPatch, costs: Path) -> None:
    predict(monkeypatch, {("questions", 4): 1.5, ("questions", 1): 1.6})
    for speedup in (0.9, 0.8, 1.4):
        module.remember(PAIR, settings(QUESTIONS, 4), lanes(speedup))
    module.remember(PAIR, settings(QUESTIONS, 1), lanes(1.25))  # clear for a race, not for a prediction
    first = module.first_race(PAIR)
    assert (first.name, first.rows) == (QUESTIONS, 1)
    assert first.said == "Earlier races on this machine: BASS is about 1.2 times as fast as Regular."
    # The newest races count.
    for _ in range(module.KEPT):
        module.remember(PAIR, settings(QUESTIONS, 4), lanes(1.4))
    assert module.first_race(PAIR).rows == 4
    costs.with_suffix(".races").write_text("[")
    assert module.first_race(PAIR).said.startswith("Predicted")


def test_only_whole_races_with_the_predicted_settings_count(costs: Path) -> None:
    for changed in (
        {"temperature": 0.7}, {"draft_length": "2"}, {"prompt": "Hello."}, {"clock": "h100"}, {"acceptance": 1.0},
        {"max_new_tokens": 8}, {"time_budget_ms": 9.0}, {"regex": "a*"},
    ):  # fmt: skip
        module.remember(PAIR, settings(REPEAT, 4, **changed), lanes(9.0))
    module.remember(PAIR, settings(REPEAT, 4), lanes(9.0, finished=False))
    module.remember(PAIR, settings(REPEAT, 4), lanes(9.0, error="The memory is full."))
    module.remember(PAIR, settings(REPEAT, 4), {})
    assert not costs.with_suffix(".races").exists()
    module.remember(PAIR, settings(REPEAT, 4), lanes(9.0))
    assert costs.with_suffix(".races").exists()
