"""The lanes' timelines and the picture of the cache say what the exported JSON says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from bass_core import ModelPair, SamplingParams, race
from ui.page.limits import Limits
from ui.page.request import make_request

from ..browser import LANES, fill, play, run_to_the_end, shown
from ..conftest import watched

pytestmark = pytest.mark.slow
ROWS, SEED = 3, 4
# Lanes more, "whole": without the parts of a round's time; "beside": draft and target at one time; "common": the
# batch stops at its first rejection.
SPANS: dict[str, Any] = {
    "target_busy_ms": 40.0,
    "draft_busy_ms": 20.0,
    "rolled_back": 2,
    "thrown_away": 7,
    "note": None,
}


@pytest.fixture(scope="module")
def final(pair: ModelPair) -> dict[str, Any]:
    """The last snapshot of a race, with two more lanes made from its BASS lane, and one from another race."""
    ways: dict[str, Any] = {"n": ROWS, "max_new_tokens": 40, "draft_length": 3, "seed": SEED}
    # A pair's first rounds take so long that the others would be too narrow to be drawn.
    *_, _ = race(pair, "Hello", sampling=SamplingParams(0.9), **ways)
    *_, shot = race(pair, "Hello", sampling=SamplingParams(0.9), **ways)
    *_, common = race(
        pair, "Hello", sampling=SamplingParams(0.9), lanes=["bass"], verification="common_stop", **ways
    )
    shot["lanes"]["common"] = common["lanes"]["bass"]
    made: dict[str, Any] = json.loads(json.dumps(shot))
    bass = made["lanes"]["bass"]
    rounds = [record | {"draft_ms": None, "verify_ms": None} for record in bass["rounds"]]
    made["lanes"]["whole"] = bass | {"rounds": rounds}
    end = bass["clock_ms"]
    spans = {"target": [[0, end / 4], [end / 2, end]], "draft": [[end / 4, 3 * end / 4]], "rollbacks": [end / 2]}
    made["lanes"]["beside"] = bass | {"timeline": SPANS | spans}
    return made


@pytest.fixture(scope="module")
def page(final: dict[str, Any], context: BrowserContext, server: str) -> Iterator[Page]:
    """A page that has played the race, its timelines from the beginning to the end."""
    asked = {"prompt": "Hello", "batch_size": ROWS, "temperature": 0.9, "seed": SEED}
    with watched(context, server) as page:
        page.set_viewport_size({"width": 1900, "height": 1000})
        play(page, [final], make_request(asked, Limits()).settings())
        page.click("[data-switch=whole-race]")
        yield page
        page.set_viewport_size({"width": 1400, "height": 900})


def strip(page: Page, lane: str) -> tuple[list[dict[str, Any]], float, float, float]:
    """What a lane's timeline shows: its blocks, the shown part of the clock in ms, and pixels a ms."""
    figure = page.locator(f"#lane-{lane} .strip")
    figure.scroll_into_view_if_needed()
    shown = "f => f.blocks && [f.blocks, +f.dataset.from, +f.dataset.to, f.querySelector('canvas').clientWidth]"
    page.wait_for_function(f"lane => ({shown})(document.querySelector(`#lane-${{lane}} .strip`))", arg=lane)
    blocks, begin, end, width = figure.evaluate(shown)
    return blocks, begin, end, (width - 42) / (end - begin)


def exported(page: Page) -> dict[str, Any]:
    """The lanes of the JSON that the page's button gives."""
    lanes: dict[str, Any] = page.evaluate("JSON.parse(Bass.asJson()).lanes")
    return lanes


def parts(lane: dict[str, Any]) -> list[tuple[str, float, float, int]]:
    """(track, begin, end, round) of all blocks, from the exported rounds."""
    found, begin = [], 0.0
    for one in lane["rounds"]:
        if one["kind"] == "prefill":
            found.append(("target", begin, one["ms"], 0))
        else:
            drafted = begin + one["draft_ms"]
            verified = drafted + one["verify_ms"]
            spans = [("draft", begin, drafted), ("target", drafted, verified), ("host", verified, one["ms"])]
            found += [(*span, one["round"]) for span in spans if span[2] > span[1]]
        begin = one["ms"]
    return found


