"""`python -m bench pictures`: take the documents' pictures of the page, and record the figures of its races.

It runs app.py and a headless Chromium on this machine, one preset after another, in the light theme, in a window
1400 pixels wide. Each picture is a part of the page in 256 colours. A result row is a lane of a race, as exported
by the page, with its verdict, or a point of a sweep. No figure here is a benchmark: the browser shares the machine
with the lanes, and each race runs once.
"""

from __future__ import annotations

import io
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from app import parse, set_threads

from ..cpu.page import app, browser
from .report import CPU, ROOT, claim, finish, parser

# Limit for pictures inside a text; pictures of a whole page may be larger.
MAX_BYTES = 150_000
# Timeout of one race on a slow machine, in milliseconds.
PATIENCE = 400_000
# Step to a round with several drafts of which only some were accepted.
WALK = """() => {
  document.querySelector("[data-switch=stepping]").click();
  const line = document.querySelector(".step-part .step-line"), next = document.querySelector("[data-go='1']");
  for (let i = 0; i < 100; i += 1) {
    const [, drafts, accepted] = /(\\d+) drafts?, (\\d+) accepted/.exec(line.textContent) ?? [];
    if (drafts >= 3 && accepted >= 1 && accepted < drafts) break;
    next.click();
  }
  document.body.dispatchEvent(new KeyboardEvent("keydown", { key: "End", bubbles: true }));
}"""
MIDDLE = """() => {
  const at = document.querySelector(".cache-part input[type=range]");
  at.value = Math.round(at.max / 3);
  at.dispatchEvent(new Event("input"));
}"""
DRAW = "() => Bass.plots.drawAll()"
READ = """() => {
  const { lanes, clock } = JSON.parse(Bass.asJson()), { verdict } = Bass.run().view;
  const times = clock ? "predicted" : "measured";
  const said = [verdict.head, ...Object.values(verdict.lanes)].filter(Boolean).join(" ");
  return Object.entries(lanes).map(([lane, { metrics }]) => ({ lane, times, ...metrics, said }));
}"""
# The cells of a sweep's two tables, by column head.
POINTS = """() => [...document.querySelectorAll(".bass-sweep")].flatMap((figure) => {
  const cells = (row) => [...row.children].map((cell) => cell.textContent);
  const heads = cells(figure.querySelector("thead tr"));
  return [...figure.querySelectorAll("tbody tr")].map((row) =>
    Object.fromEntries([["times", figure.dataset.kind], ...cells(row).map((text, i) => [heads[i], text])]));
})"""
FIGURES = {
    "ms_per_token": "ms per token",
    "speedup": "over regular",
    "accepted": "accepted",
    "drafted": "drafted",
    "mean_acceptance_length": "mean acceptance length",
    "rounds": "rounds",
    "ttft_ms": "first token, ms",
}


@dataclass(frozen=True)
class Shot:
    """A picture of a part of the page.

    Attributes:
        file: the file name, without its suffix.
        elements: selectors; the picture is the smallest rectangle around the first match of each.
        before: JavaScript to run first.
        most: the greatest height, in pixels.
    """

    file: str
    elements: tuple[str, ...]
    before: str = ""
    most: int = 900


LANES = (".verdict", ".lane-grid")
# The tab to open after the last race, and the preset with its settings.
SWEEP, SWEPT = "Sweep", "Write code"
# The preset of each race, and the pictures to take after it.
RACES: dict[str, tuple[Shot, ...]] = {
    "Repeat a text": (
        Shot("page", ("body",), most=1760),
        Shot("page-how", ("body",), "() => document.querySelector('[role=tab]:last-child').click()", most=1880),
        Shot("lecture-wins", LANES, most=640),
    ),
    "Write code": (Shot("lecture-step", (".step-part",), WALK),),
    "Unrelated words": (Shot("lecture-loses", LANES, most=720),),
    "Tell a story": (Shot("lecture-same-words", LANES, most=740),),
    "Four questions": (Shot("lecture-ragged", (".cache-part",), MIDDLE),),
    "A long document": (Shot("lecture-long", ("[data-chart=cache]",)),),
    "On an H100": (Shot("lecture-h100", LANES, most=760),),
    SWEEP: (
        Shot(
            "lecture-sweep",
            (".readers", ".bass-sweep[data-kind=measured]", ".bass-sweep[data-kind=predicted]"),
            most=1300,
        ),
    ),
}


