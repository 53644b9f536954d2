"""`python -m bench latency`: our three decoders beside transformers' `generate`, wall time of whole calls.

Contract: the same prompts and the same number of new tokens for every arm (no early end), greedy, arms
interleaved, medians. generate runs the model in its own dtype with eager attention and torch's default threads,
which is what people use today.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bass_core import DEFAULT_LANES, ModelPair, generate, load_pair
from bass_core.decode.request import make_request

from ..prompts import REPEAT, mixed
from ..report.report import claim, finish, interleaved, median, parser


def main(argv: list[str]) -> None:
    """Measure, print, and write."""
    options = parser("latency", __doc__ or "")
    options.add_argument("--pair", default="smollm2")
    options.add_argument("--device", default="auto")
    options.add_argument("--dtype", default="auto")
    options.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    options.add_argument("--max-new-tokens", type=int, default=96)
    options.add_argument("--repeats", type=int, default=3)
    arguments = options.parse_args(argv)
    if arguments.quick:
        arguments.max_new_tokens, arguments.repeats = min(arguments.max_new_tokens, 8), 1
    pair = load_pair(arguments.pair, device=arguments.device, dtype=arguments.dtype)
    tokens = arguments.max_new_tokens
    results: list[dict[str, Any]] = []
    claims: list[dict[str, Any]] = []
    for batch in arguments.batch:
        times = interleaved(_arms(pair, mixed(batch), tokens), arguments.repeats)
        results += _rows(f"batch {batch}", times, tokens)
        ratio = median(times["regular"]) / median(times["generate"])
        holds = None if arguments.quick else ratio <= 0.5
        claims.append(claim(f"regular / generate, batch {batch}", ratio, "at most 0.5", holds))
    arms = _arms(pair, [REPEAT], tokens)
    times = interleaved({name: arms[name] for name in ("regular", "speculative")}, arguments.repeats)
    results += _rows("repeat a text", times, tokens)
    speedup = median(times["regular"]) / median(times["speculative"])
    holds = None if arguments.quick else speedup >= 1.5
    claims.append(claim("speculative speed-up, repeat a text", speedup, "at least 1.5", holds))
    claims.append(_same_text(pair, tokens))
    weights = Path(str(pair.target.name_or_path)) / "model.safetensors"
    finish("latency", arguments, pair.device, results, claims, weights)


def _arms(pair: ModelPair, prompts: list[str], tokens: int) -> dict[str, Callable[[], Any]]:
    def ours(method: str) -> Callable[[], Any]:
        # Algorithm 1: the cost-aware policy's measured costs would differ from run to run.
        same: dict[str, Any] = {"max_new_tokens": tokens, "eos_token_id": None, "draft_length": "bass"}
        return lambda: generate(pair, prompts, method=method, **same)

    arms: dict[str, Callable[[], Any]] = {method: ours(method) for method in DEFAULT_LANES}
    arms["generate"] = _transformers(pair, prompts, tokens)
    return arms


def _transformers(pair: ModelPair, prompts: list[str], tokens: int) -> Callable[[], Any]:
    rows = make_request(pair, prompts).prompts
    longest = max(len(row) for row in rows)
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=pair.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=pair.device)
    model: Any = pair.target
    model.set_attn_implementation("eager")

    def run() -> Any:
        return model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            pad_token_id=0,
        )

    return run


def _rows(case: str, times: dict[str, list[float]], tokens: int) -> list[dict[str, Any]]:
    base = median(times["regular"])
    return [
        {
            "case": case,
            "arm": name,
            "ms/token": median(values) / tokens,
            "lowest": min(values) / tokens,
            "highest": max(values) / tokens,
            "vs regular": base / median(values),
        }
        for name, values in times.items()
    ]


def _same_text(pair: ModelPair, tokens: int) -> dict[str, Any]:
    """A claim by count: all methods write the same rows (in low precision near-ties may differ)."""
    prompts = mixed(2)
    asked: dict[str, Any] = {"max_new_tokens": min(tokens, 16), "draft_length": "bass"}
    texts = [[s.token_ids for s in generate(pair, prompts, method=m, **asked).sequences] for m in DEFAULT_LANES]
    same = sum(rows == texts[0] for rows in texts) / len(texts)
    return claim("methods that write regular's text", same, "1.0", same == 1.0)
