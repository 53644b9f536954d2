"""`python -m bench spec --questions FILE`: acceptance and speed-up on the standard workload, by category.

FILE has the format of Spec-Bench (prompts.py). The seed draws `--per-category` questions of each category. All
their turns are asked, with regular decoding's answers to the earlier turns as context. A text ends at the model's
end token. Arms take turns step by step.

These figures are over BASS's rounds: "tokens a round" is 1 + accepted drafts per row-round that drafted, and `a`
is accepted / tested drafts. `at i` is a share of the row-rounds with at least i drafts: those in which the first i
drafts were accepted. "ms/token" is the median of the calls. A speed-up is the time that regular decoding would
need for the arm's texts divided by the arm's time (bass_core/lanes/pace.py), as the geometric mean over the calls;
+- is 1.96 standard errors of its logarithm, in per cent. "all" joins the categories.
"""

from __future__ import annotations

import math
import random
from argparse import Namespace
from collections.abc import Sequence
from itertools import cycle
from statistics import fmean, stdev
from typing import Any

import plotly.graph_objects as go

from bass_core import ModelPair, SamplingParams
from bass_core.decode.measuring import with_costs
from bass_core.decode.request import make_request
from bass_core.lanes.lane import Lane

from ..prompts import Question, questions
from ..report.figures import COLOURS, draw, figure
from ..report.report import (
    at_least,
    document,
    draft_length,
    load,
    median,
    number,
    parser,
    readable,
    show,
    table,
    whole,
)
from .default import run_by_turns

REGULAR, SPECULATIVE, BASS = "regular", "speculative", "bass"
ARMS = (REGULAR, SPECULATIVE, BASS)
# The table has a column `at i` for each of the first PLACES drafts.
PLACES = 3
# Claims about all categories together: the least `a` by temperature, with only the draft model and a fixed length.
ACCEPTED = {0.0: 0.54, 0.7: 0.48}
# The least speed-up of BASS over regular decoding by temperature and batch, with the default length and drafter,
# on two cores with AMX.
FASTER = {0.0: {1: 1.7, 2: 1.45, 4: 1.3, 8: 1.15}, 0.7: {1: 1.5, 2: 1.3, 4: 1.2, 8: 1.08}}

Row = dict[str, Any]
# For each call, the lane of each arm.
Calls = list[dict[str, Lane]]


def main(argv: list[str]) -> None:
    """Ask, print, draw, and write."""
    options = parser("spec", __doc__ or "", "pair", "draft", "device", "dtype", figures=True)
    options.add_argument("--questions", type=readable, metavar="FILE", required=True)
    options.add_argument("--categories", nargs="+", help="default: all of the file")
    options.add_argument("--per-category", type=whole(), default=20)
    options.add_argument("--temperatures", type=number(), nargs="+", default=list(ACCEPTED))
    options.add_argument("--batches", type=whole(), nargs="+", default=[1, 4])
    options.add_argument("--tokens", type=whole(), default=96, help="most new tokens per answer")
    options.add_argument("--draft-length", default="auto", type=draft_length, help="as for `bass generate`")
    options.add_argument("--drafter", default="auto", help="as for bass_core.generate")
    options.add_argument("--tree", type=whole(), nargs="+", help="draft trees of this shape, for example 3 2 1")
    arguments = options.parse_args(argv)
    if arguments.quick:
        arguments.per_category, arguments.batches, arguments.tokens = 2, [1, 2], 12
    asked = sampled(questions(arguments.questions), arguments.per_category, arguments.seed)
    missing = set(arguments.categories or asked) - set(asked)
    if missing:
        options.error(f"the file has no questions of {', '.join(sorted(missing))}.")
    pair = load(arguments)
    results: list[Row] = []
    for temperature in arguments.temperatures:
        for batch in arguments.batches:
            done: Calls = []
            for category in arguments.categories or asked:
                calls = _ask(pair, asked[category], batch, temperature, arguments)
                done += calls
                results.append(_row(category, batch, temperature, calls))
                print(table(results[-1:]), flush=True)
            results.append(_row("all", batch, temperature, done))
    print(table(results))
    report = document("spec", arguments, pair, results, claims(results, arguments))
    if arguments.report:
        report["files"] = draw("spec", arguments.report, {"speedup": _speeds(results)})
    show(report, arguments)


def sampled(pool: Sequence[Question], most: int, seed: int) -> dict[str, list[Question]]:
    """Draw at most `most` questions of each category, with categories in the file's order."""
    by_category: dict[str, list[Question]] = {}
    for question in pool:
        by_category.setdefault(question.category, []).append(question)
    dice = random.Random(seed)
    return {name: dice.sample(group, min(most, len(group))) for name, group in by_category.items()}


