"""The step inspector draws trees of drafts, and the bill of a planned round; a chain looks as it always did."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from bass_core import SamplingParams, load_pair, race
from bass_core.budget.trees import FixedNodes

from ..browser import run_to_the_end
from ..conftest import started, watched
from ..page.test_access import AXE, violations

pytestmark = pytest.mark.slow
LANES = ("regular", "bass", "chain")
CURVE = [[tokens, 20 + 0.5 * tokens] for tokens in range(2, 35)]
VERDICTS = {"accepted", "rejected", "untested"}


def bill(drafts: int, levels: int) -> dict[str, Any]:
    """A bill of two rows, as the log holds it."""
    worths = [0.9 / (i + 1) for i in range(drafts)]
    prices = [0.1 + 0.05 * i for i in range(drafts + 3)]
    return {"curve": 0, "tokens": 2 + drafts, "levels": levels, "level_ms": 1.5, "worths": worths,
            "prices": prices, "expected": 2 + sum(worths), "plain_ms": 21.0}  # fmt: skip


@pytest.fixture(scope="module")
def final(tiny_pair: tuple[Path, Path]) -> dict[str, Any]:
    """The last snapshot of a race with trees, whose last round is made plain; a lane "chain" has no trees."""
    pair = load_pair(str(tiny_pair[0]), draft=str(tiny_pair[1]), device="cpu", dtype="float32")
    common: dict[str, Any] = {"n": 2, "max_new_tokens": 60, "sampling": SamplingParams(0.9), "seed": 5}
    *_, chains = race(pair, "Hello", lanes=["bass"], draft_length=4, **common)
    *_, shot = race(pair, "Hello", lanes=["regular", "bass"], draft_length=FixedNodes(24), **common)
    shot["lanes"]["chain"] = chains["lanes"]["bass"]
    lane = shot["lanes"]["bass"]
    lane["curves"] = [CURVE]
    for row in lane["rounds"][-1]["rows"]:
        row |= {key: [] for key in ("drafted", "drafted_text", "p", "q", "u")} | {"accepted": 0}
        row |= {"parents": None, "path": None}
    for record in lane["rounds"][1:]:
        drafts = sum(len(row["drafted"]) for row in record["rows"])
        record["bill"] = bill(drafts, 3 if drafts else 0)
    made: dict[str, Any] = json.loads(json.dumps(shot))
    return made


@pytest.fixture(scope="module")
def page(
    final: dict[str, Any], context: BrowserContext, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Page]:
    """A page that has played the race."""
    folder = tmp_path_factory.mktemp("trees")
    file = folder / "run.json"
    file.write_text(json.dumps({"recording": 1, "about": "trees", "snapshots": [final]}))
    with started(folder / "log.txt", "--replay", str(file)) as server, watched(context, server) as page:
        run_to_the_end(page, LANES)
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


def a_tree(final: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """A step of the first sequence whose tree has drafts of each verdict."""
    for step, row in enumerate(rows_of(final["lanes"]["bass"], 0)):
        if set(verdicts(row)) == VERDICTS and row["written"] > row["accepted"]:
            return step, row
    raise AssertionError("no such round: choose another seed")


def verdicts(row: dict[str, Any]) -> list[str]:
    """What the page shall say of each draft of a tree."""
    stood = {-1, *row["path"]}
    tested = ["rejected" if parent in stood else "untested" for parent in row["parents"]]
    return ["accepted" if i in row["path"] else verdict for i, verdict in enumerate(tested)]


def test_the_tree_shows_each_draft_once_with_its_verdict(page: Page, final: dict[str, Any]) -> None:
    step, row = a_tree(final)
    choose(page, "bass", 0, step)
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
    choose(page, "bass", 0, step)
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


def test_a_chain_is_a_table_and_has_no_bill(page: Page, final: dict[str, Any]) -> None:
    row = rows_of(final["lanes"]["chain"], 1)[0]
    choose(page, "chain", 1, 0)
    expect(page.locator(".tree-part")).to_be_hidden()
    expect(page.locator(".bill")).to_be_hidden()
    expect(page.locator(".round [data-row=token] td")).to_have_count(len(row["drafted"]) + 1)
    expect(page.locator(".round-line")).to_contain_text("draft length 4, 4 drafted")


def test_a_phone_scrolls_the_tree_inside_its_own_box(page: Page, final: dict[str, Any]) -> None:
    step, _ = a_tree(final)
    page.set_viewport_size({"width": 390, "height": 844})
    choose(page, "bass", 0, step)
    page.eval_on_selector(".tree", "e => e.style.setProperty('--columns', 12)")
    wide = "e => [e.scrollWidth > e.clientWidth, e.getBoundingClientRect().right <= innerWidth]"
    assert page.eval_on_selector(".tree-box", wide) == [True, True]
    page.wait_for_timeout(500)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.set_viewport_size({"width": 1400, "height": 900})


def test_the_bill_says_and_draws_what_was_reckoned(page: Page, final: dict[str, Any]) -> None:
    lane = final["lanes"]["bass"]
    step, _ = a_tree(final)
    choose(page, "bass", 0, step)
    record = next(r for r in lane["rounds"] if f"Lane round {r['round']}," in page.inner_text(".round-line"))
    made, drafts = record["bill"], len(record["bill"]["worths"])
    wrote = sum(row["written"] for row in record["rows"])
    extra = 0.5 * drafts + 3 * 1.5
    expect(page.locator(".bill-line")).to_have_text(
        f"{drafts} drafts of {len(record['rows'])} rows cost {extra:.1f} ms more than a plain step and should bring "
        f"{made['expected'] - 2:.1f} tokens more: as much as {made['expected'] / 2:.2f} plain steps, in the time of "
        f"{(21 + extra) / 21:.2f}. The round wrote {wrote} tokens; {made['expected']:.1f} were expected."
    )
    page.locator(".bill").scroll_into_view_if_needed()
    data = "[...document.querySelectorAll('.bill .plot')].map(plot => plot.data ?? [])"
    page.wait_for_function(f"count => {data}[0][0]?.y.length === count", arg=drafts)
    (bars, prices), (curve, plain, here) = page.evaluate(data)
    assert (bars["y"], prices["y"]) == (made["worths"], made["prices"])
    pays = [worth >= price for worth, price in zip(made["worths"], made["prices"], strict=False)]
    assert [opacity == 1 for opacity in bars["marker"]["opacity"]] == pays and not all(pays)
    assert [list(point) for point in zip(curve["x"], curve["y"], strict=True)] == CURVE
    assert (plain["x"], plain["y"]) == ([2], [21])
    assert here["x"] == [2 + drafts] and math.isclose(here["y"][0], 21 + 0.5 * drafts)


def test_a_round_that_stayed_plain_says_why(page: Page, final: dict[str, Any]) -> None:
    sequence = final["lanes"]["bass"]["rounds"][-1]["rows"][0]["sequence"]
    choose(page, "bass", sequence, len(rows_of(final["lanes"]["bass"], sequence)) - 1)
    expect(page.locator(".tree-part")).to_be_hidden()
    expect(page.locator(".bill-line")).to_have_text(
        "A plain step: no draft was worth its price: the first place in the step costs 0.10 tokens. "
        "So the draft was not asked."
    )


def test_tips_and_the_table_to_download_take_the_path_s_drafts(page: Page, final: dict[str, Any]) -> None:
    _, row = a_tree(final)
    token = page.locator("#lane-bass .sequence").first.locator(".token").nth(row["start"])
    token.hover()
    tip = page.locator(".token-tip")
    expect(tip).to_contain_text(f"({len(row['drafted'])} drafted as a tree)")
    expect(tip).to_contain_text(f"p(x) {row['p'][row['path'][0]]:.3f}")
    with page.expect_download() as download:
        page.click("[data-take=csv]")
    for line in csv.DictReader(download.value.path().read_text(encoding="utf-8").splitlines()):
        if (line["lane"], line["sequence"], line["index"]) == ("bass", "0", str(row["start"])):
            assert math.isclose(float(line["p"]), row["p"][row["path"][0]], rel_tol=1e-5)


def test_axe_finds_nothing_serious_in_a_tree(page: Page, final: dict[str, Any]) -> None:
    choose(page, "bass", 0, a_tree(final)[0])
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = {"light": violations(page)}
    page.evaluate("document.body.classList.add('dark')")
    page.wait_for_timeout(500)
    found["dark"] = violations(page)
    page.evaluate("document.body.classList.remove('dark')")
    assert not any(found.values()), json.dumps(found, indent=1)
