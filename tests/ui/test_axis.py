"""The time axis, the drafts in the lanes and the opening, with the shipped recordings and without a model."""

from __future__ import annotations

import copy
import io
import re
from typing import Any

import pytest
from PIL import Image, ImageChops
from playwright.sync_api import BrowserContext, Page, expect

from ui.recordings.shelf import SHIPPED

from .browser import DRAWN, LANES, assert_accessible, assert_fits
from .conftest import watching

pytestmark = pytest.mark.slow
STATE = "() => Bass.tape.state"
# What the lanes show: the texts, the drafts in sight, and the rejected drafts.
SHOWN = """() => Object.fromEntries([...document.querySelectorAll(".lane:not([hidden])")].map((lane) => [
  lane.dataset.lane, [...lane.querySelectorAll(".sequence")].map((text) => ({
    text: text.textContent,
    drafts: [...text.querySelectorAll(".draft:not([hidden])")].map((draft) => draft.dataset.text),
    fallen: [...text.querySelectorAll(".fallen")].map((one) => one.dataset.text),
  }))]))"""
# The origins of the last tokens of a text.
ORIGINS = "(text, count) => [...text.querySelectorAll('.token')].slice(-count).map((e) => e.classList[1])"
BARS = """() => Object.fromEntries([...document.querySelectorAll("[data-axis]")]
  .map((row) => [row.dataset.axis, row.bars]))"""


FLAGS = "() => Object.keys(document.querySelector('.axis').flags).sort()"
# The labels of figures at which the Tab key stops.
STOPS = """() => [...document.querySelectorAll(".lane:not([hidden]) .figures .term")]
  .filter((e) => e.tabIndex === 0).map((e) => `${e.closest(".lane").dataset.lane} ${e.textContent}`)"""
# For each rejected draft in a text: whether it is wide enough to read, and ends before its token begins.
ASIDE = """() => [...document.querySelectorAll(".fallen")].map((draft) => {
  const range = document.createRange(), box = draft.getBoundingClientRect();
  range.selectNodeContents(draft.nextSibling);
  const token = [...range.getClientRects()][0];
  return box.width > 4 && (box.right <= token.left + 1 || box.bottom <= token.top);
})"""


def rounds(name: str, lane: str) -> list[dict[str, Any]]:
    """The rounds of a lane, each with `begin` and `end` in race time: the lane's clock without its prefills."""
    found, clock, before = [], 0.0, 0.0
    for snapshot in SHIPPED[name].recording["snapshots"]:
        for line in snapshot["lines"]:
            for one in line.get(lane, {"rounds": []})["rounds"]:
                spent, before = one["time_ms"] - before, one["time_ms"]
                if one["kind"] != "prefill":
                    found.append(one | {"begin": clock, "end": clock + spent})
                    clock += spent
    return found


def seek(page: Page, ms: float) -> dict[str, Any]:
    """Put the playhead at `ms`, and return what the lanes show then."""
    page.evaluate("(ms) => Bass.tape.seek(ms)", ms)
    page.wait_for_function(DRAWN)
    shown: dict[str, Any] = page.evaluate(SHOWN)
    return shown


def load(page: Page, document: dict[str, Any]) -> None:
    """Show the end of this recording."""
    page.evaluate("(document) => { Bass.tape.load(document, { name: 'test' }); Bass.tape.live(); }", document)
    page.wait_for_function(DRAWN)


def only(*lanes: str) -> dict[str, Any]:
    """The recording "win" as a race of these lanes, without a verdict."""
    document = copy.deepcopy(SHIPPED["win"].recording)
    document["head"]["lanes"] = list(lanes)

    def part(whole: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in whole.items() if name in lanes}

    for snapshot in document["snapshots"]:
        view = snapshot["view"]
        view |= {"lanes": part(view["lanes"]), "verdict": {"head": None, "lanes": {}}}
        view.pop("comparison", None)
        if "regular" not in lanes:
            for figures in view["lanes"].values():
                figures["metrics"] |= {"speedup": None, "round_cost": None}
        snapshot["lines"] = [part(line) for line in snapshot["lines"]]
    return document


