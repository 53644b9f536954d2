"""`python -m bench default`: draft_length="auto" compared with regular decoding, fixed lengths and Algorithm 1.

For each kind of text, temperature, batch and number of threads, all arms answer the same prompts with the same
number of new tokens (no early end). Arms take turns step by step, and we report medians of the lanes' ms per
token. The costs of rounds are measured before a lane's clock starts, as in `race`. An arm's column is its speed-up
over regular decoding. Because all texts are equally long, that is the ratio of ms per token
(bass_core/lanes/pace.py). `spread` is the largest (highest - lowest) / median of all arms: smaller differences are
noise.

Prompts come from prompts.py, or with --questions from the first turns of a file in the format of Spec-Bench. Its
texts are chat and code (KINDS), or any category of the file.
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
# For each kind of text, the categories of the file's questions that belong to it. A kind that is not listed here
# is a category of the file itself.
KINDS = {"chat": ("writing", "roleplay", "reasoning", "stem", "humanities"), "code": ("coding",)}
# We claim that "auto" reaches this share of the speed of regular decoding, and of the best fixed length if that is
# faster than regular decoding.
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
        for text, temperature in ((text, each) for text in prompts for each in arguments.temperatures):
            for batch in arguments.batches:
                samples = _samples(pair, varied(prompts[text], batch), temperature, arguments)
                case = {"text": text, "temperature": temperature, "threads": threads, "batch": batch}
                results.append(case | speeds(samples))
                print(table(results[-1:]), flush=True)
                if not temperature:
                    same += _same(samples)
    claims = speed_claims(results, arguments.quick)
    if same:
        # Except in float32, rounding may decide a near tie differently.
        share, exact = sum(same) / len(same), pair.dtype == torch.float32
        claims.append(alike("rows alike at temperature 0", share, exact))
    finish("default", arguments, pair, results, claims)


def _prompts(arguments: Namespace, options: ArgumentParser) -> dict[str, list[str]]:
    """Return the prompts of each kind of text."""
    if arguments.questions is None:
        by_text = {text: BUILT_IN.get(text, []) for text in arguments.texts or BUILT_IN}
    else:
        entries = questions(arguments.questions)
        by_text = {
            text: [entry.turns[0] for entry in entries if entry.category in KINDS.get(text, (text,))]
            for text in arguments.texts or KINDS
        }
    unknown = [text for text, prompts in by_text.items() if not prompts]
    if unknown:
        options.error(f"there are no prompts for {', '.join(unknown)}: choose other --texts.")
    return by_text


def _samples(
    pair: ModelPair, prompts: list[str], temperature: float, arguments: Namespace
) -> dict[str, list[Lane]]:
    """Run `repeats` lanes of each arm, each repeat with a different seed, after a short unmeasured one."""
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
    """Always step the lane that has written least, so that slow moments of the machine affect all lanes alike."""
    while unfinished := [lane for lane in lanes if not lane.finished]:
        min(unfinished, key=lambda lane: sum(len(row.token_ids) for row in lane.sequences)).step()


def speeds(samples: dict[str, list[Lane]]) -> Row:
    """Return regular decoding's ms per token, the other arms' speed-ups over it, and the largest spread."""
    times = {name: [lane.metrics().ms_per_token or math.nan for lane in lanes] for name, lanes in samples.items()}
    base = median(times[REGULAR])
    return {
        "regular ms/token": base,
        **{name: base / median(mine) for name, mine in times.items() if name != REGULAR},
        "spread": max((max(mine) - min(mine)) / median(mine) for mine in times.values()),
    }


def _same(samples: dict[str, list[Lane]]) -> list[bool]:
    """Return for each row whether it has the same text in all arms and repeats."""
    texts = [[row.token_ids for row in lane.sequences] for lanes in samples.values() for lane in lanes]
    return [all(row == rows[0] for row in rows) for rows in zip(*texts, strict=True)]


def speed_claims(rows: list[Row], quick: bool) -> list[Row]:
    """Return claims on the lowest speed-up of "auto" over regular decoding and over the best fixed length.

    For the second claim, only cases in which the best fixed length is faster than regular decoding count.
    """

    def best(row: Row) -> float:
        return max(float(row[name]) for name in FIXED)

    over: dict[str, tuple[list[Row], Callable[[Row], float]]] = {
        REGULAR: (rows, lambda row: float(row[AUTO])),
        "best fixed": ([row for row in rows if best(row) > 1], lambda row: row[AUTO] / best(row)),
    }
    claims = []
    for other, (cases, ratio) in over.items():
        if cases:
            worst = min(cases, key=ratio)
            case = f"{worst['text']}, temperature {worst['temperature']:g}, {worst['threads']} threads"
            name = f"auto / {other}, least: {case}, batch {worst['batch']}"
            claims.append(at_least(name, ratio(worst), BAR, not quick))
    return claims
