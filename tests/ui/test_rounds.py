"""Drawings of races: the axis, the cache, trees of drafts, rows that differ.

Each race is built from snapshots of real lanes and played as a recording. The drawings are compared with the
exported JSON or the snapshots.
"""

from __future__ import annotations

import csv
import json
import math
import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from bass_core import ModelPair, RecordedLengths, SamplingParams, race
from ui.page.limits import Limits
from ui.page.request import make_request

from .browser import (
    LANES,
    assert_accessible,
    assert_fits,
    compared,
    exported,
    fill,
    open_settings,
    play,
    run_to_the_end,
    saved,
    shown,
)

pytestmark = pytest.mark.slow
ROWS, SEED = 3, 4


def race_settings(**given: Any) -> dict[str, Any]:
    return make_request({"prompt": "Hello", "temperature": 0.9} | given, Limits()).settings()


def last_of(pair: ModelPair, **options: Any) -> dict[str, Any]:
    """The last snapshot of a race, as plain JSON data."""
    *_, snapshot = race(pair, "Hello", **options)
    return dict(json.loads(json.dumps(snapshot)))


def test_axis_and_cache_show_the_exported_rounds(opened: Page, pair: ModelPair) -> None:
    opened.set_viewport_size({"width": 1900, "height": 1000})
    final = of_six_lanes(pair)
    play(opened, [final], race_settings(batch_size=ROWS, seed=SEED))
    _axis(opened, final)
    _cache(opened, final)
    _elsewhere(opened, final)
    opened.set_viewport_size({"width": 390, "height": 844})
    assert_fits(opened, 390)


def of_six_lanes(pair: ModelPair) -> dict[str, Any]:
    """The last snapshot of a race with three more lanes. Some lanes report FLOPs utilisation, as on a GPU.

    - "common": the batch stops at its first rejection.
    - "whole": the parts of a round's time are unknown.
    - "overlapping": draft and target work at the same time.
    """
    options: dict[str, Any] = {"n": ROWS, "max_new_tokens": 40, "draft_length": 3, "seed": SEED}
    options["sampling"] = SamplingParams(0.9)
    # The first race is a warm-up: its slow first rounds would make the other blocks too narrow to draw.
    last_of(pair, **options)
    snapshot = last_of(pair, **options)
    lanes = snapshot["lanes"]
    lanes["bass"]["metrics"]["flops_utilization"] = 0.125
    lanes["common"] = last_of(pair, lanes=["bass"], verification="common_stop", **options)["lanes"]["bass"]
    rounds = [record | {"draft_ms": None, "verify_ms": None} for record in lanes["bass"]["rounds"]]
    lanes["whole"] = lanes["bass"] | {"rounds": rounds}
    end = lanes["bass"]["clock_ms"]
    spans = {"target": [[0, end / 4], [end / 2, end]], "draft": [[end / 4, 3 * end / 4]], "rollbacks": [end / 2]}
    counts = {"target_busy_ms": 40.0, "draft_busy_ms": 20.0, "rolled_back": 2, "thrown_away": 7, "note": None}
    lanes["overlapping"] = lanes["bass"] | {"timeline": spans | counts}
    return snapshot


def _axis(page: Page, final: dict[str, Any]) -> None:
    """Each lane has a bar per round, whose parts may be unknown. Overlapping work is described in words."""
    page.wait_for_function("() => document.querySelectorAll('[data-axis] .axis-flag:not([hidden])').length === 6")
    for name, lane in final["lanes"].items():
        bars = page.locator(f"[data-axis={name}]").evaluate("row => row.bars")
        ends = [0.0, *(one["time_ms"] for one in lane["rounds"])]
        spent = [
            b - a for one, a, b in zip(lane["rounds"], ends, ends[1:], strict=False) if one["kind"] != "prefill"
        ]
        assert [bar["end"] - bar["begin"] for bar in bars] == pytest.approx(spent, abs=1e-3)
    canvas, words = page.locator("[data-axis=whole] canvas"), page.locator(".axis-words")
    canvas.focus()
    page.keyboard.press("End")
    expect(words).to_contain_text(re.compile(r"^whole, Round \d+: \d+ tokens? in [\d.]+ ms$"))
    overlap = page.locator("[data-axis=overlapping] canvas").get_attribute("aria-label") or ""
    assert overlap.endswith("; 2 roll-backs, 7 drafts thrown away")


