"""Every predicted time on the page is marked as predicted, and no measured time is.

To find texts that depend on times, the page shows the same race twice, with different times. Each text that
differs must be in a place whose label contains "predicted" or, for a reading of this machine, "this machine".
"""

from __future__ import annotations

import copy
import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError
from playwright.sync_api import BrowserContext, Page, expect

from bass_core import ModelPair, race
from tests.support.page import hosted
from ui.page.choices import choices
from ui.page.events import Snapshot
from ui.page.limits import Limits
from ui.page.request import RaceRequest, make_request

from .browser import (
    assert_accessible,
    assert_fits,
    exported,
    fill,
    fill_more,
    loaded,
    open_settings,
    run_to_the_end,
)
from .conftest import watched

pytestmark = pytest.mark.slow
LOOK = (Path(__file__).parent / "look.js").read_text(encoding="utf-8")


# GROW: metrics that grow if a lane takes longer. FALL: metrics that fall.
GROW = ("ms_per_token", "ptl_first_ms", "ptl_last_ms", "ptl_all_ms", "ttft_ms")
FALL = ("speedup", "throughput_tps", "flops_utilization", "useful_flops_utilization", "bandwidth_utilization")


def slower(snapshot: dict[str, Any], factor: float = 1.7) -> dict[str, Any]:
    """The same race with longer lane times.

    The first lane takes `factor` times as long. The factor is 20 % larger from each lane to the next.
    """
    slowed = copy.deepcopy(snapshot)
    for at, lane in enumerate(slowed["lanes"].values()):
        _slow_down(lane, factor * 1.2**at)
    return slowed


def _slow_down(lane: dict[str, Any], by: float) -> None:
    lane["clock_ms"] *= by
    for key in (*GROW, *FALL):
        value = lane["metrics"].get(key)
        if value is not None:
            lane["metrics"][key] = value * by if key in GROW else value / by
    for sequence in lane["sequences"]:
        sequence["times_ms"] = [ms * by for ms in sequence["times_ms"]]
    for record in lane["rounds"]:
        record["time_ms"] *= by
        for key in ("draft_ms", "verify_ms"):
            record[key] = None if record[key] is None else record[key] * by
        # Change the two parts of a round differently, as another machine would, so that their ratio changes too.
        if record["draft_ms"] is not None:
            record["verify_ms"], record["draft_ms"] = 0.9 * record["verify_ms"], record["draft_ms"] * 1.05


@dataclass
class Served:
    """A page served by this process: its address, its pair, and whether its races get slower times (`slow`)."""

    address: str
    pair: ModelPair
    slow: bool = False


@pytest.fixture(scope="module")
def served(pair: ModelPair, pair_folders: tuple[Path, Path]) -> Iterator[Served]:
    target, draft = map(str, pair_folders)
    page = Served("", pair)

    def source(request: RaceRequest) -> Generator[Snapshot, None, None]:
        for snapshot in race(page.pair, **request.arguments()):
            yield slower(snapshot) if page.slow else snapshot  # type: ignore[arg-type, misc]

    names = {"pair": target, "draft": draft, "device": "cpu", "dtype": "float32"}
    with hosted(source, choices=choices(pair, "auto"), pair=names) as page.address:
        yield page


