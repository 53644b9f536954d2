"""The verdict: who is ahead, the equation in the race's own numbers, ties, and what it looks like."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from bass_core import ModelPair, SamplingParams, race
from ui.page.limits import Limits
from ui.page.request import make_request
from ui.race.verdict import EARLY, LaneRounds, judge

from ..browser import play

Rounds = list[tuple[float, int, int]]


def lane(rounds: Rounds, finished: bool = True, speedup: float | None = None) -> tuple[dict[str, Any], LaneRounds]:
    """A lane of rounds (ms, rows, tokens of all rows) behind a prefill of 50 ms; one drafted if it wrote more."""
    counted, at, rows = LaneRounds(), 50.0, max(rows for _, rows, _ in rounds)
    counted.add({"kind": "prefill", "time_ms": at, "rows": []})  # type: ignore[typeddict-item]
    for ms, live, tokens in rounds:
        at += ms
        written = [{"written": tokens // live + (i < tokens % live)} for i in range(live)]
        kind = "verify" if tokens > live else "plain"
        counted.add({"kind": kind, "time_ms": at, "rows": written})  # type: ignore[arg-type, typeddict-item]
    each = rows * sum(ms for ms, _, _ in rounds) / sum(tokens for _, _, tokens in rounds)
    return {"metrics": {"ms_per_token": each, "speedup": speedup}, "finished": finished}, counted


def said(settings: dict[str, Any] | None = None, **lanes: tuple[dict[str, Any], LaneRounds]) -> dict[str, Any]:
    """The verdict on these lanes, with the speed-ups that a race gives them."""
    base = lanes.get("regular")
    for made, _ in lanes.values():
        if base is not None:
            made["metrics"]["speedup"] = base[0]["metrics"]["ms_per_token"] / made["metrics"]["ms_per_token"]
    shots: Any = {name: made for name, (made, _) in lanes.items()}
    return dict(judge(shots, {name: counted for name, (_, counted) in lanes.items()}, settings or {}))


PLAIN: Rounds = [(10.0, 2, 2)] * 20
AHEAD = "BASS is ahead: 1.50× the speed of Regular."


def test_a_win_is_taken_apart() -> None:
    """Each round writes three tokens of two rows in a plain step's time: 1.5 tokens for 1.00."""
    found = said(regular=lane(PLAIN), bass=lane([(10.0, 2, 3)] * 14))
    assert found["head"] == AHEAD
    assert found["lanes"] == {
        "bass": "BASS 1.50×: 1.50 tokens a row-round, and a row-round costs 1.00 plain ones."
    }


def test_a_loss_says_what_a_round_costs() -> None:
    found = said({"draft_length": "auto"}, regular=lane(PLAIN), bass=lane([(20.0, 2, 3)] * 14))
    assert found["head"] == "Regular is ahead: 1.33× the speed of BASS, which comes next."
    assert found["lanes"]["bass"] == (
        "BASS 0.75×: 1.50 tokens a row-round, but a row-round costs 2.00 plain ones."
    )


def test_a_row_alone_pays_a_whole_step() -> None:
    """One row after another: as many tokens a round, but each row has rounds of its own."""
    found = said(regular=lane(PLAIN), speculative=_of_two([(10.0, 1, 2)] * 20))
    assert found["lanes"]["speculative"] == (
        "Speculative 1.00×: 2.00 tokens a row-round, and a row-round costs 2.00 plain ones."
    )


def _of_two(rounds: Rounds) -> tuple[dict[str, Any], LaneRounds]:
    """A lane of two sequences, whose rows take turns."""
    made, counted = lane(rounds)
    made["metrics"]["ms_per_token"] *= 2
    return made, counted


@pytest.mark.parametrize(("drafted", "words"), [(0, "none"), (4, "4")])
@pytest.mark.parametrize("policy", ["auto", "bass"])
def test_few_drafts_are_explained_where_a_policy_chose(drafted: int, words: str, policy: str) -> None:
    rounds = [(12.0, 2, 3)] * drafted + [(10.0, 2, 2)] * (20 - drafted)
    line = said({"draft_length": policy}, regular=lane(PLAIN), bass=lane(rounds))["lanes"]["bass"]
    assert f"It drafted in {words} of 20 rounds" in line
    assert ("costs more than it brings here" in line or "cost more than it brings here" in line) == (
        policy == "auto"
    )


