"""`python -m bench film`: make the README's animation, docs/race.gif, from a shipped recording.

With --html it makes docs/race.html instead, which plays the page's opening in any browser.

The page replays the recording without a model. Each snapshot is shown as long as in the race, and the last one for
HOLD_MS. Nothing is measured, so every machine makes the same film.
"""

from __future__ import annotations

import io
from itertools import pairwise
from pathlib import Path

from PIL import Image

from ui.recordings.webpage import MAX_BYTES as MAX_PAGE
from ui.recordings.webpage import opening

from ..cpu.page import browser
from ..robustness.serving import serve
from .pictures import _BOX
from .report import ROOT, parser

RECORDING = "win"
# The recordings of the opening (ui/static/race/opening.js).
OPENING = ("win", "one")
MAX_BYTES = 2_000_000
HOLD_MS = 5000
PARTS = (".verdict", ".lane-grid")
LOAD = """async () => {
  scrollTo(0, 0);
  document.querySelector("#run").click();
  while (!Bass.tape.state.count) await new Promise((done) => setTimeout(done, 50));
  Bass.tape.pause();
  return Array.from({ length: Bass.tape.state.count }, (_, i) => Bass.tape.elapsed(i));
}"""
JUMP = """(i) => {
  Bass.tape.jump(i);
  return new Promise((done) => Bass.soon(() => setTimeout(() => done(true), 60)));
}"""


def main(argv: list[str]) -> None:
    """Photograph, write, and print the film's size."""
    cli = parser("film", __doc__ or "")
    cli.add_argument("--out", type=Path, default=ROOT / "docs", metavar="FOLDER")
    cli.add_argument("--html", action="store_true", help="make race.html instead, one page without a server")
    options = cli.parse_args(argv)
    if options.html:
        return _page(options.out / "race.html")
    with serve("--replay", RECORDING) as (_, address), browser(address) as page:
        page.set_viewport_size({"width": 1400, "height": 800})
        times = page.evaluate(LOAD)
        shown = range(len(times))[:: 8 if options.quick else 1]
        frames = []
        for i in shown:
            page.evaluate(JUMP, i)
            boxes = [page.locator(part).evaluate(_BOX) for part in PARTS]
            x, y, right = boxes[0][0], boxes[0][1], boxes[1][2]
            bottom = page.locator(".sequences").first.evaluate(_BOX)[3] + 10
            clip = {"x": x, "y": y, "width": right - x, "height": bottom - y}
            frames.append(Image.open(io.BytesIO(page.screenshot(clip=clip))).convert("RGB"))
    # Use the palette of the last frame for all frames, because it has all colours.
    last = frames[-1].quantize(64, dither=Image.Dither.NONE)
    drawn = [frame.quantize(palette=last, dither=Image.Dither.NONE) for frame in frames]
    shown_times = [times[i] for i in shown]
    durations = [round(later - now) for now, later in pairwise(shown_times)]
    file = options.out / "race.gif"
    drawn[0].save(
        file, save_all=True, append_images=drawn[1:], duration=[*durations, HOLD_MS], loop=0, optimize=True
    )
    size = file.stat().st_size
    print(f"{file.name}: {len(drawn)} pictures, {times[-1] / 1000:.1f} s, {size:,} bytes, at most {MAX_BYTES:,}")
    if size > MAX_BYTES:
        raise SystemExit("The film is too large.")


def _page(file: Path) -> None:
    """Write the opening as a page, and print its size."""
    size = file.write_bytes(opening(OPENING).encode())
    print(f"{file.name}: {size:,} bytes, at most {MAX_PAGE:,}")
    if size > MAX_PAGE:
        raise SystemExit("The page is too large.")
