"""Below each row the page says whether its text equals Regular's: after a race, a stop, and in a recording."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from bass_core import load_pair, race

from ..browser import LANES, fill, run_to_the_end
from ..conftest import started, watched

SAME = "same as Regular"


def lines(page: Page, lane: str) -> list[str | None]:
    """The text below each of a lane's rows; None where there is none."""
    found: list[str | None] = page.eval_on_selector_all(
        f"#lane-{lane} .compared", "all => all.map(e => (e.hidden ? null : e.textContent))"
    )
    return found


def exported(page: Page) -> dict[str, Any]:
    """The run as the page would download it."""
    document: dict[str, Any] = json.loads(page.evaluate("() => Bass.asJson()"))
    return document


def test_rows_that_must_agree_say_so_and_sampled_ones_claim_nothing(page: Page) -> None:
    fill(page, temperature=0, tokens=12)
    run_to_the_end(page)
    assert lines(page, "regular") == [""] * 2
    for lane in ("speculative", "bass"):
        assert lines(page, lane) == [SAME] * 2
    assert exported(page)["comparison"] == {"speculative": [None] * 2, "bass": [None] * 2}
    fill(page, temperature=0.9, tokens=4)
    run_to_the_end(page)
    assert [lines(page, lane) for lane in LANES] == [[None] * 2] * 3
    assert exported(page)["comparison"] is None


def test_a_stopped_race_is_compared_as_far_as_it_came(page: Page) -> None:
    fill(page, batch=8, tokens=1024, temperature=0)
    page.click("#run")
    for lane in ("regular", "bass"):
        first = f"document.querySelector('#lane-{lane} .sequence')"
        page.wait_for_function(f"() => {first}?.textContent.length > 5")
    assert lines(page, "bass") == [""] * 8
    page.click("#stop")
    expect(page.locator("#lane-bass .state")).to_have_text("Stopped")
    assert lines(page, "bass") == [f"{SAME} so far"] * 8
    assert exported(page)["comparison"]["bass"] == [None] * 8
    # Where a text differs, the page finds the position itself.
    page.evaluate("() => { Bass.run().lanes.get('bass').sequences[2].tokens[1].id = -7; }")
    theirs = page.evaluate("() => Bass.run().lanes.get('regular').sequences[2].tokens[1].id")
    assert exported(page)["comparison"]["bass"][2] == {"at": 1, "ours": -7, "theirs": theirs}
    assert page.evaluate("() => Bass.compared().bass[2].text") == "differs at token 2"


@pytest.fixture(scope="module")
def document(tiny_pair: tuple[Path, Path]) -> dict[str, Any]:
    """A recorded greedy race of three rows."""
    pair = load_pair(str(tiny_pair[0]), draft=str(tiny_pair[1]), device="cpu", dtype="float32")
    snapshots = list(race(pair, "Hello", n=3, max_new_tokens=30))
    return {"recording": 1, "about": "a tiny pair, for a test", "settings": {}, "snapshots": snapshots}


@contextmanager
def played(document: dict[str, Any], context: BrowserContext, folder: Path) -> Iterator[Page]:
    """The page after it has played the recording."""
    (folder / "run.json").write_text(json.dumps(document))
    replay = ("--replay", str(folder / "run.json"))
    with started(folder / "log.txt", *replay) as server, watched(context, server) as page:
        run_to_the_end(page)
        yield page


@pytest.mark.slow
def test_a_row_that_differs_says_where_and_how_near_the_tie_was(
    document: dict[str, Any], context: BrowserContext, tmp_path: Path
) -> None:
    changed = copy.deepcopy(document)
    tie = {"at": 26, "ours": 5, "theirs": 9, "p_ours": 0.31, "p_theirs": 0.30, "tie": 0.97}
    close = {"at": 0, "ours": 5, "theirs": 9, "p_ours": 0.30312, "p_theirs": 0.30348, "tie": 0.998}
    far = {"at": 4, "ours": 5, "theirs": 9, "p_ours": 0.02, "p_theirs": 0.9, "tie": 0.02}
    even = {"at": 2, "ours": 5, "theirs": 9, "p_ours": 0.30661, "p_theirs": 0.30661, "tie": 1.0}
    unknown = {"at": 7, "ours": 5, "theirs": 9, "p_ours": None, "p_theirs": None, "tie": None}
    found = {"speculative": [tie, None, close], "bass": [far, unknown, even]}
    changed["snapshots"][-1]["comparison"] = found
    with played(changed, context, tmp_path) as page:
        assert lines(page, "regular") == [""] * 3
        assert lines(page, "speculative") == [
            "differs at token 27 (a near tie: 0.31 against 0.30)",
            SAME,
            "differs at token 1 (a near tie: 0.3031 against 0.3035)",
        ]
        assert lines(page, "bass") == [
            "differs at token 5 (0.02 against 0.90)",
            "differs at token 8",
            "differs at token 3 (a near tie: 0.31 each)",
        ]
        assert exported(page)["comparison"] == found
        page.evaluate("() => { Bass.run().head.settings.temperature = 0.7; }")
        dice = "differs at token 27 (a near tie after the random draw: 0.31 against 0.30)"
        assert page.evaluate("() => Bass.compared().speculative[0].text") == dice


@pytest.mark.slow
def test_a_recording_without_the_field_shows_nothing(
    document: dict[str, Any], context: BrowserContext, tmp_path: Path
) -> None:
    older = copy.deepcopy(document)
    del older["snapshots"][-1]["comparison"]
    with played(older, context, tmp_path) as page:
        assert [lines(page, lane) for lane in LANES] == [[None] * 3] * 3
        assert exported(page)["comparison"] is None
