"""Recordings contain the whole race, damaged files are refused, and the shipped ones are consistent."""

from __future__ import annotations

import copy
import gzip
import json
import lzma
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from bass_core import BassError, ModelPair, SamplingParams, Snapshot, race
from ui.recordings.recording import load, record, save
from ui.recordings.shelf import SHIPPED, requested_recordings

from .formulas import NATURAL

LARGEST = 200_000


@pytest.fixture(scope="module")
def snapshots(pair: ModelPair) -> list[Snapshot]:
    return list(race(pair, "Hello", n=2, max_new_tokens=30, sampling=SamplingParams(0.9), seed=1, inspect=True))


def log_lines(document: dict[str, Any], lane: str, last: int) -> list[dict[str, Any]]:
    """A lane's log lines in the snapshots up to and including `last`."""
    lines = chain.from_iterable(one["lines"] for one in document["snapshots"][: last + 1])
    return [line[lane] for line in lines if lane in line]


def digits(value: Any) -> Any:
    """A value to compare with one that the page gets, which has six digits."""
    if isinstance(value, list):
        return [pytest.approx(item, rel=1e-5) for item in value]
    return pytest.approx(value, rel=1e-5) if isinstance(value, float) else value


def texts(document: dict[str, Any], lane: str) -> dict[str, list[int]]:
    """The token ids of a lane's rows at the end."""
    rows: dict[str, list[int]] = {}
    for line in log_lines(document, lane, len(document["snapshots"])):
        for index, tokens in line["new"].items():
            rows.setdefault(index, []).extend(token[3] for token in tokens if token[0] != "+")
    return rows


def test_a_race_survives_saving_with_any_compression(snapshots: list[Snapshot], tmp_path: Path) -> None:
    document = record(snapshots, "a tiny pair", settings={"seed": 1}, made={"by": "a test"})
    assert save(document, tmp_path / "run.json.xz") == (tmp_path / "run.json.xz").stat().st_size
    # The file's first bytes give its compression, not its name.
    for name, pack in (("run.json", bytes), ("saved", gzip.compress), ("other", lzma.compress)):
        (tmp_path / name).write_bytes(pack(json.dumps(document).encode()))
    for name in ("run.json.xz", "run.json", "saved", "other"):
        assert load(tmp_path / name) == document
    elapsed = [one["view"]["elapsed_ms"] for one in document["snapshots"]]
    assert elapsed == [round(shot["elapsed_ms"], 1) for shot in snapshots]
    for lane, figures in document["snapshots"][-1]["view"]["lanes"].items():
        written: dict[str, str] = {}
        for line in log_lines(document, lane, len(elapsed)):
            for index, tokens in line["new"].items():
                written[index] = written.get(index, "") + "".join(token[1] for token in tokens)
        last: Any = snapshots[-1]["lanes"][lane]
        assert figures["metrics"] == {name: digits(value) for name, value in last["metrics"].items()}
        assert list(written.values()) == [sequence["text"] for sequence in last["sequences"]]


def test_snapshots_without_lanes_are_left_out(snapshots: list[Snapshot]) -> None:
    measuring: Any = {**snapshots[0], "lanes": {}, "phase": "measuring"}
    assert len(record([measuring, *snapshots], "")["snapshots"]) == len(snapshots)
    with pytest.raises(ValueError, match="no snapshot has lanes"):
        record([measuring], "")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not json", "contains no JSON document"),
        (b"[" * 100_000, "contains no JSON document"),
        (b'{"about": Infinity}', "contains no JSON document"),
        (b"\x1f\x8b not gzip", "Cannot read the recording|contains no JSON document"),
        (b"\xfd7zXZ\x00 not xz", "contains no JSON document"),
        (b"[]", 'lacks "recording": 6'),
        (b'{"run": 1, "lanes": {}}', '"Save as a page" on this page writes'),
        (b'{"recording": 4, "lines": []}', '"Save as a page" on this page writes'),
        (b'{"recording": 6}', "its head cannot be drawn"),
        (None, "Cannot read the recording"),
    ],
)
def test_files_that_are_no_recordings_are_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(BassError, match=message) as refusal:
        load(tmp_path / "run.json")
    assert str(refusal.value).endswith(".") and "\n" not in str(refusal.value)


