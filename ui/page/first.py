"""The first race: a text and a number of rows at which BASS is predicted to win clearly on this machine.

Call `first_race`. The prediction uses the costs of rounds, which are measured once and stored, and how often the
drafts of each text were accepted elsewhere (readers.json). `remember` stores the speed-ups of such races, and they
replace the predictions from the next start on.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from bass_core import DEFAULT_METHOD, LaneSnapshot, ModelPair, costs_file, expected_speedup
from ui.page.clock import MEASURED
from ui.page.presets import H100, QUESTIONS, REPEAT, First, presets
from ui.sweep.readers import figures

# Texts, with their names in readers.json, and numbers of rows, in the order in which they are tried.
TEXTS, READERS = {QUESTIONS: "questions", REPEAT: "repeat"}, (8, 4, 2, 1)
# The smallest speed-up that is a clear win, and the smallest predicted one. It is larger, because predictions
# may be too high: their costs are measured within seconds (python -m bench presets).
CLEAR, PREDICTED = 1.2, 1.3
# The maximum seconds that the first start measures for each number of rows.
MEASURE_S = 10.0
# How many speed-ups of earlier races are kept for each text and number of rows. Their median counts.
KEPT = 5
# The settings of a race that its speed-up depends on, with their values unless the preset sets others.
DEFAULTS = {
    "clock": MEASURED, "drafter": "auto", "acceptance": None, "time_budget_ms": None, "max_new_tokens": 64,
    "repetition_penalty": 1.0, "json_schema": None, "regex": None, "grammar": None,
}  # fmt: skip
SAME = ("prompt", "temperature", "draft_length", *DEFAULTS)
NO_WIN = (
    "On this machine drafting does not pay off clearly, not even for one reader. So this race predicts the times "
    "of an H100."
)

_log = logging.getLogger(__name__)


def first_race(pair: ModelPair, max_batch: int = max(READERS), measures: bool = True) -> First:
    """Return the first race for this pair, on this machine.

    Args:
        max_batch: the most rows that the operator allows.
        measures: whether missing costs may be measured.
    """
    # The acceptance was measured with one pair, so it doesn't hold for the others.
    if pair.name != figures()["pair"]:
        return First()
    raced, unknown = _raced(pair), True
    for name, rows in candidates():
        if rows > max_batch:
            continue
        earlier = raced.get(_key(name, rows))
        try:
            speedup = median(earlier) if earlier else predicted(pair, name, rows, MEASURE_S * measures)
        except Exception as error:  # the page starts all the same
            _log.warning("The first race could not be predicted (%s): %s", type(error).__name__, error)
            return First()
        unknown = unknown and speedup is None
        if speedup is not None and speedup >= (CLEAR if earlier else PREDICTED):
            how = "Earlier races on this machine" if earlier else "Predicted for this machine"
            return First(name, rows, f"{how}: BASS is about {speedup:.1f} times as fast as Regular.")
    return First() if unknown else First(H100, presets()[H100].values["batch_size"], NO_WIN)


def candidates() -> list[tuple[str, int]]:
    """Return the possible first races, (preset, rows), the best one first. Each question is one row."""
    questions = len(presets()[QUESTIONS].values["prompt"].split("\n"))
    return [(name, rows) for name in TEXTS for rows in READERS if name != QUESTIONS or rows <= questions]


def predicted(pair: ModelPair, name: str, rows: int, measure_s: float = 0.0) -> float | None:
    """Return expected_speedup for a preset with this many rows. `measure_s` is for missing costs."""
    values = presets()[name].values
    length: str = values["draft_length"]
    return expected_speedup(
        pair,
        figures()["texts"][TEXTS[name]]["acceptance"][:rows],
        rows=rows,
        draft_length=int(length) if length.isdecimal() else length,
        temperature=values["temperature"],
        measure_s=measure_s,
    )


def remember(pair: ModelPair, settings: Mapping[str, Any], lanes: Mapping[str, LaneSnapshot]) -> None:
    """Store the speed-up of a race like a first one, so that it replaces the prediction.

    Args:
        settings: the settings of the race.
        lanes: the lanes at the end of the race.
    """
    key, bass = _key_of(settings), lanes.get(DEFAULT_METHOD)
    speedup = bass and not bass["error"] and bass["finished"] and bass["metrics"]["speedup"]
    if key is None or not speedup or (path := _path(pair)) is None:
        return
    raced = _raced(pair)
    raced[key] = [*raced.get(key, []), speedup][-KEPT:]
    with suppress(OSError):  # the next start predicts again
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(raced), encoding="utf-8")
        part.replace(path)


def _key_of(settings: Mapping[str, Any]) -> str | None:
    """Return the key of a race with the settings of a possible first race, or None."""
    rows = settings["batch_size"]
    for name in TEXTS if rows in READERS else ():
        asked = {**DEFAULTS, **presets()[name].values, "prompt": _prompt(name, rows)}
        if all(str(settings[key]) == str(asked[key]) for key in SAME):
            return _key(name, rows)
    return None


def _prompt(name: str, rows: int) -> str:
    """Return the text that a preset races with this many rows."""
    values = presets()[name].values
    prompt: str = values["prompt"]
    return "\n".join(prompt.split("\n")[:rows]) if values.get("prompts") == "lines" else prompt


def _key(name: str, rows: int) -> str:
    return f"{name}, {rows}"


def _path(pair: ModelPair) -> Path | None:
    costs = costs_file(pair)
    return costs and costs.with_suffix(".races")


def _raced(pair: ModelPair) -> dict[str, list[float]]:
    """Return the stored speed-ups by key; none if the file is missing or damaged."""
    path = _path(pair)
    try:
        raced = json.loads(path.read_text(encoding="utf-8")) if path else {}
        return {key: [float(speedup) for speedup in speedups] for key, speedups in raced.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