def test_a_lane_that_never_drafts_is_not_said_to_draft_seldom() -> None:
    found = said({"draft_length": "auto"}, regular=lane(PLAIN), transformers=lane([(20.0, 2, 2)] * 20))
    line = "transformers 0.50×: 1.00 tokens a row-round, and a row-round costs 2.00 plain ones."
    assert found["lanes"] == {"transformers": line}


def test_a_difference_within_the_rounds_scatter_is_a_tie() -> None:
    chance = random.Random(0)
    noisy: Rounds = [(10 + 4 * chance.random(), 2, 2) for _ in range(20)]
    other: Rounds = [(10 + 4 * chance.random(), 2, 2) for _ in range(20)]
    assert "are level: their" in said(regular=lane(noisy), bass=lane(other))["head"]
    # The same difference of the means, without scatter, is none.
    even = [[(sum(ms for ms, _, _ in rounds) / 20, 2, 2)] * 20 for rounds in (noisy, other)]
    assert "is ahead" in said(regular=lane(even[0]), bass=lane(even[1]))["head"]


def test_a_tie_of_two_says_whom_both_beat() -> None:
    fast: Rounds = [(10.0, 2, 3), (10.0, 2, 5)] * 8
    found = said(regular=lane(PLAIN), speculative=lane(fast), bass=lane(fast))
    assert found["head"].startswith("Speculative and BASS are level, ahead of Regular: their 0 % are within")


def test_nothing_is_said_too_early_or_of_one_lane() -> None:
    assert said(regular=lane(PLAIN))["head"] is None
    early = lane([(10.0, 2, 3)] * (EARLY - 1), finished=False)
    assert said(regular=lane(PLAIN, finished=False), bass=early) == {"head": None, "lanes": {}}
    later = lane([(10.0, 2, 3)] * EARLY, finished=False)
    assert said(regular=lane(PLAIN), bass=later)["head"] == "BASS is ahead so far: 1.50× the speed of Regular."


def test_without_the_reference_there_is_no_speed_up() -> None:
    found = said(speculative=lane(PLAIN), bass=lane([(10.0, 2, 4)] * 10))
    assert found == {"head": "BASS is ahead: 2.00× the speed of Speculative, which comes next.", "lanes": {}}


def test_overlapping_rounds_have_no_cost() -> None:
    found = said(regular=lane(PLAIN), amusd=lane([(8.0, 2, 3)] * 14))
    assert found["lanes"]["amusd"].startswith("AMUSD 1.88×: draft and target work at the same time")


@pytest.fixture
def final(pair: ModelPair) -> dict[str, Any]:
    """The last snapshot of a race of three lanes."""
    *_, shot = race(pair, "Hello", n=2, max_new_tokens=40, sampling=SamplingParams(0.9), draft_length=3)
    return dict(json.loads(json.dumps(shot)))


# Figures that reach over their lane's edge.
FIGURES_OUTSIDE = """[...document.querySelectorAll(".lane .figures :is(dt, dd)")].filter((e) =>
  e.getBoundingClientRect().right > e.closest(".lane").getBoundingClientRect().right).map((e) => e.textContent)"""


@pytest.mark.slow
def test_the_page_shows_it_at_the_end(final: dict[str, Any], page: Page) -> None:
    expect(page.locator(".verdict")).to_be_hidden()
    play(page, [final], make_request({"prompt": "Hello", "batch_size": 2}, Limits()).settings())
    expect(page.locator(".verdict-head")).to_have_text(re.compile("is ahead: |are level: "))
    expect(page.locator(".verdict-head")).to_have_attribute("aria-live", "polite")
    expect(page.locator(".verdict li")).to_have_count(2)
    metrics = final["lanes"]["bass"]["metrics"]
    shown = page.locator("#lane-bass [data-figure=acceptance_rate]")
    expect(shown).to_contain_text(f"{metrics['accepted']} of {metrics['drafted']}")
    page.evaluate("document.querySelectorAll('.of-trees').forEach((e) => (e.textContent = ', path / nodes'))")
    for width in (1400, 390):
        page.set_viewport_size({"width": width, "height": 844})
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate(FIGURES_OUTSIDE) == []