FIRST, LAST = ("snapshots", 0), ("snapshots", -1)
LINE, BASS = (*FIRST, "lines", 0), (*LAST, "lines", -1, "bass")
VIEW, ROUNDS = (*FIRST, "view"), (*BASS, "rounds")
ROW = {
    "sequence": 0, "start": 0, "written": 1, "accepted": 0, "one_by_one": 0, "next_p": None, "drafted": [],
    "drafted_text": [], "p": [], "q": [], "u": [], "chance": [], "parents": None, "path": None, "detail": None,
}  # fmt: skip
DRAFTS = {"drafted": [5, 6], "drafted_text": ["a", "b"]} | {name: [1, 1] for name in ("p", "q", "u", "chance")}
CANDIDATE = {"token": 5, "text": "x", "p": 0.5, "q": None, "residual": None}
ENDING = {"after": 1, "draft": 0, "mass": 0.5, "reach": 0.1, "top": [CANDIDATE]}
DETAIL = {"rule": "block", "sources": ["model", "model"], "own_p": None, "own_q": None, "ending": ENDING}


def one_round(row: dict[str, Any] | None = None, **changed: Any) -> list[dict[str, Any]]:
    record = {"round": 1, "kind": "verify", "draft_length": 1, "lengths": [1], "time_ms": 1, "draft_ms": None}
    return [record | {"verify_ms": None, "rows": [ROW | (row or {})]} | changed]


# Name of a part in the error -> ways to damage that part: (path in the recording, value that is put there).
BREAKS: dict[str, list[tuple[tuple[Any, ...], Any]]] = {
    "its head": [
        (("head",), None),
        *((("head", "lanes"), value) for value in ([], ["__proto__"], ['a"b'])),
        *((("head", "batch_size"), value) for value in (-1, 10**9)),
    ],
    "its snapshots": [
        *((("snapshots",), value) for value in ([], {})),
        (FIRST, 7),
        ((*FIRST, "lines"), {}),
        ((*LINE, "bass"), []),
        ((*LINE, "other"), {"clock_ms": 1, "new": {}, "rounds": []}),
        ((*LINE, "bass", "clock_ms"), "late"),
        ((*LINE, "bass", "new", "9"), [["s", "x", 1, 5]]),
        ((*LINE, "bass", "new", "-1"), []),
        *(((*LINE, "bass", "new", "0"), value) for value in ([["+", "x", 1, 5]], {})),
        *(((*BASS, "new", "0"), [value]) for value in (["x", "x", 1, 5], ["s", 7, 1, 5], ["s", "x", True, 5])),
        (ROUNDS, [[1, "ve", 1, 1, []]]),
        (ROUNDS, one_round(kind="no")),
        (ROUNDS, one_round(draft_length="1")),
        (ROUNDS, one_round(draft_ms="2")),
        (ROUNDS, one_round(lengths=[1, 2])),
        (ROUNDS, one_round({"sequence": 5})),
        (ROUNDS, one_round({"start": 4000})),
        (ROUNDS, one_round({"accepted": 1})),
        (ROUNDS, one_round(DRAFTS | {"u": [1]})),
        (ROUNDS, one_round(DRAFTS | {"drafted_text": ["a"]})),
        (ROUNDS, one_round(DRAFTS | {"parents": [0, -1], "path": []})),
        (ROUNDS, one_round(DRAFTS | {"parents": [-1, -1], "path": [2]})),
        (ROUNDS, one_round(DRAFTS | {"detail": DETAIL | {"sources": ["model"]}})),
        (ROUNDS, one_round(DRAFTS | {"detail": DETAIL | {"ending": ENDING | {"top": [{"token": 5}]}}})),
        ((*VIEW, "lanes", "bass"), {}),
        ((*VIEW, "lanes", "bass", "finish_reasons"), [None] * 99),
        *(((*VIEW, "comparison"), {"bass": value}) for value in (7, [{"at": "here"}], [None] * 99)),
        *(((*VIEW, key), value) for key, value in (("elapsed_ms", "soon"), ("device", None), ("verdict", None))),
    ],
    "its charts": [(("charts",), []), (("charts", "series", "rss_mb"), ["much"])],
    "its charts or its end": [(("ended",), "perhaps")],
}


def test_the_error_names_the_damaged_part(tmp_path: Path) -> None:
    for part, breaks in BREAKS.items():
        for path, value in breaks:
            broken = at = copy.deepcopy(SHIPPED["win"].recording)
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = value
            (tmp_path / "run.json").write_text(json.dumps(broken))
            with pytest.raises(BassError, match=rf"is not a recording: {part}.* cannot be drawn\.$"):
                load(tmp_path / "run.json")


