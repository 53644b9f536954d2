"""The recordings that ship are small, can be drawn, and their figures follow from their rounds."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import pytest

from bass_core import BassError
from ui.recordings.check import fault
from ui.recordings.shelf import SHIPPED, asked

LARGEST = 150_000


@pytest.fixture(scope="module", params=list(SHIPPED))
def document(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A recording that ships."""
    return SHIPPED[request.param].recording.document


def news(document: dict[str, Any], lane: str, lines: int) -> list[dict[str, Any]]:
    """What the first lines bring to a lane."""
    return [line[lane] for line in document["lines"][:lines] if lane in line]


def test_they_are_small_and_say_how_they_were_made() -> None:
    assert {"win", "loss", "h100"} <= set(SHIPPED)
    for name, offer in SHIPPED.items():
        assert offer.path.stat().st_size <= LARGEST
        made = offer.recording.document["made"]
        assert made["command"].startswith("python -m bench record") and made["versions"]["torch"], name
        assert made["date"] in offer.recording.about and made["device"].split(",")[0] in offer.recording.about


def test_each_can_be_drawn(document: dict[str, Any]) -> None:
    assert fault(document) is None


def test_figures_follow_from_the_rounds(document: dict[str, Any]) -> None:
    rows = document["head"]["batch_size"]
    for one in (document["shown"][len(document["shown"]) // 2], document["shown"][-1]):
        per_token = {}
        for lane, figures in one["view"]["lanes"].items():
            added = news(document, lane, one["lines"])
            rounds = list(chain.from_iterable(line["rounds"] for line in added))
            sizes = [0] * rows
            for line in added:
                for index, tokens in line["new"].items():
                    sizes[int(index)] += sum(token[0] != "+" for token in tokens)
            ends = [0.0, *(ms for _, _, _, ms, *_ in rounds)]
            reading = sum(
                end - begin
                for (_, kind, *_), begin, end in zip(rounds, ends, ends[1:], strict=False)
                if kind == "pr"
            )
            decoded = sum(sizes) - sum(map(bool, sizes))
            steps = [row for _, kind, _, _, of_rows, *_ in rounds if kind != "pr" for row in of_rows]
            drafted, accepted = sum(len(row[5]) for row in steps), sum(row[3] for row in steps)
            metrics = figures["metrics"]
            assert (metrics["new_tokens"], metrics["drafted"], metrics["accepted"]) == (
                sum(sizes),
                drafted,
                accepted,
            )
            assert metrics["acceptance_rate"] == (pytest.approx(accepted / drafted) if drafted else None)
            if decoded:
                per_token[lane] = rows * (figures["clock_ms"] - reading) / decoded
                assert metrics["ms_per_token"] == pytest.approx(per_token[lane], rel=1e-3)
        for lane, ms in per_token.items():
            speedup = one["view"]["lanes"][lane]["metrics"]["speedup"]
            assert speedup == pytest.approx(per_token["regular"] / ms, rel=2e-3)


def test_the_win_wins_and_the_loss_loses() -> None:
    speed = {
        name: offer.recording.document["shown"][-1]["view"]["lanes"]["bass"]["metrics"]["speedup"]
        for name, offer in SHIPPED.items()
    }
    assert speed["win"] > 1 > speed["loss"]


def test_replay_takes_names_files_and_nothing(tmp_path: Any) -> None:
    assert asked("") == SHIPPED and list(asked("win")) == ["win"]
    copy = tmp_path / "mine.json"
    copy.write_text(json.dumps(SHIPPED["win"].recording.document))
    offer = asked(str(copy))["file"]
    assert (
        offer.title == "mine.json"
        and offer.recording.document["lines"] == SHIPPED["win"].recording.document["lines"]
    )
    with pytest.raises(BassError, match="Cannot read the recording nothing"):
        asked("nothing")
