"""At temperature 0 the page explains a draft without a random number, of which there is none."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from bass_core import load_pair, race
from ui.page.limits import Limits
from ui.page.request import make_request

from ..browser import run_to_the_end
from ..conftest import started, watched

pytestmark = pytest.mark.slow
LANES = ("speculative", "bass")


@pytest.fixture(scope="module")
def final(tiny_pair: tuple[Path, Path]) -> dict[str, Any]:
    """A greedy race: trees in lane "bass", chains in lane "speculative"."""
    pair = load_pair(str(tiny_pair[0]), draft=str(tiny_pair[1]), device="cpu", dtype="float32")
    *_, chains = race(pair, "Hello", lanes=LANES, n=1, max_new_tokens=30, draft_length=3)
    *_, trees = race(pair, "Hello", lanes=LANES, n=1, max_new_tokens=30, tree=(3, 2))
    trees["lanes"]["speculative"] = chains["lanes"]["speculative"]
    return dict(json.loads(json.dumps(trees)))


@pytest.fixture(scope="module")
def page(
    final: dict[str, Any], context: BrowserContext, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Page]:
    """A page that has played it."""
    folder = tmp_path_factory.mktemp("greedy")
    settings = make_request({"prompt": "Hello", "batch_size": 1, "temperature": 0}, Limits()).settings()
    file = folder / "run.json"
    file.write_text(json.dumps({"recording": 1, "about": "greedy", "settings": settings, "snapshots": [final]}))
    with started(folder / "log.txt", "--replay", str(file)) as server, watched(context, server) as page:
        run_to_the_end(page, LANES)
        yield page


def choose(page: Page, final: dict[str, Any], lane: str) -> None:
    """Open the first round of a lane that drafted more than one token behind another, or beside."""
    rows = [row for record in final["lanes"][lane]["rounds"][1:] for row in record["rows"]]
    fitting = (i for i, row in enumerate(rows) if len(row["drafted"]) > 1 and (row["parents"] or lane != "bass"))
    page.locator("[data-pick=round]").blur()
    page.select_option("[data-pick=lane]", lane)
    page.fill("[data-pick=round]", str(next(fitting) + 1))
    page.keyboard.press("Enter")


def test_the_inspector_has_no_random_number(page: Page, final: dict[str, Any]) -> None:
    choose(page, final, "speculative")
    expect(page.locator(".round-note")).to_contain_text("Temperature 0: a draft is accepted if it is the target's")
    expect(page.locator(".round [data-row=token]")).to_be_visible()
    for row in ("q", "p", "ratio", "u", "chance"):
        expect(page.locator(f".round [data-row={row}]")).to_be_hidden()
    expect(page.locator(".round [data-row=verdict]")).to_contain_text(re.compile("accepted|rejected"))


def test_a_tree_and_a_token_s_tip_have_none_either(page: Page, final: dict[str, Any]) -> None:
    choose(page, final, "bass")
    page.locator(".node-newest").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".tree-line")).not_to_contain_text("p(x)")
    for lane in LANES:
        for origin in ("accepted", "recovered"):
            tokens = page.locator(f"#lane-{lane} .token.{origin}")
            if tokens.count():
                tokens.first.hover()
                expect(page.locator(".token-tip")).to_contain_text("the target's likeliest token")
                expect(page.locator(".token-tip")).not_to_contain_text("0.500")