def test_trees_and_inspected_rounds_are_accepted(tmp_path: Path) -> None:
    whole = copy.deepcopy(SHIPPED["win"].recording)
    line = whole["snapshots"][-1]["lines"][-1]["bass"]
    tree = {"parents": [-1, -1], "path": [1], "accepted": 1, "one_by_one": 1, "next_p": 0.5, "detail": DETAIL}
    # Lengths are empty if the decoder does not report them per row.
    line["rounds"] = [*one_round(DRAFTS | tree), *one_round(lengths=[])]
    (tmp_path / "run.json").write_text(json.dumps(whole))
    assert load(tmp_path / "run.json") == whole


def test_shipped_recordings_are_small_and_have_their_command() -> None:
    assert {"win", "loss", "h100"} <= set(SHIPPED)
    for name, offer in SHIPPED.items():
        assert offer.path.stat().st_size <= LARGEST
        made = offer.recording["made"]
        assert made["command"].startswith("python -m bench record") and made["versions"]["torch"], name
        assert made["date"] in offer.recording["about"]
        assert made["device"].split(",")[0] in offer.recording["about"]
    speed = {name: _last(offer.recording)["bass"]["metrics"]["speedup"] for name, offer in SHIPPED.items()}
    assert speed["win"] > 1 > speed["loss"]


def _last(document: dict[str, Any]) -> dict[str, Any]:
    lanes: dict[str, Any] = document["snapshots"][-1]["view"]["lanes"]
    return lanes


@pytest.mark.parametrize("name", list(SHIPPED))
def test_figures_of_shipped_recordings_follow_from_their_rounds(name: str) -> None:
    document = SHIPPED[name].recording
    rows, count = document["head"]["batch_size"], len(document["snapshots"])
    for at in (count // 2, count - 1):
        shown = document["snapshots"][at]["view"]["lanes"]
        for lane, figures in shown.items():
            added = log_lines(document, lane, at)
            rounds = list(chain.from_iterable(line["rounds"] for line in added))
            sizes = [0] * rows
            for line in added:
                for index, tokens in line["new"].items():
                    sizes[int(index)] += sum(token[0] != "+" for token in tokens)
            ends = [0.0, *(one["time_ms"] for one in rounds)]
            spent = zip(rounds, ends, ends[1:], strict=False)
            reading = sum(end - begin for one, begin, end in spent if one["kind"] == "prefill")
            cut = [reason not in NATURAL for reason in figures["finish_reasons"]]
            shares = [
                1 / sum(size >= place or open_ for size, open_ in zip(sizes, cut, strict=True))
                for length in sizes
                for place in range(2, length + 1)
            ]
            steps = [row for one in rounds if one["kind"] != "prefill" for row in one["rows"]]
            ended = [(row, row["detail"]["ending"]) for row in steps if row["detail"] and row["detail"]["ending"]]
            for row, end in ended:
                rejected = [] if end["draft"] is None else [row["drafted"][end["draft"]]]
                assert set(rejected) <= {one["token"] for one in end["top"]}
            drafted = sum(len(row["drafted"]) for row in steps)
            accepted = sum(row["accepted"] for row in steps)
            metrics = figures["metrics"]
            counts = [metrics[key] for key in ("new_tokens", "drafted", "accepted")]
            assert counts == [sum(sizes), drafted, accepted]
            assert metrics["acceptance_rate"] == (pytest.approx(accepted / drafted, rel=1e-5) if drafted else None)
            if shares:
                per_token = (ends[-1] - reading) / sum(shares)
                assert metrics["ms_per_token"] == pytest.approx(per_token, rel=1e-3)
                assert metrics["plain_steps"] == pytest.approx(sum(shares), rel=1e-5)
        assert shown["regular"]["metrics"]["speedup"] in (None, pytest.approx(1))
    written = [texts(document, lane) for lane in shown]
    if all(one == written[0] for one in written):
        # For equal texts, the speed-up is the ratio of the times.
        times = {lane: m["metrics"]["ms_per_token"] * m["metrics"]["plain_steps"] for lane, m in shown.items()}
        for lane, ms in times.items():
            assert shown[lane]["metrics"]["speedup"] == pytest.approx(times["regular"] / ms, rel=1e-3)
    else:
        assert name != "win"


def test_replay_accepts_a_name_a_file_or_nothing(tmp_path: Path) -> None:
    assert requested_recordings("") == SHIPPED and list(requested_recordings("win")) == ["win"]
    save(SHIPPED["win"].recording, tmp_path / "mine.json")
    offer = requested_recordings(str(tmp_path / "mine.json"))["file"]
    assert offer.title == "mine.json" and offer.recording == SHIPPED["win"].recording
    with pytest.raises(BassError, match="Cannot read the recording nothing"):
        requested_recordings("nothing")
