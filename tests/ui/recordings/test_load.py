"""A file is read as a recording, or refused with one sentence; the page plays old ones and marks them."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, expect

from bass_core import BassError, SamplingParams, load_pair, race
from ui.recordings.load import load_recording

from ..browser import LANES, run_to_the_end, shown
from ..conftest import started, watched


@pytest.fixture(scope="module")
def document(tiny_pair: tuple[Path, Path]) -> dict[str, Any]:
    """A short race in a recording's format."""
    pair = load_pair(str(tiny_pair[0]), draft=str(tiny_pair[1]), device="cpu", dtype="float32")
    snapshots = list(race(pair, "Hello", n=2, max_new_tokens=30, sampling=SamplingParams(0.9), seed=1))
    return {"recording": 1, "about": "a tiny pair, for a test", "snapshots": snapshots}


def texts(document: dict[str, Any]) -> dict[str, list[str]]:
    """Each lane's texts in a tape, from the tokens of its lines."""
    rows = document["head"]["batch_size"]
    found = {name: [""] * rows for name in document["head"]["lanes"]}
    for line in document["lines"]:
        for name, news in line.items():
            for index, tokens in news["new"].items():
                found[name][int(index)] += "".join(token[1] for token in tokens)
    return found


def test_snapshots_come_back_in_order_whatever_the_file_is_packed_with(
    document: dict[str, Any], tmp_path: Path
) -> None:
    # Packing is known by the file's first bytes, not by its name.
    for name, pack in (("run.json", bytes), ("run.json.xz", lzma.compress), ("saved", gzip.compress)):
        (tmp_path / name).write_bytes(pack(json.dumps(document).encode()))
        recording = load_recording(tmp_path / name)
        assert recording.about == "a tiny pair, for a test"
        shown, last = recording.document["shown"], document["snapshots"][-1]
        assert [one["view"]["elapsed_ms"] for one in shown] == [
            round(s["elapsed_ms"], 1) for s in document["snapshots"]
        ]
        for lane, figures in shown[-1]["view"]["lanes"].items():
            assert figures["metrics"] == last["lanes"][lane]["metrics"]
            assert texts(recording.document)[lane] == [s["text"] for s in last["lanes"][lane]["sequences"]]
        assert recording.document["head"]["settings"] == {}


def test_a_recording_may_begin_with_the_measuring_of_costs(document: dict[str, Any], tmp_path: Path) -> None:
    bare = document["snapshots"][0] | {"lanes": {}}
    for phase, taken in (("measuring", True), ("running", False)):
        file = tmp_path / f"{phase}.json"
        file.write_text(json.dumps(document | {"snapshots": [bare | {"phase": phase}, *document["snapshots"]]}))
        if taken:
            assert len(load_recording(file).document["shown"]) == len(document["snapshots"])
        else:
            with pytest.raises(BassError, match="not those of a race"):
                load_recording(file)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"not json", "holds no JSON document"),
        (b"[]", 'lacks "recording": 1'),
        (b'{"recording": 2, "snapshots": []}', 'lacks "recording": 1'),
        (b'{"recording": 3, "snapshots": []}', "its head cannot be drawn"),
        (b'{"run": 1, "lanes": 3}', "not those of a page's JSON export"),
        (b"\x1f\x8b not gzip", "Cannot read the recording|holds no JSON document"),
        (b"\xfd7zXZ\x00 not xz", "holds no JSON document"),
        (b'{"recording": 1, "snapshots": []}', "snapshots are missing"),
        (b'{"recording": 1, "snapshots": [{"done": true}]}', "snapshots are missing"),
        (None, "Cannot read the recording"),
    ],
)
def test_what_is_no_recording_is_refused(content: bytes | None, says: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BassError, match=says) as refusal:
        load_recording(file)
    assert str(refusal.value).endswith(".") and "\n" not in str(refusal.value)


def _spoilt(document: dict[str, Any], *path: Any, value: Any) -> bytes:
    """The recording as bytes, with the value at `path` in its first snapshot replaced."""
    spoilt = json.loads(json.dumps(document))
    at = spoilt["snapshots"][0]
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return json.dumps(spoilt).encode()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("lanes", "bass"), 7),
        (("lanes", "bass"), []),
        (("elapsed_ms",), "soon"),
        (("elapsed_ms",), None),
        (("device",), None),
        (("lanes", "bass", "sequences"), 7),
        (("lanes", "bass", "sequences", 0), {}),
        (("lanes", "bass", "clock_ms"), "late"),
        (("lanes", "bass", "metrics"), None),
        (("lanes", "bass", "rounds"), [{}]),
    ],
)
def test_a_damaged_snapshot_is_refused(
    document: dict[str, Any], path: tuple[Any, ...], value: Any, tmp_path: Path
) -> None:
    (tmp_path / "run.json").write_bytes(_spoilt(document, *path, value=value))
    with pytest.raises(BassError, match="its snapshots are missing or not those of a race"):
        load_recording(tmp_path / "run.json")


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"recording": NaN}', b'{"about": Infinity}'])
def test_a_document_that_a_browser_could_not_read_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(BassError, match="holds no JSON document"):
        load_recording(tmp_path / "run.json")


@pytest.mark.slow
def test_the_page_plays_it(document: dict[str, Any], context: BrowserContext, tmp_path: Path) -> None:
    # The page adds a section for an unknown lane. Some lanes report FLOPs utilisation, as on a GPU.
    for shot in document["snapshots"]:
        shot["lanes"]["bass"]["metrics"]["flops_utilization"] = 0.125
    shots = [s | {"lanes": {**s["lanes"], "fourth": s["lanes"]["bass"]}} for s in document["snapshots"]]
    file = tmp_path / "run.json"
    file.write_text(json.dumps(document | {"snapshots": shots}))
    lanes = (*LANES, "fourth")
    with started(tmp_path / "log.txt", "--replay", str(file)) as server, watched(context, server) as page:
        expect(page.locator("[data-replay]")).to_contain_text("no model is loaded")
        expect(page.locator(".about-pair")).to_have_text("a tiny pair, for a test")
        expect(page.locator("#prompt")).to_have_count(0)
        run_to_the_end(page, lanes)
        expect(page.locator(".recording-mark")).to_be_visible()
        expect(page.locator(".recording-about")).to_contain_text("a tiny pair, for a test")
        for lane in lanes:
            assert shown(page, lane) == [s["text"] for s in shots[-1]["lanes"][lane]["sequences"]]
        page.locator("[data-chart=flops]").scroll_into_view_if_needed()
        data = "document.querySelector('[data-chart=flops] .plot').data"
        page.wait_for_function(f"() => {data}?.length === 2")
        assert page.evaluate(f"{data}.map(t => [t.name, t.y.at(-1)])") == [["BASS", 12.5], ["fourth", 12.5]]
        expect(page.locator("[data-reading=flops_utilization]")).to_have_text("BASS 12.5 %, fourth 12.5 %")
        assert page.inner_text("#lane-fourth h2") == "fourth"
        expect(page.locator(".figures-table")).to_be_visible()
        # A recording without settings can't be repeated, so that the page shows no snippet.
        expect(page.locator(".snippet")).to_be_hidden()