def test_the_flags_and_bars_follow_from_the_rounds(film: Page) -> None:
    flags = film.evaluate("() => document.querySelector('.axis').flags")
    figures = SHIPPED["win"].recording["snapshots"][-1]["view"]["lanes"]
    for lane in LANES:
        steps = rounds("win", lane)
        assert flags[lane] == pytest.approx(steps[-1]["end"])
        # The ratio of the flags is the headline's speed-up, because prompts have no width.
        speedup = flags["regular"] / flags[lane]
        assert speedup == pytest.approx(figures[lane]["metrics"]["speedup"], rel=2e-3)
        expect(film.locator(f"[data-axis={lane}] .axis-flag")).to_have_text(f"{flags[lane] / 1000:.2f} s")
    bass = flags["regular"] / flags["bass"]
    expect(film.locator(".verdict-head")).to_have_text(f"BASS was fastest: {bass:.2f}× the speed of Regular.")
    # Speculative reads each of its prompts when its turn comes: their time is written, but has no width.
    last = [rounds("win", lane)[-1] for lane in LANES]
    reading = [f"{step['time_ms'] - step['end']:.0f} ms to read the question" for step in last]
    assert film.locator(".axis-read").all_text_contents() == reading
    end, bars = max(flags.values()), film.evaluate(BARS)
    width = film.locator("[data-axis=bass] canvas").evaluate("e => e.getBoundingClientRect().width")
    written = {lane: [sum(r["written"] for r in one["rows"]) for one in rounds("win", lane)] for lane in LANES}
    most = max(map(max, written.values()))
    height = film.locator("[data-axis=bass] canvas").evaluate("e => e.getBoundingClientRect().height") - 1
    for lane in LANES:
        for bar, one, tokens in zip(bars[lane], rounds("win", lane), written[lane], strict=True):
            assert bar["x"] == pytest.approx(one["begin"] * width / end, abs=0.01)
            assert bar["width"] == pytest.approx((one["end"] - one["begin"]) * width / end, abs=0.01)
            assert bar["height"] == pytest.approx(max(2, tokens * height / most))
        count, time = len(written[lane]), flags[lane]
        means = f"{sum(written[lane]) / count:.1f}".removesuffix(".0"), f"{time / count:.0f}"
        expect(film.locator(f"[data-axis={lane}] .axis-means")).to_have_text(f"{means[0]} tokens in {means[1]} ms")


def test_a_lane_that_was_stopped_or_failed_has_no_flag(film: Page) -> None:
    document = copy.deepcopy(SHIPPED["win"].recording)
    for snapshot in document["snapshots"]:
        snapshot["view"]["lanes"].get("regular", {})["finished"] = False
    load(film, document | {"ended": "stopped"})
    assert film.evaluate(FLAGS) == ["bass", "speculative"]
    document["snapshots"][-1]["view"]["lanes"]["bass"]["error"] = "out of memory"
    load(film, document)
    assert film.evaluate(FLAGS) == ["regular", "speculative"]


def test_a_race_without_regular_or_of_one_lane(film: Page) -> None:
    """It asks about its own lanes, shows its speeds on a phone too, and explains them by keyboard."""
    head, ms = film.locator(".verdict-head"), film.locator("#lane-bass [data-figure=ms_per_token]")
    for lanes in (("regular", "bass"), ("speculative", "bass"), ("bass",), ("regular",)):
        load(film, only(*lanes))
        stop = next((lane for lane in lanes if lane != "regular"), "regular")
        labels = [f"{stop} {label}" for label in ("over Regular", "ms per token, per row", "accepted")]
        assert film.evaluate(STOPS) == labels, lanes
        one = "One decoder runs alone, so there is no race."
        expect(head).to_have_text(
            one if len(lanes) == 1 else "The race has no winner: too few decoders have a speed to compare."
        )
        seek(film, 300.0)
        expect(head).to_have_text(one if len(lanes) == 1 else "Two decoders, one model: which is fastest?")
        for size in ((390, 844), (1400, 900)):
            film.set_viewport_size({"width": size[0], "height": size[1]})
            if "regular" not in lanes:
                expect(ms).to_have_text(re.compile(r"^\d+\.\d+$"))
            expect(ms).to_be_visible(visible="bass" in lanes and (size[0] > 700 or "regular" not in lanes))


