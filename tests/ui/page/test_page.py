"""The page in a real Chromium: it runs a race, shows what the API gives, stops, and keeps earlier results."""

from __future__ import annotations

from pathlib import Path

import pytest
from gradio_client import Client
from playwright.sync_api import BrowserContext, Page, expect

from ..browser import LANES, compared, fill, fill_more, run_to_the_end, shown
from ..conftest import started, watched

# Records the length of each lane's text at every change.
WATCH_GROWTH = """() => {
  window.growth = {};
  for (const lane of ["regular", "speculative", "bass"]) {
    const seen = window.growth[lane] = new Set();
    const length = () => [...document.querySelectorAll(`#lane-${lane} .sequence`)]
      .reduce((sum, e) => sum + e.textContent.length, 0);
    new MutationObserver(() => seen.add(length()))
      .observe(document.getElementById(`lane-${lane}`), { childList: true, subtree: true, characterData: true });
  }
}"""


def state(page: Page, lane: str) -> str:
    return page.inner_text(f"#lane-{lane} .state")


def test_three_columns_grow_and_end_with_the_api_s_texts(page: Page, server: str) -> None:
    fill(page, tokens=200)
    page.evaluate(WATCH_GROWTH)
    run_to_the_end(page)
    final = Client(server, verbose=False).submit("Hello", 2, 200, 0.9, 3, api_name="/race").result()
    for lane in LANES:
        expected = [sequence["text"] for sequence in final["lanes"][lane]["sequences"]]
        page.wait_for_function(
            "([lane, texts]) => JSON.stringify([...document.querySelectorAll(`#lane-${lane} .sequence`)]"
            ".map(e => e.textContent)) === JSON.stringify(texts)",
            arg=[lane, expected],
        )
        lengths = page.evaluate("lane => [...window.growth[lane]]", lane)
        assert len(set(lengths)) > 3 and lengths[-1] == max(lengths)
    for lane in LANES:
        figures = page.eval_on_selector_all(f"#lane-{lane} [data-figure]", "all => all.map(e => e.textContent)")
        assert (figures.count("n/a"), len(figures)) == (1 if lane == "regular" else 0, 5)
    assert page.locator("#lane-bass .so-far").inner_text() == ""
    curves = page.eval_on_selector("[data-chart=latency] .plot", "plot => plot.data.map(t => t.name)")
    assert curves == ["Regular", "Speculative", "BASS"]
    # This test's server has no GPU to ask.
    assert page.inner_text("[data-reading=gpu_utilization]") == "n/a"


def test_stop_ends_the_race_keeps_its_texts_and_compares_them(page: Page) -> None:
    fill(page, batch=8, tokens=1024, temperature=0)
    page.click("#run")
    for lane in ("regular", "bass"):
        first = f"document.querySelector('#lane-{lane} .sequence')"
        page.wait_for_function(f"() => {first}?.textContent.length > 5")
    expect(page.locator("#run")).to_be_disabled()
    assert compared(page, "bass") == [""] * 8
    page.click("#stop")
    expect(page.locator("#lane-bass .state")).to_have_text("Stopped")
    expect(page.locator(".message")).to_have_text("Stopped.")
    expect(page.locator("#run")).to_be_enabled()
    before = shown(page, "regular")
    assert any(before)
    assert compared(page, "bass") == ["same as Regular so far"] * 8
    comparison = "() => JSON.parse(Bass.asJson()).comparison.bass"
    assert page.evaluate(comparison) == [None] * 8
    # Where a text differs, the page finds the position itself.
    page.evaluate("() => { Bass.run().lanes.get('bass').sequences[2].tokens[1].id = -7; }")
    theirs = page.evaluate("() => Bass.run().lanes.get('regular').sequences[2].tokens[1].id")
    assert page.evaluate(comparison)[2] == {"at": 1, "ours": -7, "theirs": theirs}
    assert page.evaluate("() => Bass.compared().bass[2].text") == "differs at token 2"
    # The device is free again: another race completes.
    fill(page, batch=1, tokens=4)
    assert shown(page, "regular") == before
    run_to_the_end(page)
    assert len(shown(page, "regular")) == 1


BAD_INPUT = [
    ({"prompt": "  "}, "The prompt is empty"),
    ({"prompt": "x" * 6000}, "shorten the prompt"),
    ({"batch": ""}, "Batch size must be a whole number from 1 to 8."),
    ({"temperature": -1}, "Temperature must be a number of 0 or more"),
]


