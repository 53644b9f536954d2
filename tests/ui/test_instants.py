"""At any instant of a race, every text of the page says what the records say at that instant."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.support.page import hosted
from ui.recordings.recording import save
from ui.recordings.shelf import SHIPPED, RecordingOffer

from .browser import LANES
from .conftest import watched

pytestmark = pytest.mark.slow
NAMES = {"regular": "Regular", "speculative": "Speculative", "bass": "BASS"}
# The row of BASS that differs from Regular's, and the index of the first token that differs.
ROW, AT = 1, 10
# Resolves once nothing waits to be drawn.
DRAWN = """() => new Promise((done) => Bass.soon(() => setTimeout(() => Bass.soon(() => done(true)), 30)))"""
QUESTION = "Three decoders, one model: which is fastest?"
SHOWN = """() => {
  const text = (selector) => document.querySelector(selector)?.textContent ?? null;
  const all = (selector, root = document) => [...root.querySelectorAll(selector)].map((e) => e.textContent);
  const lanes = [...document.querySelectorAll(".lane:not([hidden])")].map((lane) => [lane.dataset.lane, {
    texts: all(".sequence", lane),
    marks: [...lane.querySelectorAll(".compared")].map((e) => (e.hidden ? null : e.textContent)),
    figures: Object.fromEntries(
      [...lane.querySelectorAll("[data-figure]")].map((e) => [e.dataset.figure, e.textContent])),
    state: lane.querySelector(".state").textContent,
    means: text(`[data-axis="${lane.dataset.lane}"] .axis-means`),
    flag: [...document.querySelectorAll(`[data-axis="${lane.dataset.lane}"] .axis-flag:not([hidden])`)].length > 0,
    glance: all(`[data-glance="${lane.dataset.lane}"] :is(.glance-speedup, .glance-ms)`),
  }]);
  return {
    lanes: Object.fromEntries(lanes), exact: text(".verdict-exact"), head: text(".verdict-head"),
    bet: text(".bet-line"), reasons: all(".verdict li"), round: text(".round-line"), rounds: text("[data-rounds]"),
    cache: text(".cache-line"), slider: document.querySelector(".axis-slider").getAttribute("aria-valuetext"),
    table: !document.querySelector(".bass-summary").hidden,
  };
}"""


def rounded(value: float, digits: int) -> str:
    """A number as the page's language rounds it: its shortest decimal digits, halves up."""
    return str(Decimal(str(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


@dataclass(frozen=True)
class Records:
    """A recording, and what it says at a race time."""

    document: dict[str, Any]

    def rounds(self, lane: str) -> list[dict[str, Any]]:
        """The records of a lane, each with `at`, the race time of its end: prefills take none."""
        found, clock, before = [], 0.0, 0.0
        for snapshot in self.document["snapshots"]:
            for line in snapshot["lines"]:
                for one in line.get(lane, {"rounds": []})["rounds"]:
                    spent, before = one["time_ms"] - before, one["time_ms"]
                    clock += spent * (one["kind"] != "prefill")
                    found.append(one | {"at": clock})
        return found

    def ended(self, lane: str, ms: float, *, prefills: bool = False) -> list[dict[str, Any]]:
        """The records that have ended by `ms`."""
        return [r for r in self.rounds(lane) if r["at"] <= ms + 1e-6 and (prefills or r["kind"] != "prefill")]

    def tokens(self, lane: str, row: int, ms: float) -> list[tuple[str, int]]:
        """The texts and ids of a row's tokens that are written by `ms`."""
        lines = (line[lane]["new"] for s in self.document["snapshots"] for line in s["lines"] if lane in line)
        tokens = [(text, token) for new in lines for _, text, _, token in new.get(str(row), [])]
        rows = (one for record in self.ended(lane, ms, prefills=True) for one in record["rows"])
        return tokens[: sum(one["written"] for one in rows if one["sequence"] == row)]

    def view(self, ms: float) -> dict[str, Any]:
        """The figures of the newest snapshot that is not later than `ms`."""
        newest = self.document["snapshots"][0]["view"]
        counts = dict.fromkeys(LANES, 0)
        ends = {lane: [record["at"] for record in self.rounds(lane)] for lane in LANES}
        for snapshot in self.document["snapshots"]:
            for line in snapshot["lines"]:
                for lane in LANES:
                    counts[lane] += len(line.get(lane, {"rounds": []})["rounds"])
            if all(not counts[lane] or ends[lane][counts[lane] - 1] <= ms + 1e-6 for lane in LANES):
                newest = snapshot["view"]
        return newest  # type: ignore[no-any-return]

    def exact(self, ms: float) -> str:
        """How many tokens equal Regular's."""
        equal = {}
        for lane in LANES[1:]:
            pairs = [pair for row in range(4) for pair in self.pairs(lane, row, ms)]
            equal[NAMES[lane]] = f"{sum(a == b for a, b in pairs)} of {len(pairs)}" if pairs else None
        whose = "equal to Regular’s" + ("" if self.view(ms)["done"] else " so far")
        counts = {count for count in equal.values() if count}
        if len(counts) < 2:
            return f"{counts.pop()} tokens {whose}" if counts else ""
        return ", ".join(f"{name}: {count} tokens" for name, count in equal.items() if count) + f" {whose}"

    def pairs(self, lane: str, row: int, ms: float) -> list[tuple[int, int]]:
        both = zip(self.tokens(lane, row, ms), self.tokens("regular", row, ms), strict=False)
        return [(ours, theirs) for (_, ours), (_, theirs) in both]

    def mark(self, ms: float) -> str:
        """The line below the row that differs, or "" if it does not yet."""
        if all(a == b for a, b in self.pairs("bass", ROW, ms)):
            return ""
        ours, theirs = (self.tokens(lane, ROW, ms)[AT][0] for lane in ("bass", "regular"))
        tie = " (a near tie: 0.31 against 0.30)" if self.view(ms)["done"] else ""
        return f'differs at token {AT + 1}: "{ours}", not "{theirs}"{tie}'

    def figures(self, lane: str, ms: float) -> dict[str, str]:
        about = self.view(ms)["lanes"].get(lane, {"metrics": {}, "finished": False})
        metrics = about["metrics"]
        speed, per_token, rate = (metrics.get(key) for key in ("speedup", "ms_per_token", "acceptance_rate"))
        if speed is None and not about["finished"]:
            per_token = None
        digits = 2 if per_token is None or per_token < 10 else 1
        return {
            "speedup": "–" if speed is None else f"{rounded(speed, 2)}×",
            "ms_per_token": "–" if per_token is None else rounded(per_token, digits),
            "acceptance_rate": "–" if rate is None else f"{rounded(100 * rate, 0)} %",
        }

    def means(self, lane: str, ms: float) -> str:
        rounds = self.ended(lane, ms)
        if not rounds:
            return ""
        written = sum(row["written"] for record in rounds for row in record["rows"])
        tokens = rounded(written / len(rounds), 1).removesuffix(".0")
        mean = rounds[-1]["at"] / len(rounds)
        return f"{tokens} {'token' if tokens == '1' else 'tokens'} in {rounded(mean, int(mean < 10))} ms"


@pytest.fixture(scope="module")
def records() -> Records:
    """The recording "win" with one token of BASS changed, so that a row differs from Regular's."""
    document = copy.deepcopy(SHIPPED["win"].recording)
    count = 0
    for snapshot in document["snapshots"]:
        for line in snapshot["lines"]:
            for token in line.get("bass", {"new": {}})["new"].get(str(ROW), []):
                if count == AT:
                    token[1], token[3] = " other", token[3] + 1
                count += 1
    tie = {"at": AT, "ours": 1, "theirs": 2, "p_ours": 0.31, "p_theirs": 0.30, "tie": 0.97}
    document["snapshots"][-1]["view"]["comparison"]["bass"][ROW] = tie
    return Records(document)


@pytest.fixture(scope="module")
def played(context: BrowserContext, records: Records, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A page that plays the recording, after a bet on Regular."""
    path = tmp_path_factory.mktemp("changed") / "changed.json.xz"
    save(records.document, path)
    offers = {"changed": RecordingOffer("changed", "Changed", "", path)}
    with hosted(None, about="", offers=offers) as address, watched(context, f"{address}/?present=1") as page:
        # The lanes would fill any height.
        page.add_style_tag(content=".sequences { --row: 67.2px !important; }")
        page.click("#run")
        page.keyboard.press("a")
        page.wait_for_function("() => Bass.run() && Bass.tape.state.playing")
        yield page


@pytest.fixture
def film(played: Page) -> Page:
    """The page at the end of the recording. It is so high that everything is in sight."""
    played.set_viewport_size({"width": 1400, "height": 3600})
    played.evaluate("() => Bass.tape.live()")
    expect(played.locator(".cache-line")).to_be_in_viewport()
    expect(played.locator(".round-line")).to_be_in_viewport()
    return played


def assert_right(page: Page, records: Records, ms: float) -> None:
    """Compare every text that depends on the instant with the records."""
    page.wait_for_function(DRAWN)
    shown, view = page.evaluate(SHOWN), records.view(ms)
    rows = range(4)
    for lane in LANES:
        part, finished = shown["lanes"][lane], view["lanes"].get(lane, {}).get("finished", False)
        assert part["texts"] == ["".join(t for t, _ in records.tokens(lane, row, ms)) for row in rows], (ms, lane)
        mark = records.mark(ms)
        own = mark if lane == "bass" else ""
        assert part["marks"] == [own if mark and row == ROW else None for row in rows], (ms, lane)
        assert part["figures"] == records.figures(lane, ms), (ms, lane)
        assert part["state"] == ("Finished" if finished else "Running"), (ms, lane)
        assert part["means"] == records.means(lane, ms), (ms, lane)
        assert part["flag"] == (records.rounds(lane)[-1]["at"] <= ms + 1e-6), (ms, lane)
    assert shown["exact"] == records.exact(ms), ms
    assert shown["head"] == (view["verdict"]["head"] or QUESTION), ms
    assert shown["reasons"] == (list(view["verdict"]["lanes"].values()) if view["verdict"]["head"] else []), ms
    by = (view["verdict"]["head"] or "").partition(": ")[2].split(" ")[0]
    assert shown["bet"] == (f"You said Regular. Fastest: BASS, {by}." if view["done"] else ""), ms
    assert shown["table"] == view["done"], ms
    counts = [
        sum(row["written"] for record in records.ended(lane, ms) for row in record["rows"]) for lane in LANES
    ]
    said = (f"{NAMES[lane]} {n} {'token' if n == 1 else 'tokens'}" for lane, n in zip(LANES, counts, strict=True))
    assert shown["slider"] == f"{rounded(ms / 1000, 2)} s: {', '.join(said)}"
    _rounds(shown, records, ms)


def _rounds(shown: dict[str, Any], records: Records, ms: float) -> None:
    """The inspector follows the newest round of row 1 of BASS, and the cache's picture that of all its rows."""
    bass = records.ended("bass", ms)
    own = [record for record in bass if any(row["sequence"] == 0 for row in record["rows"])]
    assert shown["rounds"] == f"of {len(own)}", ms
    if own:
        assert shown["round"].startswith(f"The lane's round {own[-1]['round']}, "), (ms, shown["round"])
        assert shown["cache"].startswith(f"Round {bass[-1]['round']} of {bass[-1]['round']}, "), (
            ms,
            shown["cache"],
        )
    else:
        assert shown["round"] == "This sequence has no rounds yet."


def test_every_text_is_that_of_the_instant(film: Page, records: Records) -> None:
    """Forward, back, by steps and while playing in slow motion."""
    end = max(records.rounds(lane)[-1]["at"] for lane in LANES)
    assert_right(film, records, end)
    assert "differs" in records.mark(end) and records.exact(end).count(" of ") == 2
    for ms in (0.0, 12.0, 95.0, 333.3, 334.0, 170.0, 700.0, 40.0, 1030.0, end, 500.0):
        film.evaluate("(ms) => Bass.tape.seek(ms)", ms)
        assert_right(film, records, ms)
    # One after another without a pause: what was drawn a moment ago must not stay.
    film.evaluate("() => { for (const ms of [100, 150, 900]) Bass.tape.seek(ms); }")
    assert_right(film, records, 900.0)
    for _ in range(3):
        film.click("[data-tape=back]")
        assert_right(film, records, film.evaluate("() => Bass.tape.state.ms"))
    film.evaluate("() => { Bass.tape.seek(120); Bass.tape.speed = 0.1; Bass.tape.play(); }")
    for until in (180, 250):
        film.wait_for_function("(ms) => Bass.tape.state.ms > ms", arg=until)
        film.evaluate("() => Bass.tape.pause()")
        assert_right(film, records, film.evaluate("() => Bass.tape.state.ms"))
        film.evaluate("() => Bass.tape.play()")
    film.evaluate("() => Bass.tape.pause()")


def test_while_it_plays_no_text_lags_behind(film: Page, records: Records) -> None:
    """Counts, bars, inspector and cache are those of one frame, between two snapshots too."""
    film.evaluate("() => Bass.tape.seek(0)")
    film.wait_for_function(DRAWN)
    film.evaluate("""() => {
      window.frames = [];
      const text = (selector) => document.querySelector(selector).textContent;
      const look = () => window.frames.push([Bass.tape.state.ms, text(".verdict-exact"),
        text("[data-axis=bass] .axis-means"), text(".cache-line"), text("[data-rounds]"), text(".verdict-head")]);
      // At the end of a frame's drawing, before the browser paints it.
      Bass.on("playhead", () => queueMicrotask(look));
      Bass.tape.speed = 0.04;
      Bass.tape.play();
    }""")
    film.wait_for_function("() => new Set(frames.map(([, exact]) => exact)).size > 8")
    film.evaluate("() => Bass.tape.pause()")
    frames = film.evaluate("() => window.frames")
    for ms, exact, means, cache, rounds, head in frames:
        assert head == (records.view(ms)["verdict"]["head"] or QUESTION), ms
        assert exact.removesuffix(" so far") == records.exact(ms).removesuffix(" so far"), ms
        assert means == records.means("bass", ms), ms
        bass = records.ended("bass", ms)
        assert rounds == f"of {len(bass)}", ms
        # Before the first round, BASS's prompt may be read only in a later snapshot.
        first = ("The prompt has been read", "No round yet.")
        assert cache.startswith(f"Round {bass[-1]['round']} of " if bass else first), ms


def test_step_by_step_and_why_are_those_of_the_instant(film: Page, records: Records) -> None:
    why = film.locator(".why li")
    for ms in (170.0, 300.0):
        film.evaluate("(ms) => Bass.tape.seek(ms)", ms)
        film.wait_for_function(DRAWN)
        count = len(records.ended("bass", ms))
        film.click("[data-switch=stepping]")
        expect(film.locator(".step-line")).to_contain_text(f"Round {count} of {count} so far: ")
        film.click("[data-close]")
    film.click("[data-why]")
    for ms in (300.0, 800.0):
        film.evaluate("(ms) => Bass.tape.seek(ms)", ms)
        rounds = records.ended("bass", ms)
        rows = [row for record in rounds for row in record["rows"]]
        drafted = sum(len(row["drafted"]) for row in rows) / len(rounds)
        expect(why.nth(2)).to_contain_text(f"verifies {rounded(drafted, int(drafted < 10))} drafts")
        taken = rounds[-1]["at"] / len(rounds)
        expect(why.nth(2)).to_contain_text(f"It takes {rounded(taken, int(taken < 10))} ms")


def test_the_bar_of_a_phone_has_the_lanes_figures_at_any_instant(film: Page, records: Records) -> None:
    film.set_viewport_size({"width": 390, "height": 844})
    for ms in (500.0, 95.0, 1030.0, 300.0):
        film.evaluate("(ms) => Bass.tape.seek(ms)", ms)
        film.wait_for_function(DRAWN)
        shown = film.evaluate(SHOWN)["lanes"]
        for lane in LANES:
            figures = records.figures(lane, ms)
            assert shown[lane]["glance"] == [figures["speedup"], f"{figures['ms_per_token']} ms"], (ms, lane)
