"""Steps of the browser tests: open the page, fill in settings, run or play a race, read texts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import axe_playwright_python
from playwright.sync_api import Page, expect

from ui.recordings.recording import record

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
LANES = ("regular", "speculative", "bass")
AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
# Longest wait of a step. It is generous, because a machine that also runs other tests can be slow.
PATIENCE_MS = 180_000
expect.set_options(timeout=60_000)
# Whether the given lanes show as many tokens as their figure "new tokens" counts, with the right texts.
ALL_REVEALED = """(lanes) => lanes.every((name) => {
  const run = Bass.run(), sequences = run?.lanes.get(name)?.sequences ?? [];
  const texts = sequences.map(({ tokens }) => tokens.map(({ text }) => text).join(""));
  const count = sequences.reduce((sum, { tokens }) => sum + tokens.length, 0);
  const shown = [...document.querySelectorAll(`#lane-${name} .sequence`)].map((e) => e.textContent);
  return count === run?.view?.lanes[name]?.metrics.new_tokens && JSON.stringify(texts) === JSON.stringify(shown);
})"""
# Whether no colour changes any more, and charts and canvases have been drawn in the theme.
SETTLED = """() => !document.getAnimations().some((one) => one instanceof CSSTransition)
  && new Promise((done) => Bass.soon(() => done(true)))"""


# Whether the scripts have run, and the fields have the values from the link, except on a page without a form.
READY = """() => window.Bass?.plots.address && (document.querySelector("[data-replay]")
  || new Promise((done) => Bass.on("form", () => setTimeout(() => done(true), 300))))"""


def open_page(page: Page, server: str) -> None:
    """Open the server's page without its opening recording and without Plotly, which takes 2 s of CPU."""
    address, hash, fragment = server.partition("#")
    page.goto(f"{address}{'&' if '?' in address else '?'}play=off{hash}{fragment}")
    page.wait_for_function(READY)


def loaded(page: Page) -> None:
    """Load Plotly, as charts in view would, and wait until the charts are drawn."""
    page.wait_for_function("() => window.Bass?.plots?.address")
    page.evaluate("() => Bass.plots.load().then(() => Bass.plots.drawAll())")
    page.wait_for_function("() => window.Plotly && document.querySelector('[data-chart] .main-svg')")


# Resolves after the next drawing.
DRAWN = "() => new Promise((done) => Bass.soon(() => setTimeout(() => done(true), 30)))"
# Leaves the page as a visitor has it who has only watched recordings.
TIDY = """() => {
  const press = (button) => button?.checkVisibility() && button.click();
  press(document.querySelector("[data-close]"));
  if (document.body.classList.contains("presenting")) press(document.querySelector("[data-present]"));
  document.body.classList.remove("dark");
  press([...document.querySelectorAll("#tabs [role=tab]")].find((tab) => tab.textContent.trim() === "Race"));
  document.activeElement.blur();
  history.replaceState(null, "", location.pathname + "?play=off");
  Bass.tell("phase", "ready");
  Bass.tape.speed = 1;
  // It may be "win" already: forget its name, to see when it is loaded again.
  if (Bass.tape.state.recorded) Bass.tape.state.recorded.name = "";
  document.querySelector("[data-recording=win]").click();
}"""


def reset(page: Page) -> None:
    """Show the end of the recording "win", whatever an earlier test has done on the page."""
    page.set_viewport_size({"width": 1400, "height": 900})
    page.emulate_media(media="screen", reduced_motion="no-preference", color_scheme="light")
    page.mouse.move(0, 0)
    page.evaluate(TIDY)
    page.wait_for_function("() => Bass.tape.state.recorded?.name === 'win'")
    page.evaluate("() => { Bass.tape.live(); scrollTo(0, 0); }")
    page.wait_for_function(DRAWN)


def fill(page: Page, *, prompt: str = "Hello", batch: object = 2, tokens: object = 150, temperature: object = 0.9,
         seed: object = 3) -> None:  # fmt: skip
    # Keep the first race's fixed draft length, as if the visitor had chosen it: an edited prompt would end it.
    page.evaluate("() => { document.body.dataset.draftLength = 'chosen'; }")
    page.fill("#prompt textarea", prompt)
    open_settings(page)
    for name, value in (
        ("batch-size", batch),
        ("max-new-tokens", tokens),
        ("temperature", temperature),
        ("seed", seed),
    ):
        page.fill(f"#{name} input", str(value))


def open_settings(page: Page) -> None:
    """Open "More settings". The page creates these fields when they are first opened."""
    if not page.locator("#temperature input").is_visible():
        page.click("text=More settings")
    expect(page.locator("#temperature input")).to_be_visible()


def fill_more(page: Page, name: str, value: str) -> None:
    """Type one of the settings under "More settings"."""
    open_settings(page)
    field = page.locator(f"#{name} input")
    # While Gradio fills in the initial values, it overwrites typed text: type again until the value stays.
    for _ in range(20):
        page.wait_for_timeout(300)
        if field.input_value() == value:
            return
        field.fill(value)
    raise AssertionError(f"{name} did not keep {value!r}")


def shown(page: Page, lane: str) -> list[str]:
    """The texts of a lane's sequences."""
    texts: list[str] = page.eval_on_selector_all(f"#lane-{lane} .sequence", "all => all.map(e => e.textContent)")
    return texts


