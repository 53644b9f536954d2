"""Several visitors, a lost server, costs being measured, a registered method.

Tests that count the caches in memory serve the page from this process.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from gradio_client import Client
from playwright.sync_api import BrowserContext, Page, expect

from bass_core import DEFAULT_LANES, METHODS, Method, ModelPair, register, unregister
from tests.support.memory import alive
from tests.support.page import hosted, lane_texts, load_saved, pair_options, save_tiny_pair, serving
from ui.page.choices import DRAFT_LENGTH_WORDS, choices
from ui.page.events import Snapshot
from ui.page.request import RaceRequest
from ui.race.looks import reference
from ui.sources.local import race_source

from .browser import LANES, fill, open_page, open_settings, run_to_the_end, shown
from .conftest import watched

pytestmark = pytest.mark.slow
GROWN = "() => document.querySelector('#lane-regular .sequence')?.textContent.length > 5"
LOST = (
    "The connection to the server was lost. The results so far stay here until the page reloads, which it does as "
    "soon as the server is back."
)


def shrinks_to(count: int) -> bool:
    """Wait up to 60 s until only `count` caches are left. Returns whether that happened."""
    deadline = time.monotonic() + 60
    while alive(collect=True) != count:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def start(page: Page) -> None:
    fill(page, batch=8, tokens=1024)
    page.click("#run")
    page.wait_for_function(GROWN, timeout=60_000)


def test_stop_reload_and_a_second_user_free_the_memory(pair: ModelPair, context: BrowserContext) -> None:
    with hosted(race_source(pair), choices=choices(pair, "auto")) as here:
        _free_memory(here, context)


def _free_memory(address: str, context: BrowserContext) -> None:
    before = alive(collect=True)
    # Don't use `watched` here, because Gradio logs an error when a page is reloaded while it receives events.
    page = context.new_page()
    open_page(page, address)
    start(page)
    assert alive() > before
    page.click("#stop")
    assert shrinks_to(before), "Stop kept memory"
    start(page)
    page.reload()
    assert shrinks_to(before), "a reload kept memory"
    expect(page.locator(".message")).to_have_text("Reloading ended your race: press Run to start it again.")
    open_settings(page)
    for name, value in (("batch-size", "8"), ("max-new-tokens", "1024"), ("temperature", "0.9")):
        expect(page.locator(f"#{name} input")).to_have_value(value)
    expect(page.locator("#prompt textarea")).to_have_value("Hello")
    expect(page.locator("#preset-note")).to_have_text("")
    page.reload()
    open_page(page, address)
    expect(page.locator(".message")).to_have_text("")
    assert page.locator(".sequence").count() == 0
    start(page)
    second = context.new_page()
    open_page(second, address)
    fill(second, batch=1, tokens=4)
    second.click("#run")
    expect(second.locator(".message")).to_have_text("Waiting for the device…")
    expect(second.locator("#status-line .place")).to_contain_text("Place 1 of 1 in the queue.")
    expect(second.locator("#status-line [data-testid=status-tracker]")).to_be_hidden()
    expect(second.locator("#status-line .html-container")).to_have_css("opacity", "1")
    expect(second.locator("#lane-bass .state")).to_have_text("Waiting")
    page.click("#stop")
    expect(second.locator("#lane-bass .state")).to_contain_text("Finished", timeout=60_000)
    expect(second.locator("#status-line")).not_to_contain_text("queue")
    expect(second.locator("#status-line .place")).to_have_text("")
    run_to_the_end(second)
    assert shrinks_to(before), "a second user kept memory"
    start(second)
    second.close()
    assert shrinks_to(before), "a closed tab kept memory"
    page.close()


def test_a_lost_server_is_announced_and_ends_every_lane(
    context: BrowserContext, pair_folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No costs are stored here, so the race first measures them.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("BASS_MEASURE")
    # Don't use `watched` here, because the browser logs an error when the server is gone.
    page = context.new_page()
    with serving(tmp_path / "log.txt", *pair_options(pair_folders)) as (address, process):
        open_page(page, f"{address}#race?draft_length=auto")
        page.click("#more-settings > button")
        expect(page.locator("#draft-length input")).to_have_value(DRAFT_LENGTH_WORDS["auto"])
        fill(page, batch=8, tokens=1024, temperature=0)
        page.click("#run")
        page.wait_for_function(GROWN)
        process.kill()
        expect(page.locator(".message")).to_have_text(LOST)
    for lane in LANES:
        expect(page.locator(f"#lane-{lane} .state")).to_have_text("Ended early")
        badges = page.eval_on_selector_all(f"#lane-{lane} .badge", "all => all.map(e => e.textContent)")
        assert badges == ["stopped"] * 8
    assert all(shown(page, "regular"))
    expect(page.locator(".figures-table")).to_be_visible()
    page.close()


def test_a_bar_shows_the_progress_of_measuring_costs(context: BrowserContext) -> None:
    progress, go = [{"done": 0.25, "left_ms": 12_400.0}, {"done": 0.5, "left_ms": None}], Event()
    device: Any = {"name": "toy", "kind": "cpu"}
    no_lanes: Any = {"done": False, "scheduling": "fair", "elapsed_ms": 1.0, "lanes": {}, "device": device}

    def source(request: RaceRequest) -> Generator[Snapshot, None, None]:
        for measuring in progress:
            yield no_lanes | {"phase": "measuring", "measuring": measuring}
            assert go.wait(100)
            go.clear()

    with hosted(source) as address, watched(context, address) as page:
        bar, words = page.locator(".measuring progress"), page.locator(".measuring span")
        expect(bar).to_be_hidden()
        page.click("#run")
        expect(words).to_have_text("25 %, about 15 s left")
        expect(page.locator(".message")).to_have_text("Measuring the cost of a round on this machine, once")
        assert bar.evaluate("e => e.value") == 0.25
        expect(page.locator("#lane-bass .state")).to_have_text("Waiting")
        go.set()
        expect(words).to_have_text("50 %")
        go.set()
        expect(bar).to_be_hidden()
        expect(page.locator("#lane-bass .state")).to_have_text("Ready")


def test_a_registered_method_gets_a_column_and_a_line_in_the_legend(
    pair: ModelPair, context: BrowserContext
) -> None:
    register(Method("toy", "Toy", "Decodes for a test.", METHODS[reference()].build, drafts=False))
    try:
        with (
            hosted(race_source(pair), choices=choices(pair, "auto")) as address,
            watched(context, address) as page,
        ):
            fill(page, batch=2, tokens=8)
            open_settings(page)
            page.get_by_role("checkbox", name="Toy").check()
            run_to_the_end(page, (*DEFAULT_LANES, "toy"))
            assert page.inner_text("#lane-toy h2") == "Toy"
            assert page.get_attribute("#lane-toy h2 .term", "title") == "Decodes for a test."
            assert shown(page, "toy") == shown(page, reference()) != ["", ""]
            labels = [METHODS[name].label for name in (*DEFAULT_LANES, "toy")]
            assert page.locator(".line-key li").all_text_contents() == labels
    finally:
        unregister("toy")


def test_a_folder_of_models_with_states_races_in_the_page_and_the_api(
    tmp_path: Path, context: BrowserContext
) -> None:
    pair = load_saved(save_tiny_pair(tmp_path, with_states=True))
    assert pair.target_step.has_states and pair.draft_step.has_states
    with (
        hosted(race_source(pair), choices=choices(pair, "auto")) as address,
        watched(context, address) as page,
    ):
        fill(page, batch=3, tokens=32)
        run_to_the_end(page)
        assert "" not in shown(page, "regular")
        last = Client(address, verbose=False).submit("Hello", 3, 32, 0, 0, api_name="/race").result()
    texts = lane_texts(last)
    assert last["done"] and texts["regular"] == texts["speculative"] == texts["bass"]
    assert last["lanes"]["bass"]["metrics"]["acceptance_rate"] > 0
