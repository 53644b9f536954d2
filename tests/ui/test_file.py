"""A race in one file: a saved page plays without a server or a network, and files can be opened on any page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import BrowserContext, Page, expect

from bass_core import ModelPair, Options, SamplingParams, race
from bass_core.__main__ import main
from bench.report import film
from tests.support import ROOT
from tests.support.page import HOSTILE
from ui.page.limits import Limits
from ui.page.request import keywords, make_request
from ui.recordings.recording import load
from ui.recordings.shelf import SHIPPED
from ui.recordings.webpage import MAX_BYTES, PLACE, settings_of, shell, static_space, webpage

from .browser import LANES, assert_accessible, fill, loaded, play, revealed, run_to_the_end, shown
from .test_recording import BREAKS

TAPE = "() => JSON.parse(Bass.tape.asRecording({ about: 'a test', made: {} }))"
AT_END = "() => window.Bass?.tape?.state.count && Bass.tape.state.now === Bass.tape.state.count - 1"


class Structure(HTMLParser):
    """The elements of a page, with their attributes, and the text of each element with an id."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[Any] = []
        self.texts: dict[str, str] = {}
        self.last = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, attrs))
        self.last = dict(attrs).get("id") or ""

    def handle_data(self, data: str) -> None:
        self.texts[self.last] = self.texts.get(self.last, "") + data


def test_the_page_in_the_repository_is_what_its_command_makes(tmp_path: Path) -> None:
    film.main(["--html", "--out", str(tmp_path)])
    made, shipped = tmp_path / "race.html", ROOT / "docs/race.html"
    assert load(made) == load(shipped) == SHIPPED[film.RECORDING].recording
    before, now = (Structure(path.read_text(encoding="utf-8")).elements for path in (shipped, made))
    assert before == now, "make it again: python -m bench film --html"
    assert all(path.stat().st_size < MAX_BYTES for path in (made, shipped))


def test_every_shipped_recording_fits_into_a_page() -> None:
    for name, offer in SHIPPED.items():
        assert len(webpage(offer.recording).encode()) < MAX_BYTES, name


def test_no_text_of_a_race_can_end_its_element(tmp_path: Path) -> None:
    recording = SHIPPED["win"].recording | {"about": "</script><script>window.pwned = 1</script>"}
    page = webpage(recording)
    (tmp_path / "race.html").write_text(page, encoding="utf-8")
    assert load(tmp_path / "race.html") == recording
    plain, filled = Structure(shell()), Structure(page)
    assert plain.elements == filled.elements and plain.texts["race"].strip() == PLACE
    # Nor does the code of the page end its own elements.
    assert [tag for tag, _ in plain.elements].count("script") == page.count("</script") == 3