def main(argv: list[str]) -> None:
    """Race, photograph, print, and write."""
    cli = parser("pictures", __doc__ or "", "pair", "draft")
    cli.add_argument("--presets", nargs="+", choices=list(RACES), default=list(RACES))
    cli.add_argument("--out", type=Path, default=ROOT / "docs", metavar="FOLDER")
    options = cli.parse_args(argv)
    # The result file records this process's number of threads, so set it to the app's.
    set_threads(parse(["--host", "127.0.0.1"]), os.environ)
    results: list[dict[str, Any]] = []
    sizes = {}
    with app(options, "auto") as address, browser(address) as page:
        page.emulate_media(reduced_motion="reduce")
        for preset in options.presets[: 1 if options.quick else None]:
            results += sweep(page) if preset == SWEEP else race(page, preset)
            for shot in RACES[preset]:
                sizes[shot.file] = take(page, shot, options.out)
    largest = max((size for name, size in sizes.items() if name.startswith("lecture")), default=0)
    claims = [claim("bytes of a text's largest picture", largest, f"at most {MAX_BYTES}", largest <= MAX_BYTES)]
    finish("pictures", options, CPU, results, claims)


def race(page: Any, preset: str) -> list[dict[str, Any]]:
    """Run a preset to its end and return its lanes' figures."""
    more = page.locator("#more-presets")
    if more.is_visible():
        more.click()
    page.get_by_role("button", name=preset, exact=True).click()
    page.locator("#preset-note").filter(has_text=".").wait_for()
    page.wait_for_timeout(1000)
    page.click("#run")
    page.locator("#status-line .message[data-phase=done]").wait_for(state="attached", timeout=PATIENCE)
    page.wait_for_timeout(1500)
    rows = []
    for read in page.evaluate(READ):
        figures = {head: read.get(name) for name, head in FIGURES.items()}
        rows.append(
            {"preset": preset, "lane": read["lane"], "times": read["times"], **figures, "verdict": read["said"]}
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def sweep(page: Any) -> list[dict[str, Any]]:
    """Measure and predict a sweep and return its points."""
    page.get_by_role("button", name=SWEPT, exact=True).click()
    page.wait_for_timeout(1000)
    page.get_by_role("tab", name=SWEEP, exact=True).click()
    for kind, button in (("measured", "#sweep-measure"), ("predicted", "#sweep-predict")):
        page.click(button)
        done = page.locator(f".bass-sweep[data-kind={kind}] .sweep-line[data-phase=done]")
        done.wait_for(state="attached", timeout=PATIENCE)
    rows = []
    for point in page.evaluate(POINTS):
        lane = f"bass, {point['draft length']}, batch {point['batch']}"
        figures = {"ms per token": point["ms per token"], "over regular": point["speed-up"].split("×")[0]}
        more = {"mean acceptance length": point["tokens per row-round"], "rounds": point["rounds"]}
        values = {head: float(text.replace(",", "")) for head, text in {**figures, **more}.items()}
        rows.append({"preset": SWEEP, "lane": lane, "times": point["times"], **values})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def take(page: Any, shot: Shot, folder: Path) -> int:
    """Write one picture and return its size in bytes."""
    page.mouse.move(0, 0)
    page.evaluate(DRAW)
    if shot.before:
        page.evaluate(shot.before)
        page.evaluate(DRAW)
    page.locator(shot.elements[-1]).first.scroll_into_view_if_needed()
    page.wait_for_timeout(1500)
    boxes = [page.locator(element).first.evaluate(_BOX) for element in shot.elements]
    x, y = (min(box[i] for box in boxes) for i in (0, 1))
    width, bottom = (max(box[i] for box in boxes) for i in (2, 3))
    clip = {"x": x, "y": y, "width": width - x, "height": min(bottom - y, shot.most)}
    image = Image.open(io.BytesIO(page.screenshot(clip=clip, full_page=True))).convert("RGB")
    file = folder / f"{shot.file}.png"
    image.quantize(256, dither=Image.Dither.NONE).save(file, optimize=True)
    # Reset the page for the next race.
    page.evaluate(_BACK)
    return file.stat().st_size


_BOX = """(element) => {
  const { left, top, right, bottom } = element.getBoundingClientRect();
  return [left + scrollX, top + scrollY, right + scrollX, bottom + scrollY].map(Math.round);
}"""
_BACK = """() => {
  document.querySelector("[role=tab]").click();
  if (!document.querySelector(".step-part").hidden) document.querySelector("[data-close]").click();
  scrollTo(0, 0);
}"""
