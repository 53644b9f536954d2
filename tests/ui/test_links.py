"""Links to what one sees: the address follows the visitor's choices, and shows them again."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from ui.recordings.shelf import SHIPPED

from .browser import PATIENCE_MS
from .test_file import AT_END

pytestmark = pytest.mark.slow


@pytest.fixture
def visit(context: BrowserContext, shelf: str) -> Iterator[Page]:
    """A page whose console must stay clean."""
    page, complaints = context.new_page(), list[str]()
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    yield page
    page.close()
    assert complaints == []


def query(page: Page) -> dict[str, str]:
    return {name: value for name, (value,) in parse_qs(urlsplit(page.url).query).items()}


def recording(page: Page, name: str) -> None:
    """Wait until the page shows this recording."""
    page.wait_for_function("(name) => window.Bass?.tape?.state.recorded?.name === name", arg=name)


def test_a_link_opens_a_round_of_a_recording(visit: Page, shelf: str) -> None:
    visit.goto(f"{shelf}/?replay=loss&row=2&round=7&speed=0.1")
    recording(visit, "loss")
    expect(visit.locator("[data-pick=round]")).to_have_value("7")
    chosen = [visit.input_value(f"[data-pick={name}]") for name in ("lane", "sequence")]
    assert chosen == [list(SHIPPED["loss"].recording["head"]["lanes"])[-1], "1"]
    expect(visit.locator(".round-line")).to_contain_text("The lane's round")
    # The page shows the time of that round, at rest, and Play would go on at the link's speed.
    assert visit.evaluate(
        """() => {
          const steps = Bass.roundsIn(Bass.run().lanes.get("bass").sequences[1]);
          return [steps.length >= 7 && steps.length < 12, Bass.tape.state.playing, Bass.tape.speed];
        }"""
    ) == [True, False, 0.1]
    expect(visit.locator(".tape-message")).to_have_count(0)


def test_a_link_to_a_recording_or_a_tab_plays_or_opens_it(visit: Page, shelf: str) -> None:
    visit.goto(f"{shelf}/?replay=h100")
    recording(visit, "h100")
    visit.wait_for_function(AT_END)
    visit.goto(f"{shelf}/?tab=HOW")
    expect(visit.get_by_role("tab", name="How it works")).to_have_attribute("aria-selected", "true")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("replay=<b>x</b>", "the recording “<b>x</b>”, but this page has win, loss, h100, h200 or one."),
        ("replay=win&row=9", "row “9”, but this race has rows 1 to 4."),
        ("replay=win&row=two", "row “two”, but this race has rows 1 to 4."),
        ("replay=win&row=1&round=0", "round “0”, but row 1 of BASS has rounds 1 to"),
        ("replay=win&lane=fast", "lane “fast”, but this race has regular, speculative or bass."),
        ("replay=win&speed=1e9", "speed “1e9”, but it can be 1, 0.25 or 0.1."),
        ("scene=9", "scene “9”, but the opening has scenes 1 to 3."),
        ("tab=" + "x" * 60, f"tab “{'x' * 40}…”, but there are race, sweep or how."),
    ],
)
def test_a_bad_value_gets_one_sentence_and_the_page_plays(visit: Page, shelf: str, asked: str, words: str) -> None:
    visit.goto(f"{shelf}/?{asked}")
    expect(visit.locator(".tape-message")).to_contain_text(f"The link asks for {words}", timeout=PATIENCE_MS)
    assert (visit.locator(".tape-message").text_content() or "").count("The link asks for") == 1
    if "replay=win" in asked:
        recording(visit, "win")
        visit.wait_for_function("() => Bass.tape.state.playing || Bass.tape.state.now > 0")
    else:
        # The opening plays.
        visit.wait_for_function("() => window.Bass?.tape?.state.recorded")


def test_the_address_follows_what_the_visitor_chooses(visit: Page, shelf: str) -> None:
    visit.goto(f"{shelf}/")
    visit.wait_for_function(AT_END)
    assert query(visit) == {}
    visit.click("[data-recording=loss]")
    recording(visit, "loss")
    assert query(visit) == {"replay": "loss"}
    visit.evaluate("() => Bass.tape.live()")
    visit.select_option("[data-pick=sequence]", label="3")
    visit.fill("[data-pick=round]", "4")
    visit.keyboard.press("Enter")
    assert query(visit) == {"replay": "loss", "lane": "bass", "row": "3", "round": "4"}
    visit.get_by_role("tab", name="Sweep").click()
    assert query(visit)["tab"] == "sweep"
    # The same address, opened again, shows the same.
    visit.goto(visit.url)
    recording(visit, "loss")
    expect(visit.locator("[data-pick=round]")).to_have_value("4")
    assert visit.input_value("[data-pick=sequence]") == "2"
    expect(visit.get_by_role("tab", name="Sweep")).to_have_attribute("aria-selected", "true")
    # The address follows the playhead, once it rests.
    visit.get_by_role("tab", name="Race").click()
    visit.locator(".axis-slider").press("End")
    visit.wait_for_function("() => new URLSearchParams(location.search).get('round') !== '4'")
    count = visit.evaluate("() => Bass.roundsIn(Bass.run().lanes.get('bass').sequences[2]).length")
    assert count > 4 and query(visit) == {"replay": "loss", "lane": "bass", "row": "3", "round": f"{count}"}
    visit.click("[data-recording=win]")
    recording(visit, "win")
    assert query(visit) == {"replay": "win"}
    expect(visit.locator(".race-note")).to_have_text("Recorded on two cores of a Xeon with AMX.")