def compared(page: Page, lane: str) -> list[str | None]:
    """How each of a lane's rows differs from Regular's, or None if there is no such line."""
    texts = "all => all.map(e => (e.hidden ? null : e.textContent))"
    comparisons: list[str | None] = page.eval_on_selector_all(f"#lane-{lane} .compared", texts)
    return comparisons


def run_to_the_end(page: Page, lanes: tuple[str, ...] = LANES, *, running: bool = False) -> None:
    """Press Run, unless the race is running, and wait until the last token is revealed."""
    # Wait for the status line: the lanes may still show the state of the previous race.
    if not running:
        page.click("#run")
    expect(page.locator("#status-line .message")).to_have_attribute("data-phase", "done", timeout=PATIENCE_MS)
    expect(page.locator("#run")).to_be_enabled()
    for lane in lanes:
        expect(page.locator(f"#lane-{lane} .state")).to_contain_text("Finished")
    revealed(page, lanes)


def revealed(page: Page, lanes: tuple[str, ...] = LANES) -> None:
    """Wait until the lanes show all tokens of the run. A lane may finish before its last tokens are shown."""
    page.wait_for_function(ALL_REVEALED, arg=list(lanes))
    # The charts are drawn after the texts.
    page.wait_for_timeout(500)


def play(
    page: Page, snapshots: Iterable[Any], settings: Mapping[str, Any] | None = None, *, to_the_end: bool = True
) -> None:
    """Load the snapshots of a race as a recording. Show its end, or play it if not `to_the_end`."""
    document = json.loads(json.dumps(record(snapshots, "a test", settings=settings)))
    page.evaluate("(document) => Bass.tape.load(document, { name: 'test' })", document)
    page.evaluate(f"() => Bass.tape.{'live' if to_the_end else 'play'}()")
    if to_the_end:
        revealed(page, tuple(document["head"]["lanes"]))


def texts_are(page: Page, snapshot: dict[str, Any]) -> None:
    """Wait until the lanes show a snapshot's texts and no others."""
    for lane in LANES:
        expected = [sequence["text"] for sequence in snapshot["lanes"][lane]["sequences"]]
        page.wait_for_function(
            "([lane, texts]) => JSON.stringify([...document.querySelectorAll(`#lane-${lane} .sequence`)]"
            ".map(e => e.textContent)) === JSON.stringify(texts)",
            arg=[lane, expected],
        )


def exported(page: Page) -> dict[str, Any]:
    """The run as the page would download it, with one addition: each sequence has its `steps` (steps_of)."""
    document: dict[str, Any] = json.loads(page.evaluate("() => Bass.asJson()"))
    for lane in document["lanes"].values():
        for at, sequence in enumerate(lane["sequences"]):
            sequence["steps"] = steps_of(lane, at)
    return document


def steps_of(lane: dict[str, Any], sequence: int) -> list[dict[str, Any]]:
    """One entry per round of a sequence: its row, its draft length, and the round's number, kind and time."""
    steps = []
    for one_round in lane["rounds"]:
        for at, row in enumerate(one_round["rows"]):
            if row["sequence"] == sequence:
                numbers = zip(row["drafted_text"], row["p"], row["q"], row["u"], row["chance"], strict=True)
                drafts = [dict(zip(("text", "p", "q", "u", "chance"), draft, strict=True)) for draft in numbers]
                about = {name: one_round[name] for name in ("round", "kind", "time_ms")}
                length = one_round["lengths"][at] if one_round["lengths"] else 0
                steps.append(row | about | {"length": length, "drafts": drafts})
    return steps


def saved(page: Page, button: str) -> str:
    """The text that a button downloads."""
    with page.expect_download() as download:
        page.click(button)
    return download.value.path().read_text(encoding="utf-8")


def choose_option(page: Page, label: str, words: Any) -> None:
    """Choose an option of a list under "More settings". These settings must be open."""
    page.click(f"#{label} input")
    page.get_by_role("option", name=words).click()


def assert_fits(page: Page, *widths: int) -> None:
    """Assert for each width that the page does not scroll sideways and its header ends inside the window.

    Afterwards the window has its usual size again.
    """
    last = "document.querySelector('.present-switch').getBoundingClientRect()"
    for width in widths:
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function(
            f"() => document.documentElement.scrollWidth <= innerWidth && {last}.right <= innerWidth"
        )
    page.set_viewport_size({"width": 1400, "height": 900})


def assert_accessible(page: Page) -> None:
    """Assert that axe-core finds no serious or critical violation, in either theme."""
    page.evaluate(AXE)
    violations: dict[str, list[str]] = {}
    for theme in ("light", "dark"):
        page.evaluate("dark => document.body.classList.toggle('dark', dark)", theme == "dark")
        page.wait_for_function(SETTLED)
        results: list[dict[str, Any]] = page.evaluate("async () => (await axe.run()).violations")
        serious = [violation for violation in results if violation["impact"] in ("serious", "critical")]
        violations[theme] = [
            f"{violation['id']}: {node['target']} {node['html'][:160]}"
            for violation in serious
            for node in violation["nodes"]
        ]
    page.evaluate("document.body.classList.remove('dark')")
    assert not any(violations.values()), json.dumps(violations, indent=1)