# For every round of the chosen lane and each row: the row's length, its ghost (the length with one common stop for
# the batch), and the number of its cells of each kind.
WALK = """() => {
  const range = document.querySelector(".cache-part input[type=range]");
  return Array.from({ length: Number(range.max) + 1 }, (_, at) => {
    range.value = at;
    range.dispatchEvent(new Event("input"));
    const cells = (row) => [...row.querySelectorAll(".cell:not([hidden])")]
      .map((e) => [e.className.split("cell-")[1], Number(e.dataset.cells)]);
    return [...document.querySelectorAll(".cache-row")]
      .map((row) => [Number(row.dataset.length), Number(row.dataset.ghost), cells(row)]);
  });
}"""


def recount(lane: dict[str, Any]) -> list[list[tuple[int, int, dict[str, int]]]]:
    """The values of WALK, computed from the rounds. Both rejected and untested drafts are counted as "thrown"."""
    lengths, ghosts, frames = [0] * ROWS, [0] * ROWS, []
    for record in lane["rounds"]:
        kinds: list[dict[str, int]] = [{} for _ in range(ROWS)]
        unfinished = [row for row in record["rows"] if row["written"] > row["accepted"]] or record["rows"]
        least = min(row["accepted"] for row in unfinished)
        for row in record["rows"]:
            at, begin = row["sequence"], row["start"]
            lengths[at], ghosts[at] = lengths[at] + row["written"], ghosts[at] + min(row["written"], 1 + least)
            origins = lane["sequences"][at]["origins"][begin : begin + row["written"]]
            kinds[at] = {origin: origins.count(origin) for origin in origins}
            if thrown := len(row["drafted"]) - origins.count("accepted"):
                kinds[at]["thrown"] = thrown
        frames.append(list(zip(lengths[:], ghosts[:], kinds, strict=True)))
    return frames


def _cache(page: Page, final: dict[str, Any]) -> None:
    """The cache's cells and ghosts follow from the rounds."""
    page.locator(".cache-part").scroll_into_view_if_needed()
    expect(page.locator(".cache-part select")).to_have_value("bass")
    for name in ("regular", "common", "bass"):
        page.select_option(".cache-part select", name)
        shown = []
        for frame in page.evaluate(WALK):
            shown.append([])
            for length, ghost, cells in frame:
                kinds: dict[str, int] = {}
                for kind, count in cells:
                    key = "thrown" if kind in ("rejected", "untested") else kind
                    kinds[key] = kinds.get(key, 0) + count
                shown[-1].append((length, ghost, kinds))
        lane = final["lanes"][name]
        assert shown == recount(lane)
        lengths, ghosts = zip(*((length, ghost) for length, ghost, _ in shown[-1]), strict=True)
        assert list(lengths) == [len(sequence["token_ids"]) for sequence in lane["sequences"]]
        # A lane that has a common stop, or never drafts, is as long as its ghost.
        assert (lengths == ghosts) == (name != "bass")
    written, ghost = (sum(row[i] for row in recount(final["lanes"]["bass"])[-1]) for i in (0, 1))
    expect(page.locator(".cache-line")).to_contain_text(
        f"So far {written} tokens. With one common stop, the same rounds would have written {ghost}: "
        f"separate lengths give {written / ghost:.2f} times as many."
    )


def _elsewhere(page: Page, final: dict[str, Any]) -> None:
    """A lane of an unknown method gets a section. A recording's readings that this machine lacks are shown."""
    assert page.inner_text("#lane-common h2") == "common"
    assert shown(page, "common") == [one["text"] for one in final["lanes"]["common"]["sequences"]]
    page.locator("[data-chart=flops]").scroll_into_view_if_needed()
    data = "document.querySelector('[data-chart=flops] .plot').data"
    page.wait_for_function(f"() => {data}?.length === 3")
    labels = ("BASS", "whole", "overlapping")
    assert page.evaluate(f"{data}.map(t => [t.name, t.y.at(-1)])") == [[label, 12.5] for label in labels]
    expect(page.locator("[data-reading=flops_utilization]")).to_have_text(
        ", ".join(f"{label} 12.5 %" for label in labels)
    )


# Draft lengths per row in the first rounds, which are too early for a row to end. Later rounds have length 4.
ROW_LENGTHS = [[3, 1], [0, 2], [1, 4], [2, 0], [2, 2]]
LENGTHS: dict[str, Any] = {"speculative": 2, "bass": RecordedLengths([*ROW_LENGTHS, 4])}
VERDICTS = {"accepted", "rejected", "untested"}
# Figures that extend beyond their lane's edge.
OUTSIDE = """[...document.querySelectorAll(".lane .figures :is(dt, dd)")].filter((e) =>
  e.getBoundingClientRect().right > e.closest(".lane").getBoundingClientRect().right).map((e) => e.textContent)"""


