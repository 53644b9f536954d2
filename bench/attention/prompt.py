"""`python -m bench prompt`: what it saves that rows share their prompt.

Contract: 8 rows with one prompt against 8 rows with a prompt each, by turns in one run, in one process. Decoding
counts lane time since the first tokens; a verification is the target's forward of 5 tokens a row; the time to the
first tokens ends when every row of a lane has one. Bytes are those of the caches' buffers, beside admission's
estimate.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from bass_core import METHODS, ModelPair, load_pair
from bass_core.decode.admission import cache_bytes, cache_padding
from bass_core.decode.request import Request, make_request
from bass_core.lanes.lane import Lane
from bass_core.model.forward import ForwardBatch
from bass_core.model.graphs import runner_for
from bass_core.model.prefill import PrefillSteps
from bass_core.model.runner import ModelRunner
from kernels.support import is_accelerator, runtime

from ..report.report import claim, finish, parser

ROWS, DRAFTED = 8, 4
SAME, OWN = "one prompt", "own prompts"
# The bars of the ratios, and of the tokens' cost.
REGULAR_BAR, VERIFY_BAR, FIRST_BAR, BYTES_BAR, ESTIMATE_BAR = 0.5, 0.65, 1.1, 1.2, 0.15

Row = dict[str, Any]


def main(argv: list[str]) -> None:
    """Measure, print, and write."""
    options = parser("prompt", __doc__ or "")
    options.add_argument("--pair", default="smollm2")
    options.add_argument("--device", default="auto")
    options.add_argument("--dtype", default="auto")
    options.add_argument("--length", type=int, default=4000, help="tokens of a prompt")
    options.add_argument("--max-new-tokens", type=int, default=64)
    options.add_argument("--repeats", type=int, default=9, help="of a verification")
    arguments = options.parse_args(argv)
    if arguments.quick:
        arguments.length, arguments.max_new_tokens, arguments.repeats = 300, 8, 2
    pair = load_pair(arguments.pair, device=arguments.device, dtype=arguments.dtype)
    generator = torch.Generator().manual_seed(arguments.seed)
    prompts = torch.randint(0, pair.vocab, (ROWS, arguments.length), generator=generator).tolist()
    kinds = {SAME: [prompts[0]] * ROWS, OWN: prompts}
    requests = {
        kind: make_request(
            pair, rows, max_new_tokens=arguments.max_new_tokens, draft_length=DRAFTED, eos_token_id=None
        )
        for kind, rows in kinds.items()
    }
    regular = _regular(pair, requests)
    verified = _verified(pair, requests, arguments.repeats)
    first = _first_tokens(pair, requests[SAME])
    held = _held(pair, requests[SAME])
    for made in (regular, verified):
        for row in made:
            row["of own"] = row["ms"] / next(one["ms"] for one in made if one["kind"] == OWN)
    claims = [
        _at_most("regular decoding, one prompt / own prompts", regular[0]["of own"], REGULAR_BAR),
        _at_most("verification of 8 x 5 tokens, one prompt / own prompts", verified[0]["of own"], VERIFY_BAR),
        *(_at_most(f"{row['what']}, 8 rows / 1 row", row["of one row"], FIRST_BAR) for row in first),
        _at_most("bytes held, 8 rows / 1 row", held[1]["of one row"], BYTES_BAR),
        *(_at_most(f"admission's estimate off, {row['kind']}", row["estimate off"], ESTIMATE_BAR) for row in held),
    ]
    finish("prompt", arguments, pair.device, [*regular, *verified, *first, *held], claims)


def _at_most(name: str, value: float, bar: float) -> dict[str, Any]:
    return claim(name, value, f"at most {bar}", value <= bar)


def _row(what: str, kind: str, ms: float | None = None, **rest: float) -> Row:
    empty = dict.fromkeys(("of own", "of one row", "MB", "estimate off"))
    return {"what": what, "kind": kind, "ms": ms, **empty, **rest}


def _regular(pair: ModelPair, requests: dict[str, Request]) -> list[Row]:
    """ms a token and row of regular decoding since the first tokens, step by step by turns."""
    lanes = {kind: Lane(pair, request, "regular") for kind, request in requests.items()}
    for lane in lanes.values():
        while not all(row.token_ids for row in lane.sequences):
            lane.step()
    while not all(lane.finished for lane in lanes.values()):
        for lane in lanes.values():
            if not lane.finished:
                lane.step()
    steps = {kind: lane.request.max_new_tokens - 1 for kind, lane in lanes.items()}
    return [_row("regular decoding, a step", kind, lane.decode_ms / steps[kind]) for kind, lane in lanes.items()]


def _runner(pair: ModelPair, request: Request) -> ModelRunner:
    """A runner of the target whose rows hold the request's prompts."""
    texts = request.texts(cache_padding(request, True))
    runner = runner_for(pair.target_step, len(request.prompts), texts, pair.vocab, request.backend)
    prefill = PrefillSteps(runner, request.prompts)
    with torch.inference_mode():
        while not prefill.done:
            prefill.step()
    return runner


def _verified(pair: ModelPair, requests: dict[str, Request], repeats: int) -> list[Row]:
    runners = {kind: _runner(pair, request) for kind, request in requests.items()}
    tokens = torch.ones(ROWS, 1 + DRAFTED, dtype=torch.long, device=pair.device)
    least = dict.fromkeys(runners, float("inf"))
    for _ in range(repeats + 1):
        for kind, runner in runners.items():
            start = time.perf_counter()
            runner.forward(ForwardBatch(tokens, runner.lengths))
            if is_accelerator(pair.device):
                runtime(pair.device).synchronize(pair.device)
            least[kind] = min(least[kind], 1000 * (time.perf_counter() - start))
    return [_row("verification of 8 x 5 tokens", kind, ms) for kind, ms in least.items()]


def _first_tokens(pair: ModelPair, request: Request) -> list[Row]:
    """ms until every row has its first token, by turns with one row, in every lane that runs in this process."""
    found = []
    for name, method in METHODS.items():
        if method.overlaps:
            continue
        times: dict[int, list[float]] = {1: [], ROWS: []}
        for _ in range(2):
            for rows, taken in times.items():
                asked = replace(
                    request, prompts=request.prompts[:rows], sequence_ids=list(range(rows)), max_new_tokens=1
                )
                lane = Lane(pair, asked, name)
                while not lane.finished:
                    lane.step()
                taken.append(lane.clock.ms)
        ms, alone = min(times[ROWS]), min(times[1])
        found.append(_row(f"first tokens, {name}", SAME, ms, **{"of one row": ms / alone}))
    return found


def _held(pair: ModelPair, request: Request) -> list[Row]:
    """Bytes of a lane's cache for one row and for all, and how far admission's estimate is off."""
    found: list[Row] = []
    for rows in (1, ROWS):
        asked = replace(request, prompts=request.prompts[:rows], sequence_ids=list(range(rows)))
        texts = asked.texts(cache_padding(asked, False))
        held = runner_for(pair.target_step, rows, texts, pair.vocab, asked.backend).cache.nbytes
        estimate = cache_bytes(pair.target_step, texts, asked.backend, rows)
        row = _row("cache", f"{rows} rows", MB=held / 1e6, **{"estimate off": abs(estimate / held - 1)})
        found.append(row | {"of one row": row["MB"] / (found or [row])[0]["MB"]})
    return found
