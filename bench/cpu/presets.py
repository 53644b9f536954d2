"""`python -m bench presets`: the page's presets at growing batches, predicted and raced, and the first race.

- A line is one race of regular decoding and BASS with the page's settings and number of threads. Predictions use
  this machine's stored costs of rounds; missing ones are measured first, as at the page's first start.
- The first race, with all lanes, is run `--runs` times. So is an edited prompt with nothing else touched: its
  draft length is then "auto".
"""

from __future__ import annotations

import gc
import os
from typing import Any

from app import parse, set_threads
from bass_core import ModelPair, race
from ui.page.choices import Choices
from ui.page.first import CLEAR, MEASURE_S, READERS, TEXTS, candidates, first_race, predicted
from ui.page.form import starting_values
from ui.page.limits import Limits
from ui.page.presets import H100, QUESTIONS, REPEAT, First, Preset, presets
from ui.page.request import make_request

from ..report.report import Row, at_least, claim, finish, load, median, parser, table, whole

# A prompt that a visitor might type, with the draft length that the page then chooses.
EDITED = Preset("", {"prompt": "Explain to a child why the sky is blue.", "batch_size": 4, "temperature": 0.7})
LANES = ["regular", "bass"]
LEAST_EDITED = 0.95
NAMES = [REPEAT, QUESTIONS, "Write code", "Tell a story"]


def main(argv: list[str]) -> None:
    """Predict, race, print, and write."""
    cli = parser("presets", __doc__ or "", "pair", "draft", "dtype")
    cli.add_argument("--presets", nargs="*", default=list(TEXTS), choices=NAMES, metavar="NAME")
    cli.add_argument("--batches", type=whole(), nargs="*", default=list(READERS[::-1]))
    cli.add_argument("--runs", type=whole(0), default=5, help="runs of the first race and of the edited prompt")
    arguments = cli.parse_args(argv)
    if arguments.quick:
        arguments.presets, arguments.batches, arguments.runs = [REPEAT], [1], 1
    pair = load(arguments, device="cpu")
    set_threads(parse(["--host", "127.0.0.1"]), os.environ)
    tokens = 8 if arguments.quick else 1024
    _speedup(pair, EDITED, 8)  # a pair's first rounds are slower
    gc.collect()
    gc.freeze()  # as the page does: a full collection takes as long as several rounds
    first = first_race(pair)
    results: list[Row] = []
    for name in arguments.presets:
        # A question is one row.
        for batch in (n for n in arguments.batches if name not in TEXTS or (name, n) in candidates()):
            preset = presets(First(name, batch))[name]
            results += _rows(name, batch, _predicted(pair, name, batch), [_speedup(pair, preset, tokens)])
            print(table(results[-1:]), flush=True)
    chosen, runs = presets(first)[first.name], range(arguments.runs)
    firsts = [_speedup(pair, chosen, tokens, lanes=None) for _ in runs]
    edited = [_speedup(pair, EDITED, tokens, seed) for seed in runs]
    results += _rows(f"first race: {first.name}", first.rows, _predicted(pair, first.name, first.rows), firsts)
    results += _rows("an edited prompt", 4, None, edited)
    finish(
        "presets", arguments, pair, results, _claims(first, firsts, edited, not arguments.quick) if runs else []
    )


def _predicted(pair: ModelPair, name: str, rows: int) -> float | None:
    return predicted(pair, name, rows, MEASURE_S) if name in TEXTS else None


def _rows(race: str, batch: int, expected: float | None, raced: list[float]) -> list[Row]:
    return [{"race": race, "batch": batch, "predicted": expected, "raced": each} for each in raced]


def _claims(first: First, firsts: list[float], edited: list[float], decided: bool) -> list[Row]:
    auto = at_least("auto / regular, an edited prompt at batch 4", median(edited), LEAST_EDITED, decided)
    if first.name == H100:
        return [auto, claim("clear wins that are predicted here", 0, "1 or more", None)]
    name = f"the first race ({first.name}, batch {first.rows}), least of {len(firsts)}"
    return [auto, at_least(name, min(firsts), CLEAR, decided)]


def _speedup(pair: ModelPair, preset: Preset, tokens: int, seed: int = 0, lanes: Any = LANES) -> float:
    """Return BASS's speed-up over regular decoding in one race of a preset."""
    values = starting_values(preset, Limits(max_new_tokens=tokens), Choices()) | {"seed": seed, "lanes": lanes}
    *_, last = race(pair, **make_request(values, Limits()).arguments())
    return float(last["lanes"]["bass"]["metrics"]["speedup"] or 0.0)