def test_widths_are_the_exported_milliseconds(page: Page, final: dict[str, Any]) -> None:
    lanes, drawn_alone = exported(page), 0
    for name in LANES:
        blocks, begin, end, scale = strip(page, name)
        assert begin == 0 and end == max(lane["clock_ms"] for lane in final["lanes"].values())
        known = parts(lanes[name])
        for row in ("target", "draft", "host"):
            drawn = sum(block["width"] for block in blocks if block["row"] == row)
            assert drawn == pytest.approx(scale * sum(b - a for at, a, b, _ in known if at == row), abs=0.01)
        alone = [block for block in blocks if block["round"] and block["kind"] != "prefill"]
        drawn_alone += len(alone)
        for block in alone:
            (span,) = (one for one in known if (one[0], one[3]) == (block["row"], block["round"]["round"]))
            assert (block["begin"], block["end"]) == pytest.approx(span[1:3])
            place = pytest.approx((42 + scale * span[1], scale * (span[2] - span[1])), abs=0.01)
            assert (block["x"], block["width"]) == place
        kinds = {block["kind"] for block in blocks}
        assert kinds <= ({"prefill", "plain", "host"} if name == "regular" else {*kinds, "verify", "draft"})
    # Rounds narrower than a pixel are drawn together; those of the slowest lane are wide on any machine.
    assert drawn_alone


def test_the_newest_part_has_one_scale_and_ends_at_each_lane_s_clock(page: Page, final: dict[str, Any]) -> None:
    page.click("[data-switch=whole-race]")
    spans = set()
    for name in LANES:
        _, begin, end, _ = strip(page, name)
        spans.add(round(end - begin, 6))
        assert end == pytest.approx(max(final["lanes"][name]["clock_ms"], end - begin))
        expect(page.locator(f"#lane-{name} .strip figcaption")).to_contain_text("Newest")
    assert len(spans) == 1
    page.click("[data-switch=whole-race]")


def test_a_click_or_enter_opens_the_round(page: Page) -> None:
    blocks, *_ = strip(page, "bass")
    block = max((b for b in blocks if b["kind"] == "verify" and b["round"]), key=lambda b: b["width"])
    canvas = page.locator("#lane-bass .strip canvas")
    canvas.hover(position={"x": block["x"] + block["width"] / 2, "y": 25})
    caption, number = page.locator("#lane-bass .strip figcaption"), block["round"]["round"]
    expect(caption).to_contain_text(f"Round {number}: ")
    expect(caption).to_contain_text(f"verification {block['round']['verify_ms']:.1f} + host")
    page.mouse.down()
    page.mouse.up()
    expect(page.locator(".round-line")).to_contain_text(f"Lane round {number},")
    expect(page.locator("[data-pick=lane]")).to_have_value("bass")
    canvas.focus()
    page.keyboard.press("End")
    last = exported(page)["bass"]["rounds"][-1]["round"]
    expect(caption).to_contain_text(f"Round {last}: ")
    page.keyboard.press("Enter")
    expect(page.locator(".round-line")).to_contain_text(f"Lane round {last},")


def test_a_round_whose_parts_are_not_known_is_not_split(page: Page) -> None:
    blocks, *_ = strip(page, "whole")
    assert {(block["row"], block["kind"]) for block in blocks} == {("target", "prefill"), ("target", "unsplit")}
    expect(page.locator("#lane-whole .strip figcaption")).not_to_contain_text("drafts")