def test_the_command_line_writes_a_race_with_its_details(
    pair_folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = map(str, pair_folders)
    file = tmp_path / "race.html"
    options = ["--pair", target, "--draft", draft, "--device", "cpu", "--dtype", "float32", "-n", "2"]
    more = ["--max-new-tokens", "12", "--temperature", "0.9", "--seed", "5", "--html", str(file)]
    assert main(["race", "Hello", *options, *more]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("bass")
    recording = load(file)
    head, made = recording["head"], recording["made"]
    asked = {"prompt": "Hello", "batch_size": 2, "temperature": 0.9, "seed": 5, "max_new_tokens": 12}
    assert head["settings"].items() >= asked.items() and head["lanes"] == list(LANES)
    # Folders are named without their paths.
    assert head["pair"]["pair"] == Path(target).name and str(target) not in json.dumps(recording)
    assert made["by"] == "bass race" and made["date"] in recording["about"]
    rounds = [
        entry for shot in recording["snapshots"] for line in shot["lines"] for entry in line["bass"]["rounds"]
    ]
    assert any(row["detail"] for entry in rounds for row in entry["rows"])


def test_the_settings_of_a_file_are_those_of_the_page() -> None:
    request = make_request({"prompt": "Hello", "temperature": 0.7, "top_k": 5, "batch_size": 3}, Limits())
    arguments = request.arguments()
    fields = {name: value for name, value in arguments.items() if name in Options.__dataclass_fields__}
    settings = settings_of("Hello", arguments["lanes"], Options(**fields))
    known = {name: value for name, value in request.settings().items() if name in settings}
    assert {name: list(v) if isinstance(v, tuple) else v for name, v in settings.items()} == known
    left_out = {name for name, keyword in keywords().items() if keyword} - settings.keys()
    assert left_out <= {"scheduling"}


@contextmanager
def opened(
    context: BrowserContext, file: Path, query: str = "", more: str = "race.html", **options: Any
) -> Iterator[Page]:
    """Open a file without a network. At the end, check that the console is clean and only `more` was requested."""
    assert context.browser is not None
    alone = context.browser.new_context(offline=True, viewport={"width": 1400, "height": 900}, **options)
    page = alone.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    expected = (file.name, more)
    page.on(
        "request",
        lambda request: None if request.url.split("?")[0].endswith(expected) else complaints.append(request.url),
    )
    page.goto(f"{file.as_uri()}{query}")
    yield page
    alone.close()
    assert complaints == []


@pytest.mark.slow
def test_a_file_plays_inspects_and_fits_without_a_network(context: BrowserContext) -> None:
    file = ROOT / "docs/race.html"
    with opened(context, file) as page:
        # The opening's scenes, with their prompt.
        expect(page.locator(".said")).to_contain_text("The question is read.")
        expect(page.locator(".asked")).to_contain_text("Asked: Repeat the following text word for word: The tide")
        page.get_by_role("button", name="Scene 2: Four readers").click()
        expect(page.locator(".said")).to_contain_text("Now four people ask at once.")
        page.click("[data-skip]")
        page.wait_for_function(AT_END)
        recording = load(file)
        for lane in LANES:
            expect(page.locator(f"#lane-{lane} .state")).to_contain_text("Finished")
        expect(page.locator(".verdict-head")).to_have_text(recording["snapshots"][-1]["view"]["verdict"]["head"])
        page.locator("#lane-bass .token").nth(4).click()
        expect(page.locator(".round-line")).to_contain_text("The lane's round")
        expect(page.locator(".round-scroll table")).to_be_visible()
        page.click("[data-tape=play]")
        page.wait_for_function("() => Bass.tape.state.now < 4")
        page.wait_for_function(AT_END)
        for width in (390, 1024, 1400):
            page.set_viewport_size({"width": width, "height": 844})
            page.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth")
    with opened(context, file, "?row=2&round=5&speed=0.1", color_scheme="dark", reduced_motion="reduce") as page:
        expect(page.locator("[data-pick=round]")).to_have_value("5")
        assert page.evaluate("() => [Bass.tape.speed, Bass.tape.state.playing]") == [0.1, False]
        expect(page.locator("body")).to_have_class("dark")


@pytest.mark.slow
def test_a_file_is_accessible(context: BrowserContext, tmp_path: Path) -> None:
    # Without the policy, which forbids the checks themselves.
    text = (ROOT / "docs/race.html").read_text(encoding="utf-8").replace("Content-Security-Policy", "x")
    (tmp_path / "race.html").write_text(text, encoding="utf-8")
    with opened(context, tmp_path / "race.html") as page:
        page.click("[data-skip]")
        page.wait_for_function(AT_END)
        assert_accessible(page)


@pytest.mark.slow
def test_the_browser_refuses_the_same_recordings_as_python(context: BrowserContext) -> None:
    damage = """([path, value]) => {
      const copy = JSON.parse(window.whole), keys = path.slice(0, -1);
      let at = copy;
      for (const key of keys) at = Array.isArray(at) ? at.at(key) : at[key];
      const last = path.at(-1);
      at[Array.isArray(at) && last < 0 ? at.length + last : last] = value;
      return Bass.damaged(copy);
    }"""
    with opened(context, ROOT / "docs/race.html") as page:
        page.wait_for_function("() => window.Bass?.damaged")
        for offer in SHIPPED.values():
            page.evaluate("(whole) => (window.whole = whole)", json.dumps(offer.recording))
            assert page.evaluate("() => Bass.damaged(JSON.parse(window.whole))") == ""
        page.evaluate("(whole) => (window.whole = whole)", json.dumps(SHIPPED["win"].recording))
        for part, breaks in BREAKS.items():
            for path, value in breaks:
                assert page.evaluate(damage, [path, value]).startswith(part), (path, value)


def drop(page: Page, file: Path) -> None:
    """Drop a file on the page."""
    page.evaluate(
        """([name, bytes]) => {
          const data = new DataTransfer();
          data.items.add(new File([new Uint8Array(bytes)], name));
          for (const kind of ["dragover", "drop"]) {
            const options = { dataTransfer: data, bubbles: true, cancelable: true };
            document.body.dispatchEvent(new DragEvent(kind, options));
          }
        }""",
        [file.name, list(file.read_bytes())],
    )


@pytest.mark.slow
def test_a_race_saved_as_a_page_plays_and_can_be_dropped_on_a_page(
    page: Page, context: BrowserContext, tmp_path: Path
) -> None:
    loaded(page)  # Plotly, which is not there later
    # A prompt of which the model repeats some tokens. All of them could break a careless page.
    fill(page, prompt="".join(HOSTILE), tokens=40)
    with page.expect_response("**/*.html?*"):
        run_to_the_end(page)
    # The server is not needed any more.
    page.route("**/*", lambda route: route.abort())
    texts, tape = {lane: shown(page, lane) for lane in LANES}, page.evaluate(TAPE)
    with page.expect_download() as download:
        page.click("[data-take=page]")
    file = tmp_path / download.value.suggested_filename
    download.value.save_as(file)
    assert file.name == "bass-race.html"
    expect(page.locator(".took")).to_contain_text("Saved bass-race.html")
    recording = load(file)
    assert recording["snapshots"] == tape["snapshots"] and recording["made"]["by"] == "Save as a page"
    file = file.rename(tmp_path / "race.html")
    with opened(context, file) as alone:
        alone.wait_for_function(AT_END)
        revealed(alone)
        assert {lane: shown(alone, lane) for lane in LANES} == texts
        assert alone.evaluate("() => window.pwned") is None
        same = {"about": "", "made": ""}
        assert {**alone.evaluate(TAPE), **same} == {**tape, **same}
    page.unroute("**/*")
    _dropped(page, file, tmp_path)


@pytest.mark.slow
def test_a_static_space_plays_its_scenes_from_a_folder(context: BrowserContext, tmp_path: Path) -> None:
    files = {file.name for file in static_space(tmp_path)}
    assert files == {"index.html", "plotly.min.js", "README.md"}
    assert "sdk: static\n" in (tmp_path / "README.md").read_text(encoding="utf-8")
    with opened(context, tmp_path / "index.html", more="plotly.min.js") as page:
        page.wait_for_function("() => window.Bass?.scenes?.names.length === 3 && Bass.tape.state.count")
        for name in SHIPPED:
            page.click(f"[data-recording={name}]")
            page.wait_for_function("(name) => Bass.tape.state.recorded?.name === name", arg=name)
        expect(page.locator(".race-note")).to_contain_text("Recorded on ")
        page.get_by_role("slider", name="Readers at once").press("End")
        expect(page.locator(".readers-said")).to_contain_text("16 readers: BASS is ")
        expect(page.locator(".walk-step .walk-said").first).to_contain_text("bound by memory")
        # Its one chart is drawn by the folder's own Plotly.
        page.locator(".what-if .plot").scroll_into_view_if_needed()
        expect(page.locator(".what-if .plot .main-svg").first).to_be_visible()


def _dropped(page: Page, file: Path, tmp_path: Path) -> None:
    """Files that can't be played change nothing but the message, and a file that can is played."""
    texts, line = {lane: shown(page, lane) for lane in LANES}, page.locator(".tape-message")
    damaged = json.loads(page.evaluate("() => Bass.tape.asRecording({ about: '', made: {} })"))
    damaged["snapshots"][0]["lines"] = 7
    for name, content, words in (
        ("notes.txt", b"hello", "notes.txt is not a recorded race: choose a file"),
        ("<b>.html", b"<!doctype html><p>hello", "<b>.html is not a recorded race"),
        ("old.json", b'{"recording": 5, "head": {}}', "old.json is not a recorded race of format 6"),
        ("packed.xz", b"\xfd7zXZ\x00", "packed.xz is compressed with xz"),
        ("damaged.json", json.dumps(damaged).encode(), "its snapshots cannot be drawn"),
    ):
        (tmp_path / name).write_bytes(content)
        drop(page, tmp_path / name)
        expect(line).to_contain_text(words)
        assert {lane: shown(page, lane) for lane in LANES} == texts and not page.locator("p b").count()
    drop(page, file)
    page.wait_for_function("() => Bass.tape.state.recorded?.name === 'file race.html'")
    expect(line).to_have_count(0)
    expect(page.locator(".recording-about")).to_contain_text("race.html.")
    page.wait_for_function(AT_END)
    revealed(page)
    assert {lane: shown(page, lane) for lane in LANES} == texts
    # The visitor's own race is still there.
    page.click("[data-back]")
    expect(page.locator(".recording-note")).to_be_hidden()


@pytest.mark.slow
def test_without_the_server_a_race_is_saved_as_json(page: Page, pair: ModelPair, tmp_path: Path) -> None:
    page.evaluate("() => { window.fetch = () => Promise.reject(new Error('no server')); }")
    play(page, race(pair, "Hello", n=2, max_new_tokens=12, sampling=SamplingParams(0.9), seed=1, inspect=True))
    with page.expect_download() as download:
        page.click("[data-take=page]")
    assert download.value.suggested_filename == "bass-race.json"
    expect(page.locator(".took")).to_contain_text("The server does not answer")
    download.value.save_as(tmp_path / "bass-race.json")
    page.set_input_files("input[type=file]", tmp_path / "bass-race.json")
    page.wait_for_function("() => Bass.tape.state.recorded?.name === 'file bass-race.json'")


# Draws a picture, and returns its texts with their right edges, for another prompt.
DRAWN = """async (prompt) => {
  const { prototype } = CanvasRenderingContext2D, { fillText } = prototype, drawn = [];
  const { settings } = Bass.run().head, before = settings.prompt;
  settings.prompt = prompt;
  prototype.fillText = function (text, x, y, most = Infinity) {
    drawn.push([text, x + Math.min(most, this.measureText(text).width)]);
  };
  await Bass.card();
  settings.prompt = before;
  prototype.fillText = fillText;
  return drawn;
}"""


@pytest.mark.slow
def test_no_text_of_a_picture_goes_beyond_its_edge(film: Page) -> None:
    for prompt in ("不要改变任何内容" * 40, "x" * 500, "many words " * 50, "👩‍🚀" * 200, "a few"):
        drawn = film.evaluate(DRAWN, prompt)
        assert max(edge for _, edge in drawn) <= 1200
        lines = [text for text, _ in drawn]
        assert any(line.endswith(" …") for line in lines) == (prompt != "a few")
        assert any(prompt[:4] in line for line in lines)


@pytest.mark.slow
def test_a_picture_has_the_verdict_the_machine_the_date_and_the_revision(page: Page, tmp_path: Path) -> None:
    drop(page, ROOT / "docs/race.html")
    page.wait_for_function(AT_END)
    page.evaluate(
        """() => {
          const { prototype } = CanvasRenderingContext2D, { fillText } = prototype;
          window.drawn = [];
          prototype.fillText = function (text, ...rest) {
            window.drawn.push(text);
            return fillText.call(this, text, ...rest);
          };
        }"""
    )
    with page.expect_download() as download:
        page.click("[data-take=card]")
    download.value.save_as(tmp_path / download.value.suggested_filename)
    recording = SHIPPED[film.RECORDING].recording
    last, words = recording["snapshots"][-1]["view"], " ".join(page.evaluate("() => window.drawn"))
    assert last["verdict"]["head"] in words and recording["made"]["revision"] in words
    assert recording["made"]["date"] in words and last["device"]["name"] in words
    assert "4 rows, temperature 0, draft length 3, up to 64 tokens, seed 0. Prompt: Repeat the following" in words
    for lane in last["lanes"].values():
        assert f"{lane['metrics']['speedup']:.2f}×" in words
    with Image.open(tmp_path / "bass-race.png") as picture:
        assert picture.size == (1200, 630)
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 24)}
    # The background, and the lanes of page.css.
    assert {(255, 255, 255), (0x5B, 0x6B, 0x82), (0xB4, 0x50, 0x0B), (0x1D, 0x4E, 0xD8)} <= colours