def test_the_speed_in_use_pauses(film: Page) -> None:
    for plays in (True, False, True):
        film.click("[data-speed='0.1']")
        assert film.evaluate(STATE)["playing"] == plays
    film.evaluate("() => Bass.tape.pause()")


def test_a_speed_goes_on_from_the_opening(context: BrowserContext, shelf: str) -> None:
    with watching(context, shelf) as watch:
        page = watch.page
        page.goto(shelf)
        page.wait_for_function("() => window.Bass?.scenes && Bass.tape.state.playing")
        # The end of the opening changes the speed to the same value.
        page.evaluate(
            "() => Bass.scenes.show(0).then(() => document.querySelector('[data-speed=\"0.1\"]').click())"
        )
        state = page.evaluate(STATE)
        assert (state["playing"], state["speed"]) == (True, 0.1)


def test_the_playhead_covers_no_time(film: Page) -> None:
    label = film.locator(".axis-ruler span").nth(2)
    at = float(label.text_content() or "") * 1000
    looks = []
    for ms in (at, at / 3):
        seek(film, ms)
        looks.append(Image.open(io.BytesIO(label.screenshot())).convert("L"))
    # Antialiasing may differ a little.
    assert ImageChops.difference(*looks).getextrema()[1] < 48


def test_a_drafted_end_token_is_named(film: Page) -> None:
    last = rounds("win", "speculative")
    one = next(r for r in last if any("<|im_end|>" in (row["drafted_text"] or []) for row in r["rows"]))
    shown = seek(film, one["begin"] + 0.9 * (one["end"] - one["begin"]))["speculative"]
    assert shown[one["rows"][0]["sequence"]]["drafts"][-1] == " (end)"


def test_drafts_stand_in_grey_and_are_judged(film: Page) -> None:
    for lane in ("speculative", "bass"):
        for at, one in enumerate(rounds("win", lane)[:4]):
            begin, end = one["begin"], one["end"]
            standing = seek(film, begin + 0.9 * (end - begin))[lane]
            judged = seek(film, end)[lane]
            for row in one["rows"]:
                before, after = standing[row["sequence"]], judged[row["sequence"]]
                assert before["drafts"] == row["drafted_text"], (lane, at)
                kept, thrown = row["drafted_text"][: row["accepted"]], row["drafted_text"][row["accepted"] :]
                assert after["text"].startswith(before["text"] + "".join(kept))
                replaced = thrown and row["written"] > row["accepted"]
                struck = [thrown[0].strip() + ("…" if len(thrown) > 1 else "")] if replaced else []
                assert after["fallen"] == struck
                assert after["drafts"] == []
                text = film.locator(f"#lane-{lane} .sequence").nth(row["sequence"])
                origins = text.evaluate(ORIGINS, row["written"])
                assert origins[: row["accepted"]] == ["accepted"] * row["accepted"]
                assert len(origins) == row["accepted"] or origins[-1] in ("recovered", "bonus")
    # Early in a round, no draft is written yet.
    first = rounds("win", "bass")[1]
    assert seek(film, first["begin"] + 0.01)["bass"][0]["drafts"] == []


