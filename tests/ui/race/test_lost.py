"""A server with default options, and what the page says when the server dies in the middle of a race."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, expect

from ui.page.choices import DRAFT_LENGTH_WORDS

from ..browser import LANES, fill, open_page, shown
from ..conftest import serving

SENTENCE = "The connection to the server was lost. What was shown before stays here until the page is reloaded."


@pytest.mark.slow
def test_a_killed_server_is_one_sentence_and_no_lane_still_runs(
    context: BrowserContext, tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No costs are stored here yet, so that the race starts by measuring them.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("BASS_MEASURE")
    options = ("--pair", str(tiny_pair[0]), "--draft", str(tiny_pair[1]), "--device", "cpu", "--dtype", "float32")
    # Not `watched`: the browser itself logs an error when a server is gone.
    page = context.new_page()
    with serving(tmp_path / "log.txt", *options) as (address, process):
        open_page(page, address)
        page.click("#more-settings > button")
        expect(page.locator("#draft-length input")).to_have_value(DRAFT_LENGTH_WORDS["auto"])
        fill(page, batch=8, tokens=1024, temperature=0)
        page.click("#run")
        page.wait_for_function("() => document.querySelector('#lane-regular .sequence')?.textContent.length > 5")
        process.kill()
        expect(page.locator(".message")).to_have_text(SENTENCE, timeout=60_000)
    for lane in LANES:
        expect(page.locator(f"#lane-{lane} .state")).to_have_text("Ended early")
        badges = page.eval_on_selector_all(f"#lane-{lane} .badge", "all => all.map(e => e.textContent)")
        assert badges == ["stopped"] * 8
    assert all(shown(page, "regular"))
    expect(page.locator(".figures-table")).to_be_visible()
    page.close()