def of_trees(pair: ModelPair) -> tuple[dict[str, Any], int]:
    """(last snapshot, seed) of a race. BASS has a draft length for each row, and lane "tree" has static trees."""
    for seed in range(30):
        options: dict[str, Any] = {"n": 2, "max_new_tokens": 60, "sampling": SamplingParams(0.9), "seed": seed}
        options["verification"] = "rejection"
        snapshot = last_of(pair, lanes=["regular"], **options)
        for name, lengths in LENGTHS.items():
            snapshot["lanes"][name] = last_of(pair, lanes=[name], draft_length=lengths, **options)["lanes"][name]
        snapshot["lanes"]["tree"] = last_of(pair, lanes=["bass"], tree=(3, 2, 1), **options)["lanes"]["bass"]
        if (
            tree_step(snapshot)
            and [one["lengths"] for one in snapshot["lanes"]["bass"]["rounds"][1:6]] == ROW_LENGTHS
        ):
            return snapshot, seed
    raise AssertionError("no such race: try more seeds")


def rows_of(lane: dict[str, Any], sequence: int) -> list[dict[str, Any]]:
    """A sequence's rows in the rounds after its prefill."""
    return [row for record in lane["rounds"][1:] for row in record["rows"] if row["sequence"] == sequence]


def tree_step(final: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
    """A step (index, row) of the first sequence. Its tree has all verdicts, and its first draft is rejected."""
    rows = enumerate(rows_of(final["lanes"]["tree"], 0))
    fitting = (at for at in rows if at[1]["path"] and set(verdicts(at[1])) == VERDICTS)
    return next((at for at in fitting if at[1]["path"][0] > 0 and at[1]["written"] > at[1]["accepted"]), None)


def verdicts(row: dict[str, Any]) -> list[str]:
    """The expected verdict on each draft of a tree."""
    on_path = {-1, *row["path"]}
    tested = ["rejected" if parent in on_path else "untested" for parent in row["parents"]]
    return ["accepted" if i in row["path"] else verdict for i, verdict in enumerate(tested)]


def open_round(page: Page, lane: str, sequence: int, step: int) -> None:
    # A field that has the focus keeps its typed text, so take the focus away first.
    page.locator("[data-pick=round]").blur()
    page.select_option("[data-pick=lane]", lane)
    page.select_option("[data-pick=sequence]", index=sequence)
    page.fill("[data-pick=round]", str(step + 1))
    page.keyboard.press("Enter")


def test_trees_and_separate_draft_lengths_are_shown(opened: Page, pair: ModelPair) -> None:
    final, seed = of_trees(pair)
    fill(opened)  # hides the preset's sentence
    asked = {"batch_size": 2, "max_new_tokens": 60, "verification": "rejection", "lanes": list(LANES)}
    play(opened, [final], race_settings(seed=seed, **asked))
    step, row = tree_step(final) or (0, {})
    open_round(opened, "tree", 0, step)
    _verdicts(opened, row)
    _numbers(opened, row)
    assert_accessible(opened)
    _path_only(opened, row)
    # A chain is shown as a table, with its row's draft length.
    for at in (0, 2):
        chain, length = rows_of(final["lanes"]["bass"], 1)[at], ROW_LENGTHS[at][1]
        open_round(opened, "bass", 1, at)
        expect(opened.locator(".tree-part")).to_be_hidden()
        expect(opened.locator(".round-scroll tr:first-child td")).to_have_count(len(chain["drafted"]))
        expect(opened.locator(".round-line")).to_contain_text(f"draft length {length}, {length} drafted")
    code = opened.locator(".snippet code").text_content() or ""
    assert "[[3, 1]] + [[0, 2]] + [[1, 4]] + [[2, 0]] + [2] + [4] * " in code
    # On a phone, the tree scrolls inside its box, and no figure extends beyond its lane's edge.
    assert opened.evaluate(OUTSIDE) == []
    opened.set_viewport_size({"width": 390, "height": 844})
    open_round(opened, "tree", 0, step)
    opened.eval_on_selector(".tree", "e => e.style.setProperty('--columns', 12)")
    wide = "e => [e.scrollWidth > e.clientWidth, e.getBoundingClientRect().right <= innerWidth]"
    assert opened.eval_on_selector(".tree-box", wide) == [True, True]
    opened.eval_on_selector(".tree-box", "e => e.scrollTo(500, 0)")
    assert opened.eval_on_selector(".tree-box", "e => e.scrollLeft") > 0
    assert opened.evaluate(OUTSIDE) == []
    assert_fits(opened, 390)
    _greedy(opened, pair)


def _verdicts(page: Page, row: dict[str, Any]) -> None:
    """The tree shows each draft once, with its verdict."""
    expect(page.locator(".round-line")).to_contain_text(f"a tree of {len(row['drafted'])} drafts, ")
    expect(page.locator(".round-scroll")).to_be_hidden()
    expected = verdicts(row)
    for verdict in VERDICTS:
        expect(page.locator(f".node-{verdict}")).to_have_count(expected.count(verdict))
    expect(page.locator(".node")).to_have_count(len(expected) + 2)
    expect(page.locator(".tree path")).to_have_count(len(expected) + 1)
    # The top row is the text: newest token, accepted path, the target's token.
    places = "all => all.map(e => [e.style.getPropertyValue('--row'), e.style.getPropertyValue('--column')])"
    top = page.eval_on_selector_all(".node-newest, .node-accepted, .node-recovered, .node-bonus", places)
    assert sorted(top, key=lambda at: int(at[1])) == [["0", str(i)] for i in range(row["accepted"] + 2)]
    all_places = page.eval_on_selector_all(".node", places)
    assert len({tuple(at) for at in all_places}) == len(all_places), "two drafts at one place"
    struck = page.eval_on_selector(".node-rejected", "e => getComputedStyle(e).textDecorationLine")
    assert struck == "line-through"


def _numbers(page: Page, row: dict[str, Any]) -> None:
    """Pointer and keyboard show a draft's numbers."""
    line, first = page.locator(".tree-line"), row["path"][0]
    page.locator(".node-accepted").last.focus()
    page.keyboard.press("Home")
    expect(line).to_contain_text("newest token")
    page.keyboard.press("ArrowRight")
    expect(line).to_contain_text(f"{json.dumps(row['drafted_text'][first], ensure_ascii=False)}: accepted")
    expect(line).to_contain_text(f"p(x) {row['p'][first]:.3f}")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".node[tabindex='0']")).to_have_count(1)
    expect(page.locator(".node-newest")).to_be_focused()
    page.keyboard.press("End")
    expect(page.locator(".node-newest")).not_to_be_focused()
    # The line shows the draft under the pointer, and later the chosen one again.
    chosen = line.text_content()
    page.locator(".node-rejected").first.hover()
    expect(line).to_contain_text("rejected")
    page.locator("#inspector-title").hover()
    expect(line).to_have_text(chosen or "")
    page.locator(".node-untested").first.click()
    page.locator("#inspector-title").hover()
    expect(line).to_contain_text("not tested")


