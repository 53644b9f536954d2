"""A server with every option left as it is, and what the page says when it dies in the middle of a race."""

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
    # Nothing has been measured here yet: the race begins with that.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("BASS_MEASURE")
    options = ("--pair", str(tiny_pair[0]), "--draft", str(tiny_pair[1]), "--device", "cpu", "--dtype", "float32")
    # The browser itself complains in the console of a server that is gone.
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
