"""Below each row the page says whether its text equals Regular's: after a race, and in a recording."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from bass_core import ModelPair, race

from ..browser import LANES, compared, fill, play, run_to_the_end, shown

SAME = "same as Regular"


def exported(page: Page) -> dict[str, Any]:
    """The run as the page would download it."""
    document: dict[str, Any] = json.loads(page.evaluate("() => Bass.asJson()"))
    return document


def test_rows_that_must_agree_say_so_and_sampled_ones_claim_nothing(page: Page) -> None:
    fill(page, temperature=0, tokens=12)
    run_to_the_end(page)
    assert compared(page, "regular") == [""] * 2
    for lane in ("speculative", "bass"):
        assert compared(page, lane) == [SAME] * 2
    assert exported(page)["comparison"] == {"speculative": [None] * 2, "bass": [None] * 2}
    expect(page.locator(".greedy-note")).to_contain_text("the 2 sequences of a lane are the same")
    assert all(len(set(shown(page, lane))) == 1 for lane in LANES)
    fill(page, temperature=0.9, tokens=4)
    run_to_the_end(page)
    assert [compared(page, lane) for lane in LANES] == [[None] * 2] * 3
    assert exported(page)["comparison"] is None
    expect(page.locator(".greedy-note")).to_be_hidden()


@pytest.mark.slow
def test_a_row_that_differs_says_where_and_how_near_the_tie_was(page: Page, pair: ModelPair) -> None:
    *_, last = race(pair, "Hello", n=3, max_new_tokens=30)
    final: dict[str, Any] = dict(last)
    tie = {"at": 26, "ours": 5, "theirs": 9, "p_ours": 0.31, "p_theirs": 0.30, "tie": 0.97}
    close = {"at": 0, "ours": 5, "theirs": 9, "p_ours": 0.30312, "p_theirs": 0.30348, "tie": 0.998}
    far = {"at": 4, "ours": 5, "theirs": 9, "p_ours": 0.02, "p_theirs": 0.9, "tie": 0.02}
    even = {"at": 2, "ours": 5, "theirs": 9, "p_ours": 0.30661, "p_theirs": 0.30661, "tie": 1.0}
    unknown = {"at": 7, "ours": 5, "theirs": 9, "p_ours": None, "p_theirs": None, "tie": None}
    found = {"speculative": [tie, None, close], "bass": [far, unknown, even]}
    play(page, [final | {"comparison": found}])
    assert compared(page, "regular") == [""] * 3
    assert compared(page, "speculative") == [
        "differs at token 27 (a near tie: 0.31 against 0.30)",
        SAME,
        "differs at token 1 (a near tie: 0.3031 against 0.3035)",
    ]
    assert compared(page, "bass") == [
        "differs at token 5 (0.02 against 0.90)",
        "differs at token 8",
        "differs at token 3 (a near tie: 0.31 each)",
    ]
    assert exported(page)["comparison"] == found
    page.evaluate("() => { Bass.run().head.settings.temperature = 0.7; }")
    dice = "differs at token 27 (a near tie after the random draw: 0.31 against 0.30)"
    assert page.evaluate("() => Bass.compared().speculative[0].text") == dice
    # Without the field nothing is claimed.
    del final["comparison"]
    play(page, [final])
    assert [compared(page, lane) for lane in LANES] == [[None] * 3] * 3
    assert exported(page)["comparison"] is None