def test_bad_input_gets_a_sentence_and_loses_nothing(page: Page) -> None:
    fill(page, tokens=4)
    run_to_the_end(page)
    before = [shown(page, lane) for lane in LANES]
    for bad, says in BAD_INPUT:
        typed = {"prompt": "Hello", "batch": 2, "tokens": 4, "temperature": 0.9, "seed": 3} | bad
        fill(page, **typed)  # type: ignore[arg-type]
        page.click("#run")
        expect(page.locator(".message")).to_contain_text(says)
        expect(page.locator("#run")).to_be_enabled()
        assert [shown(page, lane) for lane in LANES] == before
        assert page.input_value("#prompt textarea") == typed["prompt"]
        for name, field in (("batch-size", "batch"), ("temperature", "temperature"), ("seed", "seed")):
            assert page.input_value(f"#{name} input") == str(typed[field])


@pytest.mark.slow
def test_model_text_is_only_text(page: Page, hostile: tuple[str, ...]) -> None:
    fill(page, prompt="".join(hostile), batch=8, tokens=300, temperature=2)
    run_to_the_end(page)
    written = "".join(text for lane in LANES for text in shown(page, lane))
    assert [text for text in hostile if text not in written] == []
    assert page.evaluate("() => window.pwned") is None
    assert page.locator(".sequence :not(span)").count() == 0


def test_columns_stack_where_there_is_no_room(page: Page) -> None:
    for width in (390, 1024, 1400):
        page.set_viewport_size({"width": width, "height": 900})
        boxes = [page.locator(f"#lane-{lane}").bounding_box() for lane in LANES]
        tops = {round(box["y"]) for box in boxes if box}
        assert len(tops) == (3 if width == 390 else 1)
        assert all(box and box["width"] >= 280 for box in boxes)
        assert page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.slow
def test_a_batch_of_32_stays_readable(
    context: BrowserContext, tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    options = ["--device", "cpu", "--dtype", "float32", "--max-batch", "32"]
    with (
        started(tmp_path / "log", "--pair", str(tiny_pair[0]), "--draft", str(tiny_pair[1]), *options) as server,
        watched(context, server) as page,
    ):
        fill(page, batch=32, tokens=24)
        run_to_the_end(page)
        final = Client(server, verbose=False).submit("Hello", 32, 24, 0.9, 3, api_name="/race").result()
        for lane in LANES:
            assert shown(page, lane) == [sequence["text"] for sequence in final["lanes"][lane]["sequences"]]
        for width in (390, 1400):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth")
            for lane in LANES:
                # Each card shows its first two lines in full, and the list fits into the window.
                cards = page.locator(f"#lane-{lane} .window")
                sizes = cards.evaluate_all("all => all.map(e => [e.clientHeight, e.clientWidth])")
                assert len(sizes) == 32 and all(high >= 42 and wide >= 200 for high, wide in sizes)
                expect(cards.last).to_have_css("font-size", "14px")
                listed = page.locator(f"#lane-{lane} .sequences").bounding_box()
                assert listed and listed["height"] <= 900
                cards.last.scroll_into_view_if_needed()
                expect(cards.last.locator(".token").first).to_be_in_viewport()


@pytest.mark.slow
def test_a_time_budget_stops_each_lane_at_its_own_clock(page: Page) -> None:
    fill(page, batch=4, tokens=1024)
    # Short enough that even on a fast machine no lane is done and not all rows have drawn the end token.
    fill_more(page, "time-budget-ms", "60")
    run_to_the_end(page)
    for lane in LANES:
        expect(page.locator(f"#lane-{lane} .state")).to_contain_text("of 4 within the budget; stopped after 0.")
        badges = page.eval_on_selector_all(f"#lane-{lane} .badge", "all => all.map(e => e.textContent)")
        assert "time up" in badges and set(badges) <= {"time up", "end"}
    expect(page.locator(".budget-line")).to_contain_text("finished within 60 ms of lane time: Regular")


@pytest.mark.slow
def test_half_speed_shows_the_same_race_later(page: Page, server: str) -> None:
    fill(page, batch=4, tokens=120)
    page.click("[data-switch=slow]")
    page.click("#run")
    page.wait_for_function("() => document.querySelector('#run').disabled")
    page.wait_for_function("() => !document.querySelector('#run').disabled", timeout=120_000)
    # The server is done, while the page is still half-way through.
    early = sum(len(text) for lane in LANES for text in shown(page, lane))
    expect(page.locator("#lane-speculative .state")).to_have_text("Running")
    page.click("[data-switch=slow]")
    expect(page.locator("#lane-speculative .state")).to_contain_text("Finished")
    final = Client(server, verbose=False).submit("Hello", 4, 120, 0.9, 3, api_name="/race").result()
    for lane in LANES:
        texts = [sequence["text"] for sequence in final["lanes"][lane]["sequences"]]
        page.wait_for_function(
            "([lane, texts]) => JSON.stringify([...document.querySelectorAll(`#lane-${lane} .sequence`)]"
            ".map(e => e.textContent)) === JSON.stringify(texts)",
            arg=[lane, texts],
        )
    assert early < sum(len(text) for lane in LANES for text in shown(page, lane))
