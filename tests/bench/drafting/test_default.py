"""`python -m bench default`: what it claims of its rows, and whose questions it asks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.drafting.default import main, speed_claims


def row(batch: int, auto: float, *fixed: float) -> dict[str, object]:
    lengths = dict(zip(("fixed 1", "fixed 2", "fixed 4"), fixed, strict=True))
    return {"text": "chat", "temperature": 0.0, "threads": 2, "batch": batch, "auto": auto, **lengths}


def test_the_worst_cases_are_named_and_decide() -> None:
    """A fixed length counts only where it beats regular decoding."""
    rows = [row(1, 1.3, 1.25, 1.4, 1.1), row(4, 0.98, 1.0, 0.9, 0.8), row(8, 0.99, 0.6, 0.7, 1.01)]
    regular, fixed = speed_claims(rows, quick=False)
    assert (regular["value"], regular["holds"]) == (0.98, True)
    assert regular["name"] == "auto / regular, least: chat, temperature 0, 2 threads, batch 4"
    assert (fixed["value"], fixed["holds"]) == (pytest.approx(1.3 / 1.4, abs=1e-4), False)
    assert fixed["name"].endswith("batch 1")
    assert [one["holds"] for one in speed_claims(rows, quick=True)] == [None, None]
    assert len(speed_claims([rows[1]], quick=False)) == 1


def test_a_text_without_questions_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"category": "coding", "turns": ["Sort a list.", "Faster."]}) + "\n")
    with pytest.raises(SystemExit):
        main(["--questions", str(file)])
    assert "no prompts for chat" in capsys.readouterr().err
