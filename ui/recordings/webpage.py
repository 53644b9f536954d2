"""A race as one HTML file, which plays without a server or a network: `webpage`, and `saved` for `bass race`.

`static_space` writes the page of all shipped recordings, as a folder for a static host.

The file has the page's own scripts and sheets, and the parts of viewer.py. The charts are left out, because their
library alone is larger than a file may be. `shell` is the file without a race: the page in the browser fetches it
and adds the race itself (ui/static/race/save.js).
"""

from __future__ import annotations

import base64
import gzip
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from bass_core import BassError, Options, Snapshot, __version__
from ui.page import assets
from ui.page.assets import PLOTLY
from ui.page.request import SAMPLING, keywords
from ui.race import how
from ui.race.feed import text
from ui.recordings.recording import ADDED, Recorder, Recording
from ui.recordings.revision import revision
from ui.recordings.shelf import SHIPPED
from ui.recordings.viewer import Part, header, parts
from ui.sources.source import PairInfo

# The largest file that the repository's own commands may write, in bytes.
MAX_BYTES = 1_000_000
# Where the race is inserted. Base64 can't end the script element.
PLACE = "%RACE%"
NOTE = "<p data-replay>A recorded race, in one file.</p>"
STATIC_NOTE = '<p data-replay>Recorded races and predictions. <a href="#how">How it works</a></p>'
# The front matter of a static Space's README.
SPACE = {
    "title": "BASS, recorded",
    "emoji": "🐟",
    "sdk": "static",
    "app_file": "index.html",
    "license": "apache-2.0",
}
TITLE = "BASS: a recorded race"
# The file may load nothing, not even from its own folder.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' data:; img-src data: blob:"
# A static page may also load its Plotly.
STATIC_POLICY = POLICY.replace("script-src ", "script-src 'self' file: ")
BOOT = """import "bass/main.js";

const dark = window.matchMedia("(prefers-color-scheme: dark)");
const theme = () => document.body.classList.toggle("dark", dark.matches);
dark.addEventListener("change", theme);
theme();
const mounts = [MOUNTS], values = VALUES, elements = document.querySelectorAll("[data-part]");
const server = { recording: async (name) => Bass.files.embedded(document, name) };
mounts.forEach((mount, i) => mount(elements[i], { value: values[i] }, server));"""


@cache
def shell() -> str:
    """Return the page without a race: PLACE is where the race belongs, packed by `packed`."""
    return _document(parts([{"name": "race", "title": TITLE, "look_for": ""}]), {"race": PLACE}, NOTE, POLICY)


def static_space(folder: Path) -> list[Path]:
    """Write the shipped recordings, the slider over readers and "How it works" as a static Space.

    Any static host serves the folder, and a browser also opens its index.html as a file.

    Returns:
        The files: the page, Plotly for its one chart, and the README that a Space is configured by.
    """
    offers = [{"name": name, "title": offer.title, "look_for": offer.look_for} for name, offer in SHIPPED.items()]
    races = {f"race-{name}": packed(offer.recording) for name, offer in SHIPPED.items()}
    steps = Part("how", how.template(), f"Bass.plots.address = '{PLOTLY.name}'; Bass.mountHow(element)", "how")
    front = "\n".join(f"{name}: {value}" for name, value in SPACE.items())
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "index.html": _document([*parts(offers), steps], races, STATIC_NOTE, STATIC_POLICY).encode(),
        PLOTLY.name: PLOTLY.read_bytes(),
        "README.md": f"---\n{front}\n---\nRecorded races of batched speculative decoding. Written by "
        f"`python -m bench space --static`, BASS {__version__}, revision {revision()}.\n".encode(),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in files]