def _path_only(page: Page, row: dict[str, Any]) -> None:
    """Figures, tips and the downloaded table use the drafts of the path."""
    expect(page.locator(".figures-table tbody")).to_contain_text("drafts accepted (for trees: path / nodes)")
    page.locator("#lane-tree .sequence").first.locator(".token").nth(row["start"]).hover()
    tip, p = page.locator(".token-tip"), row["p"][row["path"][0]]
    expect(tip).to_contain_text(f"({len(row['drafted'])} drafted as a tree)")
    expect(tip).to_contain_text(f"p(x) {p:.3f}")
    table = csv.DictReader(saved(page, "[data-take=csv]").splitlines())
    at = ("tree", "0", str(row["start"]))
    (line,) = [one for one in table if (one["lane"], one["sequence"], one["index"]) == at]
    assert math.isclose(float(line["p"]), p, rel_tol=1e-5)


def _greedy(page: Page, pair: ModelPair) -> None:
    """At temperature 0, trees and tips have no random numbers."""
    snapshot = last_of(pair, lanes=["speculative", "bass"], n=1, max_new_tokens=30, tree=(3, 2))
    play(page, [snapshot], race_settings(batch_size=1, temperature=0))
    rows = rows_of(snapshot["lanes"]["bass"], 0)
    open_round(page, "bass", 0, next(i for i, row in enumerate(rows) if row["parents"]))
    page.locator(".node-newest").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".tree-line")).not_to_contain_text("p(x)")
    for origin in ("accepted", "recovered"):
        tokens = page.locator(f".sequence .token.{origin}")
        if tokens.count():
            tokens.first.hover()
            expect(page.locator(".token-tip")).to_contain_text("the target's most likely token")
            expect(page.locator(".token-tip")).not_to_contain_text("0.500")


