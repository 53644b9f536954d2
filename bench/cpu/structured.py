"""`python -m bench structured`: what a grammar costs, and what its certain tokens bring.

A regular expression and schemas of three sizes, for batches of different prompts, with and without the grammar.
`certain` is the share of the tokens to which the grammar leaves no choice, and `masks` the milliseconds per round
in which masks are made and applied and texts are followed. With --check, 40 texts in batches of four must parse
and validate, and greedy BASS must write the texts of masked regular decoding.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from bass_core import ModelPair, SamplingParams, generate
from bass_core.decode import verifier
from bass_core.decode.measuring import with_costs
from bass_core.decode.request import make_request
from bass_core.lanes.lane import Lane
from bass_core.sample.grammar import Matcher

from ..report.report import Row, at_least, at_most, claim, finish, load, median, parser, whole

_TEXT, _AGE = {"type": "string", "maxLength": 24}, {"type": "integer", "minimum": 0, "maximum": 120}
_PERSON = {"name": _TEXT, "age": _AGE, "city": _TEXT, "student": {"type": "boolean"}}
_ORDER = _PERSON | {
    "email": _TEXT,
    "items": {
        "type": "array",
        "items": {"enum": ["tea", "coffee", "bread", "milk"]},
        "minItems": 1,
        "maxItems": 3,
    },
    "payment_method": {"enum": ["card", "cash", "transfer"]},
    "delivery_before_noon": {"type": "boolean"},
}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


GRAMMARS: dict[str, dict[str, Any]] = {
    "regex": {"regex": r"20[0-9]{2}-[01][0-9]-[0-3][0-9]: [A-Z][a-z]{2,11} [A-Z][a-z]{2,11}"},
    "2 fields": {"json_schema": _object({"name": _TEXT, "age": _AGE})},
    "4 fields": {"json_schema": _object(_PERSON)},
    "8 fields": {"json_schema": _object(_ORDER)},
}
PEOPLE = ["a student", "a nurse", "a chess player", "a farmer", "a pilot", "a retired teacher", "a cook", "a poet"]
# New tokens per row, those of a first call that is not counted, and the number of checked texts.
TOKENS, WARM_UP, CHECKED = 96, 8, 40


def main(argv: list[str]) -> None:
    """Measure, print, and write."""
    options = parser("structured", __doc__ or "", "pair", "draft", "dtype")
    options.add_argument("--batch", type=whole(), nargs="+", default=[1, 4, 8])
    options.add_argument("--grammars", nargs="+", choices=list(GRAMMARS), default=list(GRAMMARS))
    options.add_argument("--repeats", type=whole(), default=2)
    options.add_argument("--check", action="store_true", help="check texts instead of measuring times")
    arguments = options.parse_args(argv)
    if arguments.quick:
        arguments.batch, arguments.grammars, arguments.repeats = [2], ["4 fields"], 1
    pair = load(arguments, device="cpu")
    if arguments.check:
        finish("structured", arguments, pair, *_checked(pair, 8 if arguments.quick else CHECKED))
        return
    results = [
        _measured(pair, rows, name, arguments.repeats) for name in arguments.grammars for rows in arguments.batch
    ]
    decided, pairs = not arguments.quick, [(row, f"{row['grammar']}, batch {row['batch']}") for row in results]
    claims = [at_most(f"masks, share of a round, {case}", row["share"], 0.05, decided) for row, case in pairs]
    claims += [at_least(f"BASS over regular, {case}", row["speed-up"], 1.0, decided) for row, case in pairs]
    finish("structured", arguments, pair, results, claims)


def _prompts(count: int) -> list[str]:
    people = [PEOPLE[i % len(PEOPLE)] + (f" of {20 + i} years" if i >= len(PEOPLE) else "") for i in range(count)]
    return [f"Describe {person} as JSON." for person in people]


def _measured(pair: ModelPair, rows: int, name: str, repeats: int) -> Row:
    arms = [(method, grammar) for grammar in ({}, GRAMMARS[name]) for method in ("regular", "bass")]
    runs: list[list[Row]] = [[] for _ in arms]
    for repeat in range(repeats + 1):
        for (method, grammar), arm in zip(arms, runs, strict=True):
            run = _run(pair, method, rows, grammar, TOKENS if repeat else WARM_UP)
            arm += [run] if repeat else []
    regular, bass, masked_regular, masked = (
        {key: median([run[key] for run in arm]) for key in arm[0]} for arm in runs
    )
    return {
        "grammar": name, "batch": rows, "regular": regular["ms"], "bass": bass["ms"],
        "masked regular": masked_regular["ms"], "masked bass": masked["ms"],
        "speed-up": masked_regular["ms"] / masked["ms"], "speed-up without": regular["ms"] / bass["ms"],
        "acceptance": masked["acceptance"], "acceptance without": bass["acceptance"],
        "certain": masked["certain"], "masks": masked["masks"], "share": masked["masks"] / masked["round"],
    }  # fmt: skip


def _run(pair: ModelPair, method: str, rows: int, grammar: dict[str, Any], tokens: int) -> Row:
    request = make_request(pair, _prompts(rows), max_new_tokens=tokens, **grammar)
    lane, spent = Lane(pair, with_costs(pair, request, rows if method == "bass" else 0), method), [0.0]
    with _timed(spent):
        while not lane.finished:
            lane.step()
    metrics, certain = lane.metrics(), 0
    for row, follower in zip(lane.sequences, request.sequences(), strict=True):
        for token in row.token_ids if follower.grammar is not None else ():
            certain += bool(follower.grammar.forced())
            if token not in follower.eos:
                follower.grammar.write(token)
    return {
        "ms": metrics.ms_per_token or 0.0, "acceptance": metrics.acceptance_rate or 0.0,
        "certain": certain / metrics.new_tokens, "masks": spent[0] / metrics.rounds,
        "round": lane.decode_ms / metrics.rounds,
    }  # fmt: skip


@contextmanager
def _timed(spent: list[float]) -> Iterator[None]:
    """Add the milliseconds of all work for grammars to spent[0] inside this block."""

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                spent[0] += 1000 * (time.perf_counter() - start)

        return run

    with ExitStack() as stack:
        for owner, name in ((verifier, "forbid"), (Matcher, "write"), (Matcher, "forced"), (Matcher, "fitting")):
            stack.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name))))
        yield


def _checked(pair: ModelPair, count: int) -> tuple[list[Row], list[Row]]:
    from jsonschema import validate  # only the benches require it

    results, equal = [], True
    names = [name for name in GRAMMARS if name != "regex"]
    for temperature in (0.0, 0.7):
        ended = fitting = 0
        for start in range(0, count, 4):
            name = names[start // 4 % len(names)]
            arguments: dict[str, Any] = GRAMMARS[name] | {
                "max_new_tokens": TOKENS, "sampling": SamplingParams(temperature), "seed": start,
            }  # fmt: skip
            prompts = _prompts(count)[start : start + 4]
            texts = generate(pair, prompts, **arguments).sequences
            for text in texts:
                if text.finish_reason != "length":
                    ended += 1
                    validate(json.loads(text.text or ""), arguments["json_schema"])
                    fitting += 1
            if not temperature:
                regular = generate(pair, prompts, method="regular", **arguments).sequences
                equal &= [text.token_ids for text in texts] == [text.token_ids for text in regular]
        results.append({"temperature": temperature, "texts": count, "ended": ended, "fit": fitting})
    claims = [
        claim(f"texts that ended and fit, temperature {row['temperature']}", row["fit"], f"= {row['ended']}",
              row["fit"] == row["ended"]) for row in results
    ]  # fmt: skip
    return results, [*claims, claim("greedy texts equal masked regular decoding", float(equal), "= 1", equal)]