def test_on_a_phone_a_still_rejected_draft_is_beside_its_token(film: Page) -> None:
    film.set_viewport_size({"width": 390, "height": 844})
    film.emulate_media(reduced_motion="no-preference")
    rejecting = (
        r for r in rounds("win", "bass") if any(row["accepted"] < len(row["drafted"]) for row in r["rows"])
    )
    seek(film, next(rejecting)["end"])
    aside = film.evaluate(ASIDE)
    assert aside and all(aside)
    film.emulate_media(reduced_motion="reduce")
    film.evaluate("() => document.querySelector('.lane-grid').classList.remove('still')")
    assert all(film.evaluate(ASIDE))


def test_the_drawing_depends_only_on_the_time(film: Page) -> None:
    """Going forward, back or straight to a time shows the same texts, and none that is later."""
    times = [0.0, 30.0, 170.0, 333.0, 700.0, 1030.0]
    tokens = "() => [...Bass.tape.race.lanes].map(([name, { rows }]) => [name, rows.map(({ spans }) => "
    texts = dict(film.evaluate(f"{tokens}spans.map((span) => span.text))])"))
    assert all("".join(text) == "".join(texts["regular"][0]) for lane in LANES for text in texts[lane])
    forward = [seek(film, ms) for ms in times]
    assert [seek(film, ms) for ms in reversed(times)] == forward[::-1]
    for ms, shown in zip(times, forward, strict=True):
        for lane in LANES:
            ended = [one for one in rounds("win", lane) if one["end"] <= ms + 1e-6]
            for at, row in enumerate(shown[lane]):
                count = sum(r["written"] for one in ended for r in one["rows"] if r["sequence"] == at)
                text = texts[lane][at]
                # Besides the rounds, reading the prompt writes a first token, when its turn has come.
                assert row["text"] in ("".join(text[: count + 1]), "" if count == 0 else None), (ms, lane, at)
    # The rest of the page is not later than the playhead, and the run has its round.
    film.evaluate("() => Bass.tape.seek(150)")
    assert film.evaluate("() => Bass.tape.roundAt('bass').record.round") == 6
    assert film.evaluate("() => Bass.run().lanes.get('bass').rounds.at(-1).round") >= 6
    assert film.evaluate("() => Bass.run().done") is False


def test_the_playhead_is_dragged_stepped_and_played(film: Page) -> None:
    slider, canvas = film.locator(".axis-slider"), film.locator("[data-axis=regular] canvas")
    end = film.evaluate(STATE)["end"]
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box
    film.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + 10)
    film.mouse.down()
    film.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 10, steps=5)
    film.mouse.up()
    assert film.evaluate(STATE)["ms"] == pytest.approx(end / 2, abs=5)
    film.wait_for_function(DRAWN)
    line = film.locator(".axis-line").bounding_box()
    assert line and line["x"] == pytest.approx(box["x"] + box["width"] / 2, abs=3)
    # The figures follow once the playhead rests.
    film.wait_for_function("() => !Bass.run().done")
    slider.focus()
    film.keyboard.press("Home")
    assert film.evaluate(STATE)["ms"] == 0
    bass = rounds("win", "bass")
    ends = sorted(one["end"] for lane in LANES for one in rounds("win", lane))
    film.keyboard.press("ArrowRight")
    first = film.evaluate(STATE)["ms"]
    assert first == pytest.approx(min(ends[0], bass[0]["end"] / 2, rounds("win", "speculative")[0]["end"] / 2))
    expect(slider).to_have_attribute(
        "aria-valuetext", f"{first / 1000:.2f} s: Regular 0 tokens, Speculative 0 tokens, BASS 0 tokens"
    )
    film.keyboard.press("ArrowLeft")
    assert film.evaluate(STATE)["ms"] == 0
    # Each speed is written out, and plays to the end.
    film.click("[data-speed='0.1']")
    expect(film.locator(".axis-words")).to_contain_text(" at 1/10 speed")
    film.click("[data-speed='1']")
    expect(film.locator(".axis-words")).to_have_text(f"{end / 1000:.2f} s")
    assert film.evaluate(STATE)["ms"] == end and film.evaluate("() => Bass.run().done")
    film.click("[data-tape=next]")
    film.evaluate("() => { Bass.tape.seek(100); Bass.tape.speed = 0.04; Bass.tape.play(); }")
    expect(film.locator(".axis-words")).to_contain_text(" at 1/25 speed")
    film.click("[data-tape=play]")
    assert not film.evaluate(STATE)["playing"]