def test_a_row_that_differs_shows_where_and_how_near_the_tie_was(opened: Page, pair: ModelPair) -> None:
    final = last_of(pair, n=3, max_new_tokens=30)

    def tie(at: int, ours: float | None, theirs: float | None, share: float | None) -> dict[str, Any]:
        return {"at": at, "ours": 5, "theirs": 9, "p_ours": ours, "p_theirs": theirs, "tie": share}

    comparison = {
        "speculative": [tie(26, 0.31, 0.30, 0.97), None, tie(0, 0.30312, 0.30348, 0.998)],
        "bass": [tie(4, 0.02, 0.9, 0.02), tie(7, None, None, None), tie(2, 0.30661, 0.30661, 1.0)],
    }
    play(opened, [final | {"comparison": comparison}])

    def differs(lane: str, row: int, at: int, more: str = "") -> str:
        sequences = (final["lanes"][name]["sequences"][row] for name in (lane, "regular"))
        ours, other = (json.dumps(sequence["pieces"][at]) for sequence in sequences)
        return f"differs at token {at + 1}: {ours}, not {other}{more}"

    assert compared(opened, "regular") == [""] * 3
    assert compared(opened, "speculative") == [
        differs("speculative", 0, 26, " (a near tie: 0.31 against 0.30)"),
        "",
        differs("speculative", 2, 0, " (a near tie: 0.3031 against 0.3035)"),
    ]
    assert compared(opened, "bass") == [
        differs("bass", 0, 4, " (0.02 against 0.90)"),
        differs("bass", 1, 7),
        differs("bass", 2, 2, " (a near tie: 0.31 each)"),
    ]
    assert exported(opened)["comparison"] == comparison
    opened.evaluate("() => { Bass.run().head.settings.temperature = 0.7; }")
    words = opened.evaluate("() => Bass.compared().speculative[0]")
    assert words == differs("speculative", 0, 26, " (a near tie after the random draw: 0.31 against 0.30)")
    # A race without settings has no snippet, because it can't be repeated. Without a comparison, no row is marked.
    expect(opened.locator(".snippet")).to_be_hidden()
    final.pop("comparison", None)
    play(opened, [final])
    assert [compared(opened, lane) for lane in LANES] == [[None] * 3] * 3
    assert exported(opened)["comparison"] is None


def test_a_fourth_lane_is_shown_with_its_bars(page: Page) -> None:
    open_settings(page)
    page.get_by_role("checkbox", name="AMUSD").check()
    fill(page, batch=1, tokens=24)
    run_to_the_end(page, (*LANES, "amusd"))
    lane = page.get_by_role("region", name="AMUSD")
    expect(lane.locator(".sequence")).to_have_count(1)
    assert len(shown(page, "amusd")[0]) > 0
    bars = page.locator("[data-axis=amusd]")
    page.wait_for_function("row => row.bars?.length > 0", arg=bars.element_handle())
    expect(bars.locator("canvas")).to_have_attribute(
        "aria-label", re.compile("roll-backs, .* drafts thrown away$")
    )
    # Four lanes fit side by side.
    tops = [page.locator(f"#lane-{name}").bounding_box() for name in (*LANES, "amusd")]
    assert [box and round(box["y"]) for box in tops].count(round(tops[0]["y"] if tops[0] else -1)) == 4
    page.get_by_role("checkbox", name="AMUSD").uncheck()
    run_to_the_end(page)
    expect(page.locator("#lane-amusd")).to_be_hidden()


def test_tokens_that_a_grammar_makes_certain_have_their_own_look(opened: Page, pair: ModelPair) -> None:
    legend = opened.locator(".legend .certain")
    expect(legend).to_be_hidden()
    schema = {"enum": ["certainly, yes", "certainly, no"]}
    final = last_of(pair, n=2, max_new_tokens=40, draft_length=8, json_schema=schema)
    certain = sum(
        row["accepted"] for round_ in final["lanes"]["bass"]["rounds"] for row in round_["rows"] if row["certain"]
    )
    assert certain > 10
    play(opened, [final], race_settings(json_schema=json.dumps(schema), batch_size=2))
    expect(legend).to_be_visible()
    lane, written = opened.locator("#lane-bass"), final["lanes"]["bass"]["metrics"]["new_tokens"]
    expect(lane.locator(".lane-line")).to_have_text(f"{certain} of {written} tokens were certain drafts")
    expect(lane.locator(".token.certain.accepted")).to_have_count(certain)
    expect(opened.locator("#lane-regular .token.certain")).to_have_count(0)
    lane.locator(".token.certain").first.hover()
    expect(opened.locator(".token-tip")).to_contain_text(
        "certain: the schema or grammar allows no other token here"
    )
    play(opened, [last_of(pair, n=2, max_new_tokens=8)], race_settings(batch_size=2))
    expect(legend).to_be_hidden()
    expect(lane.locator(".lane-line")).to_have_text("guesses, checks, all rows at once")
