"""The opening plays before Gradio has mounted, and then goes on in Gradio's page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import gradio as gr
import httpx
import pytest
from playwright.sync_api import BrowserContext, Page, Route, expect
from starlette.middleware import Middleware

from ui.page.ahead import Ahead, Pieces, _with

from .browser import fill

# Places and type of what both the stage and Gradio's page have.
PARTS = [".verdict", ".said", ".axis", ".lane-grid", ".sequence", ".axis-play button"]
LOOKS = """(names) => Object.fromEntries(names.map((name) => {
  const { x, y, width } = document.querySelector(name).getBoundingClientRect();
  const { fontSize, lineHeight, color } = getComputedStyle(document.querySelector(name));
  return [name, { place: [x, y, width], type: [fontSize, lineHeight, color].join() }];
}))"""
SHIFT = """() => {
  window.shift = 0;
  new PerformanceObserver((list) => list.getEntries().forEach(({ value }) => (window.shift += value)))
    .observe({ type: "layout-shift", buffered: true });
}"""


@pytest.fixture
def held(context: BrowserContext) -> tuple[Page, Callable[[], None]]:
    """A page whose copy of Gradio's main script is held back, and a function that lets it through."""
    page, waiting, released = context.new_page(), list[Route](), False
    page.add_init_script(f"({SHIFT})()")

    def hold(route: Route) -> None:
        # Under load the page may ask for the script only after its release.
        if released:
            route.continue_()
        else:
            waiting.append(route)

    page.route("**/assets/Blocks-*.js", hold)

    def release() -> None:
        nonlocal released
        released = True
        while waiting:
            waiting.pop().continue_()

    return page, release


@pytest.mark.parametrize("size", [(1400, 900), (390, 844)])
def test_the_opening_plays_before_gradio_and_goes_on_in_its_page(
    held: tuple[Page, Callable[[], None]], server: str, size: tuple[int, int]
) -> None:
    page, release = held
    page.set_viewport_size({"width": size[0], "height": size[1]})
    page.goto(server, wait_until="commit")
    expect(page.locator(".ahead .sequence .token").first).to_be_visible()
    expect(page.locator(".ahead .said")).to_contain_text("The question is read.")
    assert page.locator("#run").count() == 0
    page.evaluate("""() => {
      Bass.tape.pause();
      window.first = document.querySelector(".sequence .token");
      window.before = [Bass.tape.state.recorded.name, Bass.run().head.run];
      // In the first frame without the stage.
      Bass.on("adopted", () => (window.seen = getComputedStyle(window.first).visibility));
    }""")
    looks = page.evaluate(LOOKS, PARTS)
    release()
    expect(page.locator(".ahead")).to_have_count(0)
    expect(page.locator("#run")).to_be_visible()
    assert page.evaluate("window.seen") == "visible"
    # The same elements, of the same run.
    assert page.evaluate("() => window.first.isConnected && Boolean(window.first.closest('#results'))")
    assert page.evaluate("() => [Bass.tape.state.recorded.name, Bass.run().head.run]") == page.evaluate(
        "window.before"
    )
    expect(page.locator(".bass-lanes")).to_have_count(1)
    for name, look in page.evaluate(LOOKS, PARTS).items():
        assert look["place"] == pytest.approx(looks[name]["place"], abs=4), name
        if name not in (".verdict", ".axis", ".lane-grid"):
            assert look["type"] == looks[name]["type"], name
    assert page.evaluate("window.shift") <= 0.05
    # Gradio's server sends the other recordings, and the rest of the page listens to the race.
    page.locator(".opening-scenes button").nth(1).click()
    expect(page.locator(".said")).to_contain_text("Now four people ask at once.")
    page.click("[data-skip]")
    expect(page.locator("#lane-bass .state")).to_contain_text("Finished")
    expect(page.locator("#status-line .message")).to_have_attribute("data-phase", re.compile("playing|done"))
    page.close()


@pytest.mark.slow
def test_the_sentence_about_a_reload_stays_while_the_opening_plays(context: BrowserContext, server: str) -> None:
    page = context.new_page()
    page.goto(server)
    fill(page, batch=8, tokens=1024)
    page.click("#run")
    page.wait_for_function("() => Bass.run()?.head.settings.batch_size === 8")
    page.reload()
    sentence = "Reloading ended your race: press Run to start it again."
    expect(page.locator("#status-line .message")).to_have_text(sentence)
    page.wait_for_function("() => Bass.tape.state.playing && Bass.tape.state.ms > 100")
    expect(page.locator("#status-line .message")).to_have_text(sentence)
    page.close()


@pytest.mark.parametrize("query", ["?play=off", "?replay=win", "?tab=how", "?present=1"])
def test_what_is_not_the_opening_has_no_stage(context: BrowserContext, server: str, query: str) -> None:
    page = context.new_page()
    page.add_init_script(
        "new MutationObserver(() => { window.staged ||= Boolean(document.querySelector('.ahead')); })"
        ".observe(document, { childList: true, subtree: true })"
    )
    page.goto(f"{server}{query}")
    page.wait_for_function("() => window.Bass?.plots?.address")
    assert not page.evaluate("window.staged")
    page.close()


def test_the_document_is_added_to_only_if_it_is_gradios() -> None:
    added = Pieces(b"<link>", b"<script></script>")
    assert _with(b"<p>Not found</p>", added) == b"<p>Not found</p>"
    document = b'<meta charset="utf-8" />1<script>"<gradio-app"</script><gradio-app></gradio-app>'
    expected = (
        b'<meta charset="utf-8" /><link>1<script>"<gradio-app"</script><script></script><gradio-app></gradio-app>'
    )
    assert _with(document, added) == expected


def test_the_recording_cannot_end_its_element(server: str) -> None:
    found = re.search(r'<script type="application/json" id="ahead">(.*?)</script>', httpx.get(server).text)
    assert found and "<" not in found[1]
    stage = json.loads(found[1])
    assert stage["name"] == "one" and stage["recording"]["snapshots"] and set(stage["parts"]) == {"lanes", "tape"}


def test_a_page_that_asks_for_a_password_plays_nothing() -> None:
    with gr.Blocks() as page:
        gr.Markdown("Behind a password.")
    page.ahead = Pieces(b"<!-- head -->", b"<!-- body -->")  # type: ignore[attr-defined]
    _, address, _ = page.launch(
        auth=("name", "password"),
        prevent_thread_lock=True,
        quiet=True,
        app_kwargs={"middleware": [Middleware(Ahead)]},
    )
    try:
        with httpx.Client(base_url=address) as client:
            assert {part: part in client.get("/").text for part in ("<!-- head -->", "<!-- body -->")} == {
                "<!-- head -->": True,
                "<!-- body -->": False,
            }
            client.post("/login", data={"username": "name", "password": "password"}).raise_for_status()
            assert "<!-- body -->" in client.get("/").text
    finally:
        page.close()
