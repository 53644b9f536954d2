"""The draft length "auto" over whole simulated texts: it neither loses much nor overlooks a good draft."""

from __future__ import annotations

import pytest

from bass_core.length.costs import CostTable
from bass_core.length.policies import FixedLength
from bass_core.predict.rounds import round_ms
from bench.simulation import episodes
from bench.simulation.episodes import MACHINES, TEXTS, Cell, compare, play

TEXT = {text.name: text for text in TEXTS}


@pytest.mark.parametrize(
    ("machine", "rows", "tokens", "text"),
    [
        ("AMX", 8, 64, "0.35"),
        ("AMX", 8, 256, "0.2"),
        ("without AMX", 4, 64, "0.45"),
        ("H200", 8, 64, "0.35"),
        ("H200", 16, 64, "0.2"),
    ],
)
def test_a_draft_that_does_not_pay_costs_little(machine, rows, tokens, text):
    assert compare(Cell(machine, rows, tokens, TEXT[text]))["over regular"] > 0.96


def test_a_good_draft_is_found_although_the_first_guess_says_plain():
    """With this many rows, drafts don't pay at the acceptance that "auto" starts from, but they do at 0.8."""
    for machine, rows in (("without AMX", 4), ("AMX", 16), ("H200", 8)):
        figures = compare(Cell(machine, rows, 256, TEXT["0.8"]))
        assert figures["best fixed"] > 1.2 and figures["over best fixed"] > 0.9


@pytest.mark.parametrize("table", ["plain steps slow", "wide steps slow"])
def test_costs_that_were_measured_under_load_are_overcome(table):
    assert compare(Cell("AMX", 4, 256, TEXT["0.2"], table))["over regular"] > 0.96
    assert compare(Cell("AMX", 4, 256, TEXT["0.6"], table))["over best fixed"] > 0.8


def test_earlier_calls_are_remembered():
    """A text of 64 tokens is half written before its own drafts show that longer ones pay."""
    cell, past = Cell("H200", 4, 64, TEXT["0.8"]), {}
    without = compare(cell)["over best fixed"]
    play(cell, cell.policy(past), 97)
    assert past["head"][1] / past["head"][0] > 0.6
    assert compare(cell, past=past)["over best fixed"] > without + 0.03


def test_an_episode_of_certain_drafts_takes_the_time_of_its_rounds(monkeypatch):
    """Without noise, drafts of three tokens that are always accepted write 16 tokens in four rounds."""
    monkeypatch.setattr(episodes, "NOISE", 0.0)
    monkeypatch.setattr(episodes, "HICCUPS", 0.0)
    monkeypatch.setattr(episodes, "READING", {True: 0.0})
    monkeypatch.setattr(episodes, "MACHINES", {"table": CostTable({2: [(2, 5.0), (8, 7.0)]}, {2: 0.5}, True)})
    text = episodes.Text("1", lambda row, at: 1 - 1e-9)
    costs = episodes.MACHINES["table"]
    assert play(Cell("table", 2, 16, text), FixedLength(3), 0) == pytest.approx(
        4 * sum(round_ms(costs, [3, 3], 3))
    )
    assert set(MACHINES) == {"AMX", "without AMX", "H200"}