def test_a_step_is_chosen_with_keys_or_a_click_and_opens_in_the_inspector(film: Page) -> None:
    canvas, words = film.locator("[data-axis=bass] canvas"), film.locator(".axis-words")
    canvas.focus()
    for _ in range(3):
        film.keyboard.press("ArrowRight")
    third = rounds("win", "bass")[2]
    expect(words).to_contain_text(f"BASS, Round 3: 16 tokens in {third['end'] - third['begin']:.1f} ms = drafts ")
    expect(film.locator(".board-spoken")).to_contain_text("Round 3: 16 tokens")
    film.keyboard.press("Enter")
    expect(film.locator(".round-line")).to_contain_text("The lane's round 3,")
    expect(film.locator("[data-pick=lane]")).to_have_value("bass")
    assert film.evaluate(STATE)["ms"] == pytest.approx(third["end"])
    film.evaluate("() => Bass.tape.live()")
    film.wait_for_function(DRAWN)
    bar = film.evaluate(BARS)["bass"][6]
    canvas.click(position={"x": bar["x"] + bar["width"] / 2, "y": 20})
    expect(film.locator(".round-line")).to_contain_text("The lane's round 7,")
    # One tab stop per lane.
    assert film.locator(".axis canvas[tabindex='0']").count() == 3
    for width in (390, 1024, 1400):
        assert_fits(film, width)
    assert_accessible(film)


def said(page: Page, text: str) -> None:
    expect(page.locator(".said")).to_contain_text(text, timeout=60_000)


ONE_READER = (
    "The question is read. Three decoders of one model begin to answer.",
    "Regular: one step of the model writes one token.",
    "BASS copies 3 guesses from the text; one step checks them.",
    "All 3 hold: BASS writes 4 tokens in one step, Regular 1.",
    "So BASS is faster: 3.3 tokens in the time of 1.1 steps.",
    "Same text, 3.3 times as fast.",
)


def test_the_opening_explains_in_three_scenes_and_loops(context: BrowserContext, shelf: str) -> None:
    speeds = {
        name: {lane: rounds(name, "regular")[-1]["end"] / rounds(name, lane)[-1]["end"] for lane in LANES}
        for name in ("one", "win")
    }
    assert all(2.5 < speeds["one"][lane] < 3.5 for lane in ("speculative", "bass"))
    assert speeds["win"]["speculative"] < 1 and speeds["win"]["bass"] > 2
    with watching(context, shelf) as watch:
        page = watch.page
        page.goto(shelf)
        for sentence in ONE_READER:
            said(page, sentence)
        said(page, "Now four people ask at once.")
        assert page.evaluate("() => Bass.tape.state.recorded.name") == "win"
        said(page, "Speculative: one row after another: rows 2 to 4 wait.")
        assert page.locator("#lane-speculative .waits").count() == 3
        said(page, f"14 tokens in the time of 1.2 steps: {speeds['win']['bass']:.1f} times as fast.")
        said(page, "172 of 172 tokens are the same. Guessing changes nothing but the speed.")
        assert page.locator(".token.equal").count() == page.locator(".lane .sequence .token").count()
        said(page, "Recorded on ")
        said(page, ONE_READER[0])
        page.click("[data-skip]")
        expect(page.locator(".opening")).to_be_hidden()
        expect(page.locator(".verdict-head")).to_contain_text("BASS was fastest: ")
        assert not page.evaluate(STATE)["playing"]


