"""`python -m bench default`: draft_length="auto" beside regular decoding, fixed lengths and Algorithm 1.

Contract: for each kind of text, temperature, batch and number of threads all arms answer the same prompts with the
same number of new tokens (no early end). Arms take turns step by step, and medians of the lanes' own ms per token
count. What rounds cost is measured before a lane's clock runs, as `race` does it. An arm's column is its speed
over regular decoding, the ratio of ms per token, since all texts are equally long (bass_core/lanes/pace.py);
`spread` is the largest of the arms' (highest - lowest) / median: a smaller difference is noise.

Prompts come from prompts.py, or with --questions from a file in the form of Spec-Bench, of which the first
turns are asked. Its texts are chat and code (KINDS), or any category.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

import torch

from bass_core import ModelPair, SamplingParams
from bass_core.decode.measuring import with_costs
from bass_core.decode.request import make_request
from bass_core.lanes.lane import Lane

from ..prompts import CHAT, CODE, REPEAT_ALL, questions, varied
from ..report.report import alike, at_least, finish, load, median, number, parser, readable, table, whole

REGULAR, AUTO = "regular", "auto"
FIXED = {f"fixed {length}": length for length in (1, 2, 4)}
ARMS: dict[str, Any] = {REGULAR: None, AUTO: "auto", **FIXED, "Algorithm 1": "bass"}
BUILT_IN = {"chat": CHAT, "code": CODE, "repeat": REPEAT_ALL}
# The categories of a file's questions that make a kind of text; another text is the category of its name.
KINDS = {"chat": ("writing", "roleplay", "reasoning", "stem", "humanities"), "code": ("coding",)}
# Claimed: "auto" is at least so fast as regular decoding, and as the best fixed length where that beats regular.
BAR = 0.97

Row = dict[str, Any]


def main(argv: list[str]) -> None:
    """Measure, print, and write."""
    options = parser("default", __doc__ or "", "pair", "draft", "dtype")
    options.add_argument("--texts", nargs="+", help="default: chat code repeat; of --questions, chat code")
    options.add_argument("--questions", type=readable, metavar="FILE", help="ask a file's questions instead")
    options.add_argument("--temperatures", type=number(), nargs="+", default=[0.0, 0.7])
    options.add_argument("--batches", type=whole(), nargs="+", default=[1, 2, 4, 8, 16])
    options.add_argument("--threads", type=whole(), nargs="+", default=[1, 2])
    options.add_argument("--tokens", type=whole(), default=96, help="new tokens of each text")
    options.add_argument("--repeats", type=whole(), default=3)
    arguments = options.parse_args(argv)
    if arguments.quick:
        arguments.batches, arguments.threads, arguments.tokens, arguments.repeats = [1, 2], [1], 12, 1
    prompts = _prompts(arguments, options)
    pair = load(arguments, device="cpu")
    results: list[Row] = []
    same: list[bool] = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for text, temperature in ((text, one) for text in prompts for one in arguments.temperatures):
            for batch in arguments.batches:
                samples = _samples(pair, varied(prompts[text], batch), temperature, arguments)
                case = {"text": text, "temperature": temperature, "threads": threads, "batch": batch}
                results.append(case | speeds(samples))
                print(table(results[-1:]), flush=True)
                if not temperature:
                    same += _same(samples)
    claims = speed_claims(results, arguments.quick)
    if same:
        # Rounding may decide a near tie otherwise, except in float32.
        share, exact = sum(same) / len(same), pair.dtype == torch.float32
        claims.append(alike("rows alike at temperature 0", share, exact))
    finish("default", arguments, pair, results, claims)


def _prompts(arguments: Namespace, options: ArgumentParser) -> dict[str, list[str]]:
    """The prompts of each kind of text."""
    if arguments.questions is None:
        found = {text: BUILT_IN.get(text, []) for text in arguments.texts or BUILT_IN}
    else:
        asked = questions(arguments.questions)
        found = {
            text: [one.turns[0] for one in asked if one.category in KINDS.get(text, (text,))]
            for text in arguments.texts or KINDS
        }
    unknown = [text for text, prompts in found.items() if not prompts]
    if unknown:
        options.error(f"there are no prompts for {', '.join(unknown)}: choose other --texts.")
    return found


def _samples(
    pair: ModelPair, prompts: list[str], temperature: float, arguments: Namespace
) -> dict[str, list[Lane]]:
    """`repeats` lanes of each arm, each repeat with a seed of its own, after a short unmeasured one."""
    samples: dict[str, list[Lane]] = {name: [] for name in ARMS}
    for repeat in range(arguments.repeats + 1):
        lanes = {}
        for name, length in ARMS.items():
            request = make_request(
                pair, prompts, max_new_tokens=arguments.tokens if repeat else min(8, arguments.tokens),
                eos_token_id=None, sampling=SamplingParams(temperature), seed=arguments.seed + repeat,
                draft_length=0 if length is None else length,
            )  # fmt: skip
            method = REGULAR if length is None else "bass"
            lanes[name] = Lane(pair, with_costs(pair, request, len(prompts)), method)
        run_by_turns(list(lanes.values()))
        for name, lane in lanes.items() if repeat else ():
            samples[name].append(lane)
    return samples


def run_by_turns(lanes: list[Lane]) -> None:
    """Step the lane that has written least, so that a slow moment of the machine meets all of them alike."""
    while unfinished := [lane for lane in lanes if not lane.finished]:
        min(unfinished, key=lambda lane: sum(len(row.token_ids) for row in lane.sequences)).step()


def speeds(samples: dict[str, list[Lane]]) -> Row:
    """Regular decoding's ms per token, the other arms' speeds over it, and the largest spread."""
    times = {name: [lane.metrics().ms_per_token or math.nan for lane in made] for name, made in samples.items()}
    base = median(times[REGULAR])
    return {
        "regular ms/token": base,
        **{name: base / median(mine) for name, mine in times.items() if name != REGULAR},
        "spread": max((max(mine) - min(mine)) / median(mine) for mine in times.values()),
    }


def _same(samples: dict[str, list[Lane]]) -> list[bool]:
    """Whether each row has one text in all arms and repeats."""
    texts = [[row.token_ids for row in lane.sequences] for made in samples.values() for lane in made]
    return [all(row == rows[0] for row in rows) for rows in zip(*texts, strict=True)]


def speed_claims(rows: list[Row], quick: bool) -> list[Row]:
    """The least speed of "auto" over regular, and over the best fixed length where that beats regular."""

    def best(row: Row) -> float:
        return max(float(row[name]) for name in FIXED)

    over: dict[str, tuple[list[Row], Callable[[Row], float]]] = {
        REGULAR: (rows, lambda row: float(row[AUTO])),
        "best fixed": ([row for row in rows if best(row) > 1], lambda row: row[AUTO] / best(row)),
    }
    claims = []
    for other, (some, ratio) in over.items():
        if some:
            worst = min(some, key=ratio)
            case = f"{worst['text']}, temperature {worst['temperature']:g}, {worst['threads']} threads"
            name = f"auto / {other}, least: {case}, batch {worst['batch']}"
            claims.append(at_least(name, ratio(worst), BAR, not quick))
    return claims