def _document(viewer: Sequence[Part], races: Mapping[str, str], note: str, policy: str) -> str:
    """Return a page with these parts and packed races (by the id of their elements)."""
    body = "\n".join(
        f"<div data-part{f' id={part.elem_id!r}' if part.elem_id else ''}>{part.template}</div>" for part in viewer
    )
    mounts = ", ".join(f"(element, props, server) => {{ {part.script}; {part.after} }}" for part in viewer)
    boot = BOOT.replace("MOUNTS", mounts).replace("VALUES", text([part.value for part in viewer]))
    embedded = "\n".join(f'<script type="text/plain" id="{name}">{race}</script>' for name, race in races.items())
    sheet = f"{(assets.STATIC / assets.FILE_STYLE).read_text(encoding='utf-8')}\n{assets.style()}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{TITLE}</title>
<style>
{_inline(sheet, "style")}
</style></head>
<body><div class="gradio-container">
<noscript>This page plays a race with JavaScript: turn JavaScript on.</noscript>
{header(note)}
<main id="results">
{body}
</main></div>
{embedded}
<script type="importmap">
{assets.import_map()}
</script>
<script type="module">
{_inline(boot, "script")}
</script></body></html>
"""


def _inline(code: str, element: str) -> str:
    """Return code that can't end its element. Such text occurs only in strings, where a backslash is harmless."""
    return code.replace(f"</{element}", f"<\\/{element}").replace("<!--", "<\\!--")


@cache
def shell_file() -> Path:
    """Return the file with the shell, for the page to fetch."""
    return assets.kept(shell().encode(), "html")


def packed(recording: Recording) -> str:
    """Return a recording as text for PLACE: JSON, compressed with gzip, in base64."""
    head = {name: value for name, value in recording["head"].items() if name not in ADDED}
    document = json.dumps(recording | {"head": head}, separators=(",", ":")).encode()
    return base64.b64encode(gzip.compress(document, 9, mtime=0)).decode()


def webpage(recording: Recording) -> str:
    """Return a recording as an HTML file."""
    return shell().replace(PLACE, packed(recording), 1)


def opening(names: Sequence[str]) -> str:
    """Return an HTML file with these shipped recordings, which plays the opening if they are its own.

    Opened in another page, it is the first of them.
    """
    offers = [{"name": name, "title": SHIPPED[name].title, "look_for": SHIPPED[name].look_for} for name in names]
    races = {f"race-{name}" if i else "race": packed(SHIPPED[name].recording) for i, name in enumerate(names)}
    return _document(parts(offers), races, NOTE, POLICY)


def check_place(path: Path) -> None:
    """Refuse a path at which no file can be written.

    Raises:
        BassError: if its folder does not exist, or if it is a folder.
    """
    if path.is_dir() or not path.parent.is_dir():
        raise BassError(f"No file can be written at {path}: name one in an existing folder.")


def saved(
    snapshots: Iterable[Snapshot],
    path: Path,
    models: PairInfo,
    settings: Mapping[str, Any],
) -> Iterator[Snapshot]:
    """Yield the snapshots of a race, then write the race as an HTML file.

    Args:
        settings: its settings, see `settings_of`.

    Raises:
        BassError: if the file can't be written.
    """
    recorder, device = Recorder(settings, models.pair), None
    for snapshot in snapshots:
        recorder.add(snapshot)
        device = snapshot["device"].get("name")
        yield snapshot
    date = time.strftime("%Y-%m-%d")
    made = {"date": date, "by": "bass race", "version": __version__, "revision": revision()}
    about = "; ".join(filter(None, [models.about, device, date]))
    try:
        path.write_bytes(webpage(recorder.recording(about, made)).encode())
    except OSError as error:
        raise BassError(f"{path} can't be written ({error.strerror}): choose another file.") from error


def settings_of(prompt: str, lanes: Sequence[str], options: Options) -> dict[str, Any]:
    """Return a race's options as the page's settings. Settings that no option has are left out."""
    given = {"prompt": prompt, "lanes": list(lanes)}
    settings: dict[str, Any] = {"prompts": "one"}
    for name, keyword in keywords().items():
        sampled, field = keyword.startswith(SAMPLING), keyword.removeprefix(SAMPLING)
        owner: object = options.sampling if sampled else options
        if keyword in given:
            settings[name] = given[keyword]
        elif keyword and hasattr(owner, field):
            settings[name] = getattr(owner, field)
    return settings