def test_the_opening_says_why_bass_is_faster_within_ten_seconds(film: Page) -> None:
    film.click("[data-recording=one]")
    film.wait_for_function("() => Bass.tape.state.recorded?.name === 'one'")
    timed: list[tuple[str, int]] = film.evaluate(TIMED)
    assert [text for text, _ in timed] == list(ONE_READER)
    reason = ONE_READER.index("All 3 hold: BASS writes 4 tokens in one step, Regular 1.")
    assert sum(ms for _, ms in timed[: reason + 1]) < 9000
    for name in ("one", "win", "loss"):
        film.click(f"[data-recording={name}]")
        film.wait_for_function("(name) => Bass.tape.state.recorded?.name === name", arg=name)
        said: list[str] = film.evaluate(
            "() => Bass.narrate(Bass.tape.race, Bass.tape.last).map(({ text }) => text)"
        )
        assert [text for text in said if len(text.split()) > 14] == []


def test_a_touch_of_the_axis_escape_or_a_panel_ends_the_opening(context: BrowserContext, shelf: str) -> None:
    with watching(context, shelf) as watch:
        page = watch.page
        for end in ("axis", "Escape", "scene", "steps"):
            page.goto(shelf)
            said(page, "The question is read.")
            page.wait_for_function("() => Bass.tape.state.playing")
            if end == "axis":
                page.click("[data-tape=next]")
                assert page.evaluate(STATE)["recorded"]["name"] == "one"
                assert not page.evaluate(STATE)["playing"]
            elif end == "Escape":
                page.keyboard.press("Escape")
                expect(page.locator(".verdict-head")).to_contain_text("BASS was fastest: ")
            else:
                page.get_by_role("button", name="Scene 3: The same text").click()
                said(page, "172 of 172 tokens are the same.")
                page.click("[data-recording=loss]" if end == "scene" else "[data-switch=stepping]")
            expect(page.locator(".opening")).to_be_hidden()
            assert page.locator(".step-part").is_visible() == (end == "steps")
            assert page.locator(".token.equal").count() == 0


def test_escape_closes_an_explanation_before_it_ends_the_opening(context: BrowserContext, shelf: str) -> None:
    with watching(context, shelf) as watch:
        page = watch.page
        page.goto(shelf)
        expect(page.locator(".opening")).to_be_visible()
        page.click("#lane-bass h2 .term")
        expect(page.locator(":popover-open")).to_have_count(1)
        page.keyboard.press("Escape")
        expect(page.locator(":popover-open")).to_have_count(0)
        expect(page.locator(".opening")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator(".opening")).to_be_hidden()


def test_with_reduced_motion_the_end_is_shown_and_can_be_stepped(context: BrowserContext, shelf: str) -> None:
    with watching(context, shelf) as watch:
        page = watch.page
        page.emulate_media(reduced_motion="reduce")
        page.goto(shelf)
        page.wait_for_function("() => window.Bass?.tape?.state.recorded && Bass.run()?.done")
        expect(page.locator(".opening")).to_be_hidden()
        expect(page.locator(".axis .motion:visible")).to_have_count(0)
        expect(page.locator(".verdict-head")).to_contain_text("BASS was fastest: ")
        page.click("[data-tape=next]")
        page.wait_for_function("() => Bass.tape.state.ms > 0 && Bass.tape.state.ms < 30")
        # The lanes are drawn in the next frame.
        page.wait_for_function(f"() => ({SHOWN})().bass[0].text === 'The'")
        expect(page.locator("[data-tape=back]")).to_be_enabled()


# The sentences for which the opening slows down, and how long it takes to read each, in ms.
TIMED = """async () => {
  const { narrate, readingTime } = await import("bass/race/narrate.js");
  const sentences = narrate(Bass.tape.race, Bass.tape.last).filter(({ first }) => first);
  return sentences.map(({ text }) => [text, readingTime(text)]);
}"""
NARRATED = """async ([head, line, view]) => {
  const { Race } = await import("bass/race/times.js"), race = new Race(head);
  race.add(line);
  return Bass.narrate(race, view).map(({ ms, text }) => [ms, text]);
}"""
Judged = tuple[list[str], int, str]


