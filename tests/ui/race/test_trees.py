"""The step inspector draws trees of drafts; a chain looks as it always did, and rows have lengths of their own."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from bass_core import ModelPair, RecordedLengths, SamplingParams, race
from ui.page.limits import Limits
from ui.page.request import make_request

from ..browser import fill, play
from ..conftest import watched
from ..page.test_access import AXE, violations

pytestmark = pytest.mark.slow
LANES = ("regular", "speculative", "bass", "tree")
VERDICTS = {"accepted", "rejected", "untested"}
ASKED = {"batch_size": 2, "max_new_tokens": 60, "temperature": 0.9, "verification": "rejection"}
# What each row may draft in the first rounds, which are so short that no row ends in them; then four.
ROWS = [[3, 1], [0, 2], [1, 4], [2, 0], [2, 2]]
LENGTHS: dict[str, Any] = {"speculative": 2, "bass": RecordedLengths([*ROWS, 4])}


@pytest.fixture(scope="module")
def final(pair: ModelPair) -> dict[str, Any]:
    """The last snapshot of a race whose BASS rows have lengths of their own; lane "tree" has static trees."""
    for seed in range(30):
        common: dict[str, Any] = {"n": 2, "max_new_tokens": 60, "sampling": SamplingParams(0.9), "seed": seed}
        common |= {"verification": "rejection"}
        *_, shot = race(pair, "Hello", lanes=["regular"], **common)
        for name, lengths in LENGTHS.items():
            *_, other = race(pair, "Hello", lanes=[name], draft_length=lengths, **common)
            shot["lanes"][name] = other["lanes"][name]
        *_, trees = race(pair, "Hello", lanes=["bass"], tree=(3, 2, 1), **common)
        shot["lanes"]["tree"] = trees["lanes"]["bass"]
        if trees_of(shot) and [one["lengths"] for one in shot["lanes"]["bass"]["rounds"][1:6]] == ROWS:
            break
    else:
        raise AssertionError("no such race: try more seeds")
    made: dict[str, Any] = json.loads(json.dumps(shot))
    return made | {"seed": seed}


@pytest.fixture(scope="module")
def page(final: dict[str, Any], context: BrowserContext, server: str) -> Iterator[Page]:
    """A page that has played the race."""
    asked = {"prompt": "Hello", **ASKED, "seed": final["seed"], "lanes": list(LANES[:3])}
    with watched(context, server) as page:
        fill(page)  # and the preset's sentence goes
        play(page, [final], make_request(asked, Limits()).settings())
        yield page


def rows_of(lane: dict[str, Any], sequence: int) -> list[dict[str, Any]]:
    """A sequence's part of each round behind its prefill."""
    return [row for record in lane["rounds"][1:] for row in record["rows"] if row["sequence"] == sequence]


def choose(page: Page, lane: str, sequence: int, step: int) -> None:
    """Open a round in the inspector."""
    # While it has the focus, the field keeps what was typed.
    page.locator("[data-pick=round]").blur()
    page.select_option("[data-pick=lane]", lane)
    page.select_option("[data-pick=sequence]", index=sequence)
    page.fill("[data-pick=round]", str(step + 1))
    page.keyboard.press("Enter")


