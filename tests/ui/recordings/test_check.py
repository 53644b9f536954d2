"""A tape whose parts point to what is not there is refused with one sentence that names the part."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from bass_core import BassError
from ui.recordings.check import fault
from ui.recordings.load import load_recording
from ui.recordings.shelf import SHIPPED

DRAFT = ["a", 1, 1, 1, 1]
# (what is replaced, by what, the part that is named)
BREAKS: list[tuple[tuple[Any, ...], Any, str]] = [
    (("head",), None, "its head"),
    (("head", "lanes"), [], "its head"),
    (("head", "batch_size"), -1, "its head"),
    (("lines",), {}, "its lines"),
    (("lines", 0, "bass"), [], "its lines"),
    (("lines", 0, "other"), {"clock_ms": 1, "new": {}, "rounds": []}, "its lines"),
    (("lines", 0, "bass", "clock_ms"), "late", "its lines"),
    (("lines", 0, "bass", "new", "9"), [["s", "x", 1, 5]], "its lines"),
    (("lines", 0, "bass", "new", "0"), [["+", "x", 1, 5]], "its lines"),
    (("lines", -1, "bass", "new", "0"), [["x", "x", 1, 5]], "its lines"),
    (("lines", -1, "bass", "rounds"), [[1, "no", 1, 1, []]], "its lines"),
    (("lines", -1, "bass", "rounds"), [[1, "ve", "1", 1, []]], "its lines"),
    (("lines", -1, "bass", "rounds"), [[1, "ve", [1, 2], 1, [[0, 0, 1, 0, None, [], 0]]]], "its lines"),
    (("lines", -1, "bass", "rounds"), [[1, "ve", 1, 1, [[5, 0, 1, 0, None, [], 0]]]], "its lines"),
    (("lines", -1, "bass", "rounds"), [[1, "ve", 1, 1, [[0, 4000, 1, 0, None, [], 0]]]], "its lines"),
    (("lines", -1, "bass", "rounds"), [[1, "ve", 1, 1, [[0, 0, 1, 1, None, [], 0]]]], "its lines"),
    (("lines", -1, "bass", "rounds"), [[1, "ve", 1, 1, [[0, 0, 1, 0, None, [DRAFT], 0, [0], []]]]], "its lines"),
    (("shown",), [], "what it showed"),
    (("shown", 0, "lines"), 10**6, "what it showed"),
    (("shown", 0, "view", "lanes", "bass"), {}, "what it showed"),
    (("shown", 0, "view", "lanes", "bass", "finish_reasons"), [None] * 99, "what it showed"),
    (("shown", 0, "view", "verdict"), None, "what it showed"),
    (("charts",), [], "its charts"),
    (("charts", "series", "rss_mb"), ["much"], "its charts"),
    (("ended",), "perhaps", "its charts or its end"),
]  # fmt: skip


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """A tape that can be drawn, of one row."""
    return SHIPPED["win"].recording.document


@pytest.mark.parametrize(("path", "value", "part"), BREAKS, ids=lambda value: str(value)[:40])
def test_a_damaged_tape_is_refused(
    document: dict[str, Any], path: tuple[Any, ...], value: Any, part: str, tmp_path: Path
) -> None:
    broken = at = copy.deepcopy(document)
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    assert str(fault(broken)).startswith(part) and fault(document) is None
    (tmp_path / "run.json").write_text(json.dumps(broken))
    with pytest.raises(BassError, match=r"is not a recording: .* cannot be drawn\.") as refusal:
        load_recording(tmp_path / "run.json")
    assert "\n" not in str(refusal.value)