def narrated(
    page: Page, rows: int, lanes: dict[str, list[tuple[float, dict[int, Judged]]]], **metrics: float
) -> list[str]:
    """The sentences about a race. A lane's rounds are (ms, {row: (drafts, accepted, the model's own token)})."""
    line: dict[str, Any] = {}
    for name, all_rounds in lanes.items():
        new: dict[int, list[Any]] = {row: [["s", "The", 0.0, 0]] for row in range(rows)}
        records = []
        for number, (end, judged) in enumerate(all_rounds, 1):
            made = []
            for row, (drafts, accepted, own) in judged.items():
                start = len(new[row])
                written = [*(("a", text) for text in drafts[:accepted]), *([("r", own)] if own else [])]
                new[row] += [[origin, text, end, len(text)] for origin, text in written]
                made.append({"sequence": row, "start": start, "written": len(written), "accepted": accepted,
                             "drafted": [1] * len(drafts), "drafted_text": drafts, "parents": None, "path": None,
                             "detail": None})  # fmt: skip
            records.append({"kind": "verify", "round": number, "time_ms": end, "draft_ms": 0, "verify_ms": 1,
                            "draft_forwards": 1, "rows": made})  # fmt: skip
        line[name] = {"new": new, "rounds": records, "clock_ms": all_rounds[-1][0]}
    looks = {"regular": {"label": "Regular"}, "speculative": {"label": "Speculative"}, "bass": {"label": "BASS"}}
    head = {"lanes": list(lanes), "reference": "regular", "batch_size": rows, "looks": looks}
    verdict = {"head": "Regular and BASS were level." if metrics.pop("level", 0) else "BASS was fastest: it won."}
    view = {"done": True, "verdict": verdict, "lanes": {"bass": {"metrics": metrics}}}
    return [text for _, text in page.evaluate(NARRATED, [head, line, view])]


PLAIN: Judged = ([], 0, " x")
STEPS = [(10.0 * i, {0: PLAIN}) for i in range(1, 6)]


@pytest.mark.parametrize(("judged", "sentence"), [
    (([" a", " b", " c"], 3, " d"), "All 3 hold: BASS writes 4 tokens in one step, Regular 1."),
    (([" a"], 1, " d"), "The guess holds: BASS writes 2 tokens in one step, Regular 1."),
    (([" came", " in", " the"], 2, " slowly"),
     "“came in” holds. “the” is wrong: struck. The model writes “slowly”."),
    (([" a", " b", " c", " d", " e", " f"], 5, " g"), "5 hold. “f” is wrong: struck. The model writes “g”."),
    (([" sea", " a"], 0, " tide"), "“sea” is wrong: struck. One token, as in Regular, but guessing cost time."),
    (PLAIN, "BASS: nothing is guessed here, so it is a plain step."),
])  # fmt: skip
def test_a_step_is_told_by_its_outcome(film: Page, judged: Judged, sentence: str) -> None:
    rounds_of_bass = [(12.0, {0: judged}), (24.0, {0: ([" y"], 1, " z")})]
    assert sentence in narrated(film, 1, {"regular": STEPS, "bass": rounds_of_bass})


@pytest.mark.parametrize(("metrics", "sentence"), [
    ({"speedup": 2.0, "round_cost": 1.25}, "Same text, 2.0 times as fast."),
    ({"speedup": 1.01, "round_cost": 2.5, "level": 1},
     "2.5 tokens, but checking 3 takes as long as 2.5 steps here: level."),
    ({"speedup": 0.7, "round_cost": 3.1},
     "Half of the guesses are wrong, and checking them costs 3.1 steps: slower."),
    ({"speedup": 0.7, "round_cost": 3.6, "rate": 0.9},
     "2.5 tokens, but checking 3 takes as long as 3.6 steps here: slower."),
])  # fmt: skip
def test_the_end_is_told_by_the_verdict(film: Page, metrics: dict[str, float], sentence: str) -> None:
    metrics["acceptance_rate"] = metrics.pop("rate", 0.5)
    rounds_of_bass = [(12.0, {0: ([" a", " b"], 1, " c")}), (24.0, {0: ([" a", " b"], 2, " c")})]
    sentences = narrated(film, 1, {"regular": STEPS, "bass": rounds_of_bass}, **metrics)
    assert sentence in sentences
    # Regular wrote 6 tokens, and BASS 6, so no sentence compares their lengths.
    assert not any("shorter" in text for text in sentences)


