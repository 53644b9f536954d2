"""What the planner believes of levels: first guesses, counts, and prices by hand."""

from __future__ import annotations

import pytest

from bass_core.budget.levels import FIRST_WAIT, Levels


def pays(levels: Levels, open_: list[float], price: float, token: float = 0.0, total: float = 1.0) -> bool:
    """Whether a level is asked for in a round of 1 ms without it, that takes `price` for it and by the draft."""
    return levels.pays(1, open_, total, 0, lambda level, drafts: 1 + (level - 1) * price + token * drafts)


def learned(open_: list[float], behind: list[list[float]], rounds: int = 200) -> Levels:
    """Levels that were told so often what is offered behind these."""
    levels = Levels()
    for _ in range(rounds):
        pays(levels, open_, 0.0)
        levels.found(behind)
    return levels


@pytest.mark.parametrize("chance", [0.35, 0.65, 0.95])
def test_a_level_is_worth_what_was_counted(chance: float) -> None:
    levels = learned([1.0], [[chance]])
    assert pays(levels, [1.0], 0.9 * chance) and not pays(levels, [1.0], 1.1 * chance)
    # Half as much is open, so half as much is offered.
    assert pays(levels, [0.5], 0.45 * chance) and not pays(levels, [0.5], 0.55 * chance)


def test_an_unlikely_draft_beside_a_likely_one_hides_nothing() -> None:
    """What is offered behind each is counted against that one, not against the mean of all."""
    open_ = [0.8] + [0.01] * 19
    levels = learned(open_, [[0.6]] + [[]] * 19)
    assert pays(levels, open_, 0.5) and not pays(levels, open_, 0.7)


def test_drafts_that_cost_too_much_are_not_counted_on() -> None:
    levels = learned([1.0], [[0.65, 0.15]])
    # The second draft would bring less than its place costs, the first one more.
    assert pays(levels, [1.0], 0.2, token=0.4) and not pays(levels, [1.0], 0.2, token=0.5)


def test_nothing_open_is_worth_nothing() -> None:
    levels = Levels()
    assert not pays(levels, [0.0, 0.0], 0.01)
    for _ in range(FIRST_WAIT - 2):
        assert not pays(levels, [0.0], 0.01)
    assert pays(levels, [0.0], 0.01), "tried now and then"
    levels.found([[]])