def trees_of(final: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """Steps of the first sequence whose tree has drafts of each verdict, and whose first draft was rejected."""
    rows = enumerate(rows_of(final["lanes"]["tree"], 0))
    fitting = (at for at in rows if at[1]["path"] and set(verdicts(at[1])) == VERDICTS)
    return [at for at in fitting if at[1]["path"][0] > 0 and at[1]["written"] > at[1]["accepted"]]


def a_tree(final: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The first such step."""
    return trees_of(final)[0]


def verdicts(row: dict[str, Any]) -> list[str]:
    """What the page shall say of each draft of a tree."""
    stood = {-1, *row["path"]}
    tested = ["rejected" if parent in stood else "untested" for parent in row["parents"]]
    return ["accepted" if i in row["path"] else verdict for i, verdict in enumerate(tested)]


def test_the_tree_shows_each_draft_once_with_its_verdict(page: Page, final: dict[str, Any]) -> None:
    step, row = a_tree(final)
    choose(page, "tree", 0, step)
    expect(page.locator(".round-line")).to_contain_text(f"a tree of {len(row['drafted'])} drafts, ")
    expect(page.locator(".round")).to_be_hidden()
    said = verdicts(row)
    for verdict in VERDICTS:
        expect(page.locator(f".node-{verdict}")).to_have_count(said.count(verdict))
    expect(page.locator(".node")).to_have_count(len(said) + 2)
    expect(page.locator(".tree path")).to_have_count(len(said) + 1)
    # The text runs along the top: newest token, accepted path, the target's own token.
    places = "all => all.map(e => [e.style.getPropertyValue('--row'), e.style.getPropertyValue('--column')])"
    top = page.eval_on_selector_all(".node-newest, .node-accepted, .node-recovered, .node-bonus", places)
    assert sorted(top, key=lambda at: int(at[1])) == [["0", str(i)] for i in range(row["accepted"] + 2)]
    every = page.eval_on_selector_all(".node", places)
    assert len({tuple(at) for at in every}) == len(every), "two drafts at one place"
    struck = page.eval_on_selector(".node-rejected", "e => getComputedStyle(e).textDecorationLine")
    assert struck == "line-through"


def test_pointer_keyboard_and_touch_give_a_draft_s_numbers(page: Page, final: dict[str, Any]) -> None:
    step, row = a_tree(final)
    choose(page, "tree", 0, step)
    line = page.locator(".tree-line")
    page.locator(".node-accepted").last.focus()
    page.keyboard.press("Home")
    expect(line).to_contain_text("newest token")
    page.keyboard.press("ArrowRight")
    first = row["path"][0]
    expect(line).to_contain_text(f"{json.dumps(row['drafted_text'][first], ensure_ascii=False)}: accepted")
    expect(line).to_contain_text(f"p(x) {row['p'][first]:.3f}")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".node[tabindex='0']")).to_have_count(1)
    expect(page.locator(".node-newest")).to_be_focused()
    page.keyboard.press("End")
    expect(page.locator(".node-newest")).not_to_be_focused()
    # The pointer's draft, and the chosen one again when it leaves.
    chosen = line.text_content()
    page.locator(".node-rejected").first.hover()
    expect(line).to_contain_text("rejected")
    page.locator("#inspector-title").hover()
    expect(line).to_have_text(chosen or "")
    page.locator(".node-untested").first.click()
    page.locator("#inspector-title").hover()
    expect(line).to_contain_text("not reached")


@pytest.mark.parametrize("step", [0, 2])
def test_a_chain_is_a_table_and_has_its_row_s_length(page: Page, final: dict[str, Any], step: int) -> None:
    row, length = rows_of(final["lanes"]["bass"], 1)[step], ROWS[step][1]
    choose(page, "bass", 1, step)
    expect(page.locator(".tree-part")).to_be_hidden()
    expect(page.locator(".round [data-row=token] td")).to_have_count(len(row["drafted"]) + 1)
    expect(page.locator(".round-line")).to_contain_text(f"draft length {length}, {length} drafted")


def test_a_phone_scrolls_the_tree_inside_its_own_box(page: Page, final: dict[str, Any]) -> None:
    step, _ = a_tree(final)
    page.set_viewport_size({"width": 390, "height": 844})
    choose(page, "tree", 0, step)
    page.eval_on_selector(".tree", "e => e.style.setProperty('--columns', 12)")
    wide = "e => [e.scrollWidth > e.clientWidth, e.getBoundingClientRect().right <= innerWidth]"
    assert page.eval_on_selector(".tree-box", wide) == [True, True]
    page.eval_on_selector(".tree-box", "e => e.scrollTo(500, 0)")
    assert page.eval_on_selector(".tree-box", "e => e.scrollLeft") > 0
    page.wait_for_timeout(500)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.set_viewport_size({"width": 1400, "height": 900})


def test_the_snippet_has_the_rows_lengths(page: Page) -> None:
    code = page.locator(".snippet code").text_content() or ""
    assert "[[3, 1]] + [[0, 2]] + [[1, 4]] + [[2, 0]] + [2] + [4] * " in code


def test_figures_say_what_they_count_of_trees(page: Page) -> None:
    expect(page.locator("#lane-tree .of-trees")).to_have_text(", path / nodes")
    expect(page.locator("#lane-bass .of-trees")).to_have_text("")
    expect(page.locator(".figures-table tbody")).to_contain_text("drafts accepted (of trees: path / nodes)")


def test_tips_and_the_table_to_download_take_the_path_s_drafts(page: Page, final: dict[str, Any]) -> None:
    _, row = a_tree(final)
    token = page.locator("#lane-tree .sequence").first.locator(".token").nth(row["start"])
    token.hover()
    tip = page.locator(".token-tip")
    expect(tip).to_contain_text(f"({len(row['drafted'])} drafted as a tree)")
    expect(tip).to_contain_text(f"p(x) {row['p'][row['path'][0]]:.3f}")
    with page.expect_download() as download:
        page.click("[data-take=csv]")
    for line in csv.DictReader(download.value.path().read_text(encoding="utf-8").splitlines()):
        if (line["lane"], line["sequence"], line["index"]) == ("tree", "0", str(row["start"])):
            assert math.isclose(float(line["p"]), row["p"][row["path"][0]], rel_tol=1e-5)


def test_a_greedy_tree_and_a_token_s_tip_have_no_random_number(
    pair: ModelPair, context: BrowserContext, server: str
) -> None:
    """At temperature 0 nothing is drawn; of chains the inspector says so too (tests/ui/numbers)."""
    *_, shot = race(pair, "Hello", lanes=["speculative", "bass"], n=1, max_new_tokens=30, tree=(3, 2))
    settings = make_request({"prompt": "Hello", "batch_size": 1, "temperature": 0}, Limits()).settings()
    with watched(context, server) as page:
        play(page, [shot], settings)
        rows = rows_of(json.loads(json.dumps(shot))["lanes"]["bass"], 0)
        choose(page, "bass", 0, next(i for i, row in enumerate(rows) if row["parents"]))
        page.locator(".node-newest").focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator(".tree-line")).not_to_contain_text("p(x)")
        for origin in ("accepted", "recovered"):
            tokens = page.locator(f".sequence .token.{origin}")
            if tokens.count():
                tokens.first.hover()
                expect(page.locator(".token-tip")).to_contain_text("the target's likeliest token")
                expect(page.locator(".token-tip")).not_to_contain_text("0.500")


def test_axe_finds_nothing_serious_in_a_tree(page: Page, final: dict[str, Any]) -> None:
    choose(page, "tree", 0, a_tree(final)[0])
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = {"light": violations(page)}
    page.evaluate("document.body.classList.add('dark')")
    page.wait_for_timeout(500)
    found["dark"] = violations(page)
    page.evaluate("document.body.classList.remove('dark')")
    assert not any(found.values()), json.dumps(found, indent=1)