def test_a_draft_beside_its_target_has_its_own_spans(page: Page, final: dict[str, Any]) -> None:
    lane = final["lanes"]["beside"]
    blocks, begin, _, scale = strip(page, "beside")
    for row in ("target", "draft"):
        drawn = [(block["x"], block["width"]) for block in blocks if block["row"] == row]
        spans = [pytest.approx((42 + scale * a, scale * (b - a))) for a, b in lane["timeline"][row]]
        assert begin == 0 and drawn == spans
    busy = [100 * lane["timeline"][key] / lane["clock_ms"] for key in ("target_busy_ms", "draft_busy_ms")]
    expect(page.locator("#lane-beside .strip figcaption")).to_contain_text(
        f"So far: target (above) busy {busy[0]:.0f} %, draft (below) {busy[1]:.0f} %; 2 roll-backs (red lines), "
        "7 drafts thrown away"
    )


# Of every round of the chosen lane: each row's length, ghost, and numbers of cells by kind.
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
    """The same from the rounds; drafts that were thrown away count together."""
    lengths, ghosts, frames = [0] * ROWS, [0] * ROWS, []
    for record in lane["rounds"]:
        kinds: list[dict[str, int]] = [{} for _ in range(ROWS)]
        going = [row for row in record["rows"] if row["written"] > row["accepted"]] or record["rows"]
        least = min(row["accepted"] for row in going)
        for row in record["rows"]:
            at, begin = row["sequence"], row["start"]
            lengths[at], ghosts[at] = lengths[at] + row["written"], ghosts[at] + min(row["written"], 1 + least)
            origins = lane["sequences"][at]["origins"][begin : begin + row["written"]]
            kinds[at] = {origin: origins.count(origin) for origin in origins}
            if thrown := len(row["drafted"]) - origins.count("accepted"):
                kinds[at]["thrown"] = thrown
        frames.append(list(zip(lengths[:], ghosts[:], kinds, strict=True)))
    return frames


def test_the_cache_s_cells_are_the_rounds_and_the_ghost_is_theirs(page: Page, final: dict[str, Any]) -> None:
    page.locator(".cache-part").scroll_into_view_if_needed()
    expect(page.locator(".cache-part select")).to_have_value("bass")
    for name in ("regular", "bass", "common"):
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
        # A batch that really stops together is its own ghost.
        assert (lengths == ghosts) == (name != "bass")
    page.select_option(".cache-part select", "bass")
    own, ghost = (sum(row[i] for row in recount(final["lanes"]["bass"])[-1]) for i in (0, 1))
    expect(page.locator(".cache-line")).to_contain_text(
        f"So far {own} tokens; with one common stop the same rounds would have written {ghost}, "
        f"so own lengths bring {own / ghost:.2f} times as many."
    )


def test_a_phone_shows_them_without_scrolling_sideways(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_timeout(300)
    blocks, *_ = strip(page, "bass")
    right = max(block["x"] + block["width"] for block in blocks)
    assert right <= page.locator("#lane-bass .strip canvas").evaluate("e => e.clientWidth") + 1
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.set_viewport_size({"width": 1900, "height": 1000})


def test_a_race_of_four_lanes_has_the_fourth_with_its_timeline(context: BrowserContext, server: str) -> None:
    with watched(context, server) as page:
        page.click("text=More settings")
        page.get_by_role("checkbox", name="AMUSD").check()
        fill(page, batch=1, tokens=24)
        run_to_the_end(page, (*LANES, "amusd"))
        lane = page.get_by_role("region", name="AMUSD")
        expect(lane.locator(".sequence")).to_have_count(1)
        assert len(shown(page, "amusd")[0]) > 0
        expect(lane.locator("figcaption")).to_contain_text("So far: target (above) busy")
        drawn = lane.locator(".strip").evaluate("figure => figure.blocks.map(block => block.row)")
        assert set(drawn) == {"target", "draft"}
        # Four lanes that do not fit side by side stand two by two.
        tops = [page.locator(f"#lane-{name}").bounding_box() for name in (*LANES, "amusd")]
        assert [box and round(box["y"]) for box in tops].count(round(tops[0]["y"] if tops[0] else -1)) == 2
        page.get_by_role("checkbox", name="AMUSD").uncheck()
        run_to_the_end(page)
        expect(page.locator("#lane-amusd")).to_be_hidden()