def test_rows_and_rounds_without_guesses_are_told(film: Page) -> None:
    lanes: dict[str, Any] = {
        "regular": STEPS,
        "bass": [
            (12.0, {0: ([" a"], 0, " c"), 1: PLAIN}),
            *((12.0 + 10 * i, {0: PLAIN, 1: PLAIN}) for i in range(1, 5)),
        ],
    }
    sentences = narrated(film, 2, lanes, speedup=0.9, round_cost=1.0, acceptance_rate=0.1)
    assert "BASS: one of two rows guesses, and one step checks 1 guess." in sentences
    assert "The guess of row 1 is wrong: struck." in sentences
    assert "It guessed in only 1 of 5 rounds: slower." in sentences


def test_the_models_own_tokens_are_told_only_where_it_adds_them(film: Page) -> None:
    adds, ended = ([" a"], 1, " c"), ([" a"], 1, "")
    lanes: dict[str, Any] = {
        "regular": [(10.0 * i, {0: PLAIN, 1: PLAIN}) for i in range(1, 6)],
        "bass": [(12.0, {0: adds, 1: ended}), (24.0, {0: adds, 1: adds})],
    }
    sentences = narrated(film, 2, lanes)
    assert "Both hold: BASS writes 3 tokens in one step, Regular 2." in sentences
    assert "Both hold, and the model adds one per row: 4 tokens." in sentences
    lanes["bass"] = [(12.0, {0: ended, 1: ended})]
    assert "Both hold: 2 tokens." in narrated(film, 2, lanes)


def test_a_row_whose_guesses_all_hold_has_no_wrong_one(film: Page) -> None:
    lanes: dict[str, Any] = {
        "regular": [(10.0, {0: PLAIN, 1: PLAIN})],
        "bass": [(12.0, {0: ([" a"], 1, " c"), 1: ([" a", " b"], 1, " c")})],
    }
    assert "Each row keeps 1. A further guess is wrong: struck, and replaced." in narrated(film, 2, lanes)
    lanes["bass"] = [(12.0, {row: ([" a", " b"], 1, " c") for row in (0, 1)})]
    assert "Each row keeps 1. The next guess is wrong: struck, and replaced." in narrated(film, 2, lanes)


def test_rows_and_lengths_that_differ_are_told(film: Page) -> None:
    guess = [" a", " b"]
    lanes: dict[str, Any] = {
        "regular": [(10.0, {0: PLAIN, 1: PLAIN})],
        "speculative": [(12.0, {0: (guess, 2, " c")}), (24.0, {1: (guess, 2, " c")})],
        "bass": [(15.0, {0: (guess, 2, " c"), 1: (guess, 0, " c")}), (30.0, {1: (guess, 2, " c")})],
    }
    sentences = narrated(film, 2, lanes, speedup=1.5, round_cost=2.0, acceptance_rate=0.7)
    assert sentences == [
        "Now two people ask at once.",
        "Speculative: one row after another: row 2 waits.",
        "BASS: both guess, and one step checks 4 guesses.",
        "Regular: one step writes a token for each of the two.",
        "Row 1 keeps 2, row 2 keeps none. Nobody waits for the other.",
        "Row 1 is done. The others go on.",
        "BASS: a small guesser writes 2 tokens first.",
        "The model checks both in one step.",
        "Both hold: BASS writes 3 tokens in one step, Regular 1.",
        "3.5 tokens in the time of 2.0 steps: 1.5 times as fast.",
        "Regular ended first because its text is shorter: 4 tokens of 9.",
    ]