def test_predicted_times_are_marked_everywhere_and_measured_ones_nowhere(
    served: Served, context: BrowserContext, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"{served.address}#race?clock=h100&clock_models=7.8b&draft_length=auto"
    with watched(context, address) as page:
        loaded(page)
        _texts(page, served)
        _tips(page, served)
        _card(page)
        assert_fits(page, 390)
        _exports(page, capsys)
        _coin(page, served)
        _measured(page, served)


def run_race(page: Page, served: Served, *, slow: bool = False) -> None:
    """Run the race, with its times or (`slow`) with slower ones."""
    served.slow = slow
    fill(page, batch=2, tokens=20)
    run_to_the_end(page)


def visible_texts(page: Page) -> dict[str, Any]:
    """Every visible text by its place, as {"text", "says"}. "says" is whether its label has a mark."""
    texts: dict[str, Any] = page.evaluate(LOOK)
    return texts


def unmarked(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The places whose text differs between the two races although their label has no mark."""
    return [
        f"{place}: {after[place]['text']!r}"
        for place in before.keys() & after.keys()
        if before[place]["text"] != after[place]["text"] and not after[place]["says"]
    ]


# Removes one mark of each kind: a chart's badge, a word at a lane's figure, and the words in a row of the table.
UNMARK = """() => {
  document.querySelector("[data-chart=latency] .predicted").remove();
  document.querySelector("#lane-bass .figures dt .predicted").remove();
  const head = document.querySelector(".figures-table tbody th");
  head.textContent = head.textContent.replace(", predicted", "");
}"""


def _texts(page: Page, served: Served) -> None:
    """Every text that depends on predicted times has a mark, and the test notices removed marks."""
    run_race(page, served)
    before = visible_texts(page)
    run_race(page, served, slow=True)
    after = visible_texts(page)
    differing = [place for place in before.keys() & after.keys() if before[place]["text"] != after[place]["text"]]
    # Figures, states and bars of three lanes; charts, the verdict, the inspector and the table.
    assert len(differing) > 40
    assert unmarked(before, after) == []
    page.evaluate(UNMARK)
    missed = unmarked(before, visible_texts(page))
    # Without UNMARK's marks, these are missed: the lane's figure, the chart's plot, and three cells of the row.
    assert len(missed) == 5, missed


def _tips(page: Page, served: Served) -> None:
    """Tips and the axis have the mark too."""
    run_race(page, served)
    page.locator("#lane-bass .sequence .token").nth(3).hover()
    expect(page.locator(".token-tip")).to_contain_text(re.compile(r"at \d+ ms of lane time, predicted"))
    canvas, words = page.locator("[data-axis=bass] canvas"), page.locator(".axis-words")
    expect(words).to_contain_text(" s, predicted")
    expect(canvas).to_have_attribute("aria-label", re.compile(", predicted$"))
    canvas.focus()
    page.keyboard.press("End")
    expect(words).to_contain_text(re.compile(r"BASS, Round \d+, predicted: "))
    expect(page.locator(".board-spoken")).to_contain_text("predicted")
    expect(page.locator(".about-clock")).to_have_text("Lane times: predicted for H100 with 7.8B and 310M")
    expect(page.locator(".verdict-head")).to_contain_text("on a predicted H100 with 7.8B and 310M.")


def _card(page: Page) -> None:
    """Every badge opens the assumptions."""
    card, badges = page.locator("#predicted-card"), page.locator(".predicted-badge:visible")
    # The verdict, three lanes, five charts over lane time, and the summary's figure.
    expect(badges).to_have_count(10)
    for at in range(badges.count()):
        badges.nth(at).click()
        expect(card).to_contain_text("share of the memory bandwidth that a step reaches80 %")
        page.keyboard.press("Escape")
        expect(card).to_be_hidden()
    badges.first.focus()
    page.keyboard.press("Enter")
    for words in (
        "share of the FLOP/s",
        "overhead of a layer in a step of one token, besides reading",
        "13.1 µs",
        "21.0 µs",
        "wait for the host in each round320 µs",
        "additional wait for each row16 µs",
        "additional wait in a round that drafts330 µs",
        "GPUs1",
        "datasheet: NVIDIA H100",
        "Texts, drafts and acceptances come from this run",
    ):
        expect(card).to_contain_text(words)
    assert_accessible(page)
    card.get_by_role("button", name="Close").click()
    expect(card).to_be_hidden()


def _exports(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    """Exports and the snippet contain the clock."""
    document = exported(page)
    assert (document["clock"]["kind"], document["clock"]["hardware"]) == ("predicted", "H100")
    head = page.evaluate("Bass.asCsv()").split("\n")[0].split(",")
    assert "predicted_time_ms" in head and "time_ms" not in head
    link = page.evaluate("Bass.link(Bass.run().head.settings)")
    assert "clock=h100" in link and "clock_models=7.8b" in link
    exec(page.locator(".snippet code").text_content() or "", {})
    output = capsys.readouterr().out
    for name, lane in document["lanes"].items():
        # The page's figures are rounded.
        printed = re.search(rf"^{name} (\S+) ms per token, predicted$", output, re.MULTILINE)
        assert printed and float(printed[1]) == pytest.approx(lane["metrics"]["ms_per_token"], rel=1e-4)
        for sequence in lane["sequences"]:
            assert f"\n{sequence['text']}\n" in output


def _coin(page: Page, served: Served) -> None:
    """With synthetic acceptance, the page says that a coin accepts the drafts."""
    more = page.locator("#acceptance input")
    open_settings(page)
    page.click("text=Another machine")
    expect(more).to_be_visible()
    expect(page.locator("#clock-models")).to_be_visible()
    expect(page.locator("#clock-bandwidth")).to_be_hidden()
    expect(page.locator("#clock-target")).to_be_hidden()
    fill_more(page, "acceptance", "0.8")
    run_race(page, served)
    accepted = page.locator("#lane-bass .token.accepted").first
    accepted.hover()
    expect(page.locator(".token-tip")).to_contain_text("accepted at random: u 0.")
    accepted.click()
    expect(page.locator(".round-note")).to_contain_text(
        "each draft is accepted at random, whatever it is. Its chance is 0.800."
    )
    page.locator(".predicted-badge:visible").first.click()
    expect(page.locator("#predicted-card")).to_contain_text(
        "Each draft is accepted at random with a chance of 0.8"
    )
    page.keyboard.press("Escape")


def _measured(page: Page, served: Served) -> None:
    """A measured race has no marks."""
    page.get_by_role("button", name="Repeat a text").click()
    expect(page.locator("#clock-models")).to_be_hidden()
    run_race(page, served)
    assert page.evaluate("Bass.clock()") is None
    assert page.locator(".predicted, .predicted-here, #predicted-card").count() == 0
    visible_texts(page)  # draws the parts out of view
    # The slider over readers is predicted whatever the race measured, and says so.
    texts = page.evaluate("""() => {
      const [all, slider] = ["#results", "#results .readers"].map((at) => document.querySelector(at).innerText);
      return all.replace(slider, "");
    }""")
    assert "Regular" in texts and "predicted" not in texts.lower()
    assert page.locator("#results [aria-label*=predicted]").count() == 0
    expect(page.locator(".about-clock")).to_be_hidden()
    assert "clock" not in exported(page)


def test_the_users_own_machine_is_shown_and_a_bad_number_refused(context: BrowserContext, served: Served) -> None:
    address = f"{served.address}#race?clock=own&clock_models=own&clock_bandwidth=500&clock_bytes=0"
    with watched(context, address) as page:
        open_settings(page)
        page.click("text=Another machine")
        for name in ("bandwidth", "tflops", "target", "draft", "bytes"):
            expect(page.locator(f"#clock-{name} input")).to_be_visible()
        expect(page.locator("#clock-bandwidth input")).to_have_value("500")
        fill(page, tokens=8)
        page.click("#run")
        expect(page.locator(".message")).to_contain_text("The size of a weight must be a number of bytes above 0")
        fill_more(page, "clock-bytes", "1")
        run_to_the_end(page)
        machine = "on a predicted machine of 500 GB/s and 100 TFLOP/s with 7.8B and 310M."
        assert page.evaluate("Bass.run().head.machine") in machine


def test_a_script_gets_the_same_prediction_and_errors_as_from_the_library(served: Served) -> None:
    served.slow = False
    client = Client(served.address, verbose=False)
    last = client.submit("Hello", 2, 8, 0.9, 3, clock="h100", acceptance=0.5, api_name="/race").result()
    assert last["clock"]["kind"] == "predicted" and last["clock"]["target"] == "7.8B"
    request = make_request(
        {"prompt": "Hello", "batch_size": 2, "max_new_tokens": 8, "temperature": 0.9, "seed": 3}
        | {"clock": "h100", "acceptance": 0.5},
        Limits(),
    )
    *_, local = race(served.pair, **request.arguments())
    assert [lane["clock_ms"] for lane in last["lanes"].values()] == [
        pytest.approx(lane["clock_ms"]) for lane in local["lanes"].values()
    ]
    for settings, message in (
        ({"clock": "tpu"}, "clock must be one of"),
        ({"lanes": ["amusd"], "clock": "h100"}, "amusd can't run"),
    ):
        with pytest.raises(AppError, match=message) as refusal:
            client.submit("Hello", 1, 8, 0.9, 3, **settings, api_name="/race").result()
        assert "\n" not in str(refusal.value)
