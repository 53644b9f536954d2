"""The step inspector draws trees of drafts, and the bill of a planned round; a chain looks as it always did."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from bass_core import SamplingParams, load_pair, race
from bass_core.budget.cost_table import CostTable
from bass_core.budget.planner import Planner
from ui.page.limits import Limits
from ui.page.request import make_request

from ..browser import run_to_the_end, shown
from ..conftest import ROOT, started, watched
from ..page.test_access import AXE, violations

pytestmark = pytest.mark.slow
LANES = ("regular", "speculative", "bass", "chain")
VERDICTS = {"accepted", "rejected", "untested"}
COSTS = CostTable(
    {1: [(1, 10.0), (8, 11.0), (32, 14.0)], 2: [(2, 10.5), (16, 12.0), (64, 20.0)]}, {1: 1.0, 2: 1.1}, False
)
ASKED = {"batch_size": 2, "max_new_tokens": 60, "temperature": 0.9, "verification": "rejection"}
# Of a plain round of one row, whose draft nobody asked.
PLAIN = {"curve": 0, "tokens": 1, "levels": 0, "draft_ms": 0.0, "worths": [], "prices": [0.1, 0.2],
         "expected": 1.0, "plain_ms": 10.5}  # fmt: skip


@pytest.fixture(scope="module")
def final(tiny_pair: tuple[Path, Path]) -> dict[str, Any]:
    """The last snapshot of a planned race that ends with a plain round; lane "chain" has a fixed draft length."""
    pair = load_pair(str(tiny_pair[0]), draft=str(tiny_pair[1]), device="cpu", dtype="float32")
    for seed in range(30):
        common: dict[str, Any] = {"n": 2, "max_new_tokens": 60, "sampling": SamplingParams(0.9), "seed": seed}
        common |= {"verification": "rejection"}
        *_, shot = race(pair, "Hello", lanes=LANES[:3], draft_length=Planner(COSTS, 2), **common)
        last = shot["lanes"]["bass"]["rounds"][-1]
        if last["kind"] == "plain" and trees_of(shot):
            break
    else:
        raise AssertionError("no such race: try more seeds")
    *_, chains = race(pair, "Hello", lanes=["bass"], draft_length=4, **common)
    shot["lanes"]["chain"] = chains["lanes"]["bass"]
    last["bill"] = PLAIN
    # Some drafts shall not be worth their price.
    for record in shot["lanes"]["bass"]["rounds"][1:-1]:
        record["bill"]["prices"] = [0.02 * i * i for i, _ in enumerate(record["bill"]["prices"])]
    made: dict[str, Any] = json.loads(json.dumps(shot))
    return made | {"seed": seed}


@pytest.fixture(scope="module")
def page(
    final: dict[str, Any], context: BrowserContext, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Page]:
    """A page that has played the race."""
    folder = tmp_path_factory.mktemp("trees")
    file = folder / "run.json"
    asked = {"prompt": "Hello", **ASKED, "seed": final["seed"], "lanes": list(LANES[:3])}
    settings = make_request(asked, Limits()).settings()
    file.write_text(json.dumps({"recording": 1, "about": "trees", "settings": settings, "snapshots": [final]}))
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


def trees_of(final: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """Steps of the first sequence whose tree has drafts of each verdict, and whose first draft was rejected."""
    rows = enumerate(rows_of(final["lanes"]["bass"], 0))
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
    page.eval_on_selector(".tree-box", "e => e.scrollTo(500, 0)")
    assert page.eval_on_selector(".tree-box", "e => e.scrollLeft") > 0
    page.wait_for_timeout(500)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.set_viewport_size({"width": 1400, "height": 900})


def cost(curve: list[list[float]], tokens: int) -> float:
    """The curve's ms at a number of tokens that it has."""
    return dict(map(tuple, curve))[tokens]  # type: ignore[arg-type]


def test_the_bill_says_and_draws_what_was_reckoned(page: Page, final: dict[str, Any]) -> None:
    lane = final["lanes"]["bass"]
    step, _ = a_tree(final)
    choose(page, "bass", 0, step)
    record = next(r for r in lane["rounds"] if f"Lane round {r['round']}," in page.inner_text(".round-line"))
    bill, curve, rows = record["bill"], lane["curves"][record["bill"]["curve"]], len(record["rows"])
    drafts = sum(len(row["drafted"]) for row in record["rows"])
    wrote = sum(row["written"] for row in record["rows"])
    assert (len(bill["worths"]), bill["tokens"], rows) == (drafts, rows + drafts, 2)
    ms, plain = cost(curve, bill["tokens"]) + bill["draft_ms"], bill["plain_ms"]
    expect(page.locator(".bill-line")).to_have_text(
        f"{drafts} drafts of 2 rows cost {ms - plain:.1f} ms more than a plain step and should bring "
        f"{bill['expected'] - 2:.1f} tokens more: as much as {bill['expected'] / 2:.2f} plain steps, in the time "
        f"of {ms / plain:.2f}. The round wrote {wrote} tokens; {bill['expected']:.1f} were expected."
    )
    page.locator(".bill").scroll_into_view_if_needed()
    data = "[...document.querySelectorAll('.bill .plot')].map(plot => plot.data ?? [])"
    page.wait_for_function(f"count => {data}[0][0]?.y.length === count", arg=drafts)
    (bars, prices), (line, before, here) = page.evaluate(data)
    assert (bars["y"], prices["y"]) == (bill["worths"], bill["prices"])
    pays = [worth >= price for worth, price in zip(bill["worths"], bill["prices"], strict=False)]
    assert [opacity == 1 for opacity in bars["marker"]["opacity"]] == pays and len(set(pays)) == 2
    assert [list(point) for point in zip(line["x"], line["y"], strict=True)] == curve
    assert (before["x"], before["y"]) == ([2], [plain])
    assert (here["x"], here["y"]) == ([bill["tokens"]], [cost(curve, bill["tokens"])])


def test_a_round_that_stayed_plain_says_why(page: Page, final: dict[str, Any]) -> None:
    sequence = final["lanes"]["bass"]["rounds"][-1]["rows"][0]["sequence"]
    choose(page, "bass", sequence, len(rows_of(final["lanes"]["bass"], sequence)) - 1)
    expect(page.locator(".tree-part")).to_be_hidden()
    expect(page.locator(".bill-line")).to_have_text(
        "A plain step: no draft was worth its price: the first place in the step costs 0.10 tokens. "
        "So the draft was not asked."
    )


def test_the_snippet_repeats_the_trees(page: Page, tiny_pair: tuple[Path, Path]) -> None:
    code = page.locator(".snippet code").text_content() or ""
    assert re.search(r'\["[cld][cld0-9 ]*", "[cld]', code), "no shapes of two rows"
    load = 'load_pair("target", draft="draft", device="cpu", dtype="float32")'
    code = code.replace('load_pair("smollm2")', load)
    code = "\n\n".join(part for part in code.split("\n\n") if '"chain"' not in part)
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tiny_pair[0].parent, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}, encoding="utf-8",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    texts = re.split(r"--- \w+, sequence \d+\n", ended.stdout)[1:]
    assert [text.removesuffix("\n") for text in texts] == [one for lane in LANES[:3] for one in shown(page, lane)]


def test_figures_say_what_they_count_of_trees(page: Page) -> None:
    expect(page.locator("#lane-bass .of-trees")).to_have_text(", path / nodes")
    expect(page.locator("#lane-chain .of-trees")).to_have_text("")
    expect(page.locator(".figures-table tbody")).to_contain_text("drafts accepted (of trees: path / nodes)")


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