def _ask(pair: ModelPair, asked: list[Question], batch: int, temperature: float, arguments: Namespace) -> Calls:
    """Ask all turns of the questions, `batch` questions at a time; leave out a last, smaller batch."""
    calls: Calls = []
    for first in range(0, len(asked) - batch + 1, batch):
        together = asked[first : first + batch]
        talks: list[list[dict[str, str]]] = [[] for _ in together]
        for turn in range(min(len(question.turns) for question in together)):
            for talk, question in zip(talks, together, strict=True):
                talk.append({"role": "user", "content": question.turns[turn]})
            lanes = _lanes(pair, talks, temperature, arguments)
            run_by_turns(list(lanes.values()))
            calls.append(lanes)
            for talk, row in zip(talks, lanes[REGULAR].sequences, strict=True):
                talk.append(
                    {
                        "role": "assistant",
                        "content": pair.tokenizer.decode(row.token_ids, skip_special_tokens=True),
                    }
                )
    return calls


def _lanes(pair: ModelPair, talks: Any, temperature: float, arguments: Namespace) -> dict[str, Lane]:
    request = make_request(
        pair, [list(talk) for talk in talks], max_new_tokens=arguments.tokens, seed=arguments.seed,
        sampling=SamplingParams(temperature), draft_length=arguments.draft_length,
        drafter=arguments.drafter, tree=None if arguments.tree is None else tuple(arguments.tree),
    )  # fmt: skip
    request = with_costs(pair, request, len(talks))
    return {arm: Lane(pair, request, arm) for arm in ARMS}


def _row(category: str, batch: int, temperature: float, calls: Calls) -> Row:
    counts = [call[BASS].counts for call in calls]
    drafting = sum(count.drafting_rows for count in counts)
    accepted, tested = sum(count.accepted for count in counts), sum(count.tested for count in counts)
    row: Row = {
        "category": category, "temperature": temperature, "batch": batch, "calls": len(calls),
        "tokens a round": 1 + accepted / drafting if drafting else None,
        "a": accepted / tested if tested else None,
    }  # fmt: skip
    for place in range(PLACES):
        drafted_at = sum(count.drafted_at[place] for count in counts if place < len(count.drafted_at))
        accepted_at = sum(count.accepted_at[place] for count in counts if place < len(count.accepted_at))
        row[f"at {place + 1}"] = accepted_at / drafted_at if drafted_at else None
    times = {arm: [call[arm].metrics().ms_per_token for call in calls] for arm in ARMS}
    known = [ms for ms in zip(*times.values(), strict=True) if None not in ms]
    for place, arm in enumerate(ARMS):
        row[f"{arm} ms/token"] = median([ms[place] for ms in known]) if known else None
    for arm in ARMS[1:]:
        speeds = [call[arm].pace.speedup(call[REGULAR].pace) for call in calls]
        speed, spread = mean_ratio([value for value in speeds if value is not None])
        row |= {arm: speed, f"{arm} +-%": spread}
    return row


def mean_ratio(ratios: list[float]) -> tuple[float | None, float | None]:
    """Return the geometric mean, and 1.96 standard errors of its logarithm in per cent.

    Without ratios the mean is None, and with fewer than two the error is None.
    """
    if not ratios:
        return None, None
    logs = [math.log(ratio) for ratio in ratios]
    error = 196 * stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else None
    return math.exp(fmean(logs)), error


def claims(results: list[Row], arguments: Namespace) -> list[Row]:
    """Return the claims about all categories together; a quick run leaves them open."""
    verdicts, decided = [], not arguments.quick
    only_model = arguments.drafter == "model" and isinstance(arguments.draft_length, int)
    for row in (row for row in results if row["category"] == "all"):
        temperature, batch = row["temperature"], row["batch"]
        if only_model and batch == 1 and temperature in ACCEPTED and row["a"] is not None:
            verdicts.append(at_least(f"a, temperature {temperature:g}", row["a"], ACCEPTED[temperature], decided))
        bar = FASTER.get(temperature, {}).get(batch)
        if arguments.draft_length == "auto" and bar is not None and row[BASS] is not None:
            how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
            verdicts.append(at_least(f"bass / regular, {how}, batch {batch}", row[BASS], bar, decided))
    return verdicts


def _speeds(results: list[Row]) -> go.Figure:
    """Draw BASS's greedy speed-up over regular decoding by category."""
    chart = figure("BASS over regular decoding, greedy", "category", "times as fast")
    batches = sorted({row["batch"] for row in results})
    for colour, batch in zip(cycle(COLOURS.values()), batches, strict=False):
        rows = [
            row for row in results if row["batch"] == batch and row["temperature"] == results[0]["temperature"]
        ]
        errors = [row[BASS] * (row[f"{BASS} +-%"] or 0) / 100 if row[BASS] else None for row in rows]
        chart.add_bar(
            x=[row["category"] for row in rows], y=[row[BASS] for row in rows], name=f"batch {batch}",
            error_y={"array": errors}, marker_color=colour,
        )  # fmt: skip
    chart.add_hline(1.0, line_dash="dot")
    return chart
