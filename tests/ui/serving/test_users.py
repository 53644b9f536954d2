"""Stop, reload, a second user and a closed tab: after each, the race's memory is free again.

This process serves the page itself, so that it can count the caches that are alive.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from bass_core import ModelPair
from ui.page.choices import choices
from ui.sources.local import race_source

from ..browser import fill, open_page, run_to_the_end
from ..conftest import caches, hosted

GROWN = "() => document.querySelector('#lane-regular .sequence')?.textContent.length > 5"


@pytest.fixture(scope="module")
def here(pair: ModelPair) -> Iterator[str]:
    """Address of the page, served by this process."""
    with hosted(race_source(pair), choices=choices(pair, "auto")) as address:
        yield address


def alive() -> int:
    gc.collect()
    return caches()


def ends_with(count: int) -> bool:
    """Whether so many caches are left within 60 s."""
    deadline = time.monotonic() + 60
    while alive() != count:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def start(page: Page) -> None:
    fill(page, batch=8, tokens=1024)
    page.click("#run")
    page.wait_for_function(GROWN, timeout=60_000)


@pytest.mark.slow
def test_stop_reload_and_a_second_user_give_the_memory_back(here: str, context: BrowserContext) -> None:
    before = alive()
    # Not `watched`: Gradio logs an error when a page is reloaded while it receives events.
    page = context.new_page()
    open_page(page, here)
    start(page)
    assert alive() > before
    page.click("#stop")
    assert ends_with(before), "Stop kept memory"
    start(page)
    page.reload()
    assert ends_with(before), "a reload kept memory"
    expect(page.locator(".message")).to_have_text("Reloading ended your race: press Run to start it again.")
    for name, value in (("batch-size", "8"), ("max-new-tokens", "1024"), ("temperature", "0.9")):
        expect(page.locator(f"#{name} input")).to_have_value(value)
    expect(page.locator("#prompt textarea")).to_have_value("Hello")
    expect(page.locator("#preset-note")).to_have_text("")
    page.reload()
    open_page(page, here)
    expect(page.locator(".message")).to_have_text("")
    assert page.locator(".sequence").count() == 0
    start(page)
    second = context.new_page()
    open_page(second, here)
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
    assert ends_with(before), "a second user kept memory"
    start(second)
    second.close()
    assert ends_with(before), "a closed tab kept memory"
    page.close()
