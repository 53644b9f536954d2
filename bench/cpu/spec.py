"""`python -m bench spec --questions FILE`: what drafts are worth on the standard workload, category by category.

Contract: FILE has the form of Spec-Bench (prompts.py); `--per-category` of its questions are drawn for each
category by the seed. All their turns are asked, after regular decoding's answers to the turns before; a text ends
where the model ends it. Arms take turns step by step. "tokens a round" is 1 + accepted drafts a row-round that
drafted, `a` accepted / tested drafts, `at i` how often a row that drafted i of them had them all accepted; all of
BASS's rounds. "ms/token" is the calls' median. A speed is the time that regular decoding would need for the arm's
texts over the arm's time (bass_core/lanes/pace.py), the geometric mean of the calls; +- is 1.96 standard errors of
its logarithm, in per cent. "all" joins the categories.
"""

from __future__ import annotations

import math
import random
from argparse import Namespace
from collections.abc import Sequence
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
# Places of which the table tells how often a draft there is accepted.
PLACES = 3
# Claimed of all categories together: `a` by temperature, with only the draft model and a fixed length; and BASS's
# speed over regular by temperature and batch, with the default length and drafter, on two cores with AMX.
ACCEPTED = {0.0: 0.54, 0.7: 0.48}
FASTER = {0.0: {1: 1.7, 2: 1.45, 4: 1.3, 8: 1.15}, 0.7: {1: 1.5, 2: 1.3, 4: 1.2, 8: 1.08}}

Row = dict[str, Any]
# The lanes of each call, one an arm.
Calls = list[dict[str, Lane]]


def main(argv: list[str]) -> None:
    """Ask, print, draw, and write."""
    options = parser("spec", __doc__ or "", "pair", "draft", "device", "dtype", figures=True)
    options.add_argument("--questions", type=readable, metavar="FILE", required=True)
    options.add_argument("--categories", nargs="+", help="default: all of the file")
    options.add_argument("--per-category", type=whole(), default=20)
    options.add_argument("--temperatures", type=number(), nargs="+", default=list(ACCEPTED))
    options.add_argument("--batches", type=whole(), nargs="+", default=[1, 4])
    options.add_argument("--tokens", type=whole(), default=96, help="the most new tokens of an answer")
    options.add_argument("--draft-length", default="auto", type=draft_length, help="as for `bass generate`")
    options.add_argument("--drafter", default="auto", help="as for `bass generate`")
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
    made = document("spec", arguments, pair, results, claims(results, arguments))
    if arguments.report:
        made["files"] = draw("spec", arguments.report, {"speedup": _speeds(results)})
    show(made, arguments)


def sampled(found: Sequence[Question], most: int, seed: int) -> dict[str, list[Question]]:
    """At most `most` questions of each category, categories in the file's order."""
    by_category: dict[str, list[Question]] = {}
    for one in found:
        by_category.setdefault(one.category, []).append(one)
    chosen = random.Random(seed)
    return {name: chosen.sample(ones, min(most, len(ones))) for name, ones in by_category.items()}


def _ask(pair: ModelPair, asked: list[Question], batch: int, temperature: float, arguments: Namespace) -> Calls:
    """All turns of the questions, `batch` questions at a time; a last, smaller batch is left out."""
    calls: Calls = []
    for first in range(0, len(asked) - batch + 1, batch):
        together = asked[first : first + batch]
        talks: list[list[dict[str, str]]] = [[] for _ in together]
        for turn in range(min(len(one.turns) for one in together)):
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
        drafter=arguments.drafter,
    )  # fmt: skip
    request = with_costs(pair, request, len(talks))
    return {arm: Lane(pair, request, arm) for arm in ARMS}


def _row(category: str, batch: int, temperature: float, calls: Calls) -> Row:
    counts = [call[BASS].counts for call in calls]
    drafting = sum(one.drafting_rows for one in counts)
    accepted, tested = sum(one.accepted for one in counts), sum(one.tested for one in counts)
    row: Row = {
        "category": category, "temperature": temperature, "batch": batch, "calls": len(calls),
        "tokens a round": 1 + accepted / drafting if drafting else None,
        "a": accepted / tested if tested else None,
    }  # fmt: skip
    for place in range(PLACES):
        reached = sum(one.drafted_at[place] for one in counts if place < len(one.drafted_at))
        stood = sum(one.accepted_at[place] for one in counts if place < len(one.accepted_at))
        row[f"at {place + 1}"] = stood / reached if reached else None
    times = {arm: [call[arm].metrics().ms_per_token for call in calls] for arm in ARMS}
    known = [ms for ms in zip(*times.values(), strict=True) if None not in ms]
    for place, arm in enumerate(ARMS):
        row[f"{arm} ms/token"] = median([ms[place] for ms in known]) if known else None
    for arm in ARMS[1:]:
        speeds = [call[arm].pace.speedup(call[REGULAR].pace) for call in calls]
        speed, spread = mean_ratio([one for one in speeds if one is not None])
        row |= {arm: speed, f"{arm} +-%": spread}
    return row


def mean_ratio(ratios: list[float]) -> tuple[float | None, float | None]:
    """The geometric mean, and 1.96 standard errors of its logarithm in per cent; None without two ratios."""
    if not ratios:
        return None, None
    logs = [math.log(ratio) for ratio in ratios]
    error = 196 * stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else None
    return math.exp(fmean(logs)), error


def claims(results: list[Row], arguments: Namespace) -> list[Row]:
    """What all categories together are claimed to reach; a quick run decides nothing."""
    made, decided = [], not arguments.quick
    alone = arguments.drafter == "model" and isinstance(arguments.draft_length, int)
    for row in (row for row in results if row["category"] == "all"):
        temperature, batch = row["temperature"], row["batch"]
        if alone and batch == 1 and temperature in ACCEPTED and row["a"] is not None:
            made.append(at_least(f"a, temperature {temperature:g}", row["a"], ACCEPTED[temperature], decided))
        bar = FASTER.get(temperature, {}).get(batch)
        if arguments.draft_length == "auto" and bar is not None and row[BASS] is not None:
            how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
            made.append(at_least(f"bass / regular, {how}, batch {batch}", row[BASS], bar, decided))
    return made


def _speeds(results: list[Row]) -> go.Figure:
    """BASS's greedy speed over regular decoding by category."""
    made = figure("BASS over regular decoding, greedy", "category", "times as fast")
    colours = [COLOURS[name] for name in (BASS, SPECULATIVE, REGULAR)]
    batches = sorted({row["batch"] for row in results})
    for colour, batch in zip(colours * len(batches), batches, strict=False):
        rows = [
            row for row in results if row["batch"] == batch and row["temperature"] == results[0]["temperature"]
        ]
        errors = [row[BASS] * (row[f"{BASS} +-%"] or 0) / 100 if row[BASS] else None for row in rows]
        made.add_bar(
            x=[row["category"] for row in rows], y=[row[BASS] for row in rows], name=f"batch {batch}",
            error_y={"array": errors}, marker_color=colour,
        )  # fmt: skip
    made.add_hline(1.0, line_dash="dot")
    return made
