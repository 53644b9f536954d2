"""`python -m bench structured`: what a grammar costs, and what its certain tokens bring.

A regular expression and schemas of three sizes, for batches of different prompts, with and without the grammar.
`certain` is the share of the tokens to which the grammar leaves no choice, and `masks` the milliseconds per round
in which masks are made and applied and texts are followed. With --check, 40 texts in batches of four must parse
and validate, and greedy BASS must write the texts of masked regular decoding. With --peer, llama.cpp answers the
same prompts greedily, without and with its own form of each grammar, from the pair's Q4_1 file. Its schemas allow
other white space than ours, so its texts differ.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from bass_core import ModelPair, SamplingParams, generate
from bass_core.decode import verifier
from bass_core.decode.measuring import with_costs
from bass_core.decode.request import make_request
from bass_core.lanes.lane import Lane
from bass_core.sample.grammar import Matcher

from ..peers import llama_cpp
from ..peers.arms import LLAMA_CPP
from ..peers.child import Child
from ..peers.command import PACKAGES, SPARE, gguf_of
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
# The grammars in the form that llama.cpp takes.
_NAME = "[A-Z] [a-z]{2,11}"
_GBNF = f'root ::= "20" [0-9]{{2}} "-" [01] [0-9] "-" [0-3] [0-9] ": " {_NAME} " " {_NAME}'
PEER_GRAMMARS = GRAMMARS | {"regex": {"grammar": _GBNF}}
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
    options.add_argument("--peer", action="store_true", help="measure llama.cpp's grammars too")
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
    if arguments.peer:
        for row in results:
            row |= _llama_cpp(pair, row["batch"], row["grammar"], arguments.repeats)
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


def _llama_cpp(pair: ModelPair, rows: int, name: str, repeats: int) -> Row:
    """Return llama.cpp's ms per token of the longest row, without and with a grammar, or {} if it can't run."""
    notes: list[str] = []
    model = gguf_of(pair, notes) if llama_cpp.installed() else None
    if model is None or pair.tokenizer is None:
        print(*(notes or [llama_cpp.INSTALL]))
        return {}
    prompts, found = [list(row) for row in make_request(pair, _prompts(rows)).prompts], {}
    size = max(map(len, prompts)) + TOKENS + SPARE
    for key, grammar in (("llama.cpp", None), ("llama.cpp with grammar", PEER_GRAMMARS[name])):
        how = str(model), "plain", rows, size, torch.get_num_threads(), grammar
        times: list[float] = []
        with Child(LLAMA_CPP, PACKAGES[LLAMA_CPP], llama_cpp.serve, *how) as child:
            child.complete(prompts, WARM_UP)
            for _ in range(repeats):
                start = time.perf_counter()
                child.complete(prompts, 1)
                read = time.perf_counter()
                texts = child.complete(prompts, TOKENS)
                end = time.perf_counter()
                longest = max(len(pair.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)
                # Both calls read the prompts and write one token.
                times.append(1000 * ((end - read) - (read - start)) / max(longest - 1, 1))
        found[key] = median(times)
    return found


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
