"""Captured steps against eager steps, and our texts against those of transformers' generate.

Contract: in float32 on a small model every text must be equal, token for token; in bfloat16 the share of equal
rows is reported but not checked. Also: how often a round waits for the device.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

from bass_core import ModelPair, generate
from bass_core.decoding.request import make_request
from bass_core.lanes.lane import Lane

from .. import shapes
from ..context import Context


def run(ctx: Context) -> None:
    """Float32, bfloat16, synchronisations."""
    for dtype in (torch.float32, torch.bfloat16):
        target = shapes.build(shapes.small_config(ctx.dry), ctx.device, dtype, ctx.seed, scale=6.0)
        pair = ModelPair(target, shapes.perturbed(target, 0.03, ctx.seed))
        texts(ctx, pair, str(dtype).removeprefix("torch."))
        if dtype == torch.float32 and not ctx.dry:
            synchronisations(ctx, pair)


def texts(ctx: Context, pair: ModelPair, dtype: str) -> None:
    """The shares of rows whose texts equal those of generate and those of eager steps."""
    rows = shapes.prompts(8, 5, 40, pair.vocab, ctx.seed)
    count = 6 if ctx.dry else 64
    arguments: dict[str, Any] = {"max_new_tokens": count, "eos_token_id": None, "draft_length": 4}
    if not ctx.dry:
        arguments["attention"] = "fused"
    theirs = [own_text(pair, row, count) for row in rows]
    for method in ("regular", "speculative", "bass"):
        captured = tokens(pair, rows, method, arguments)
        os.environ["BASS_GRAPHS"] = "0"
        try:
            eager = tokens(pair, rows, method, arguments)
        finally:
            del os.environ["BASS_GRAPHS"]
        case = f"{dtype} {method}"
        ctx.row(case, "rows equal to eager steps", share(captured, eager))
        ctx.row(case, "rows equal to generate", share(captured, theirs))
    acceptance = generate(pair, rows, **arguments).metrics.acceptance_rate
    ctx.row(f"{dtype} bass", "acceptance", acceptance)


def tokens(pair: ModelPair, rows: list[list[int]], method: str, arguments: dict[str, Any]) -> list[list[int]]:
    """The new tokens of each row."""
    return [sequence.token_ids for sequence in generate(pair, rows, method=method, **arguments).sequences]


def own_text(pair: ModelPair, row: list[int], count: int) -> list[int]:
    """transformers' greedy continuation of one prompt, without a batch."""
    ids = torch.tensor([row], device=pair.device)
    model: Any = pair.target
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, pad_token_id=0
    )
    return out[0, len(row) :].tolist()


def share(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """The share of rows that are equal."""
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


def synchronisations(ctx: Context, pair: ModelPair) -> None:
    """Synchronising calls per steady round, as torch reports them; it does not report the waits of `to_host`."""
    rows = shapes.prompts(8, 5, 40, pair.vocab, ctx.seed)
    for temperature in (0.0, 0.8):
        from bass_core import SamplingParams

        request = make_request(
            pair, rows, max_new_tokens=64, draft_length=4, eos_token_id=None, sampling=SamplingParams(temperature)
        )
        lane = Lane(pair, request, "bass")
        for _ in range(6):
            lane.step()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert lane._decoder is not None
                lane._decoder.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found = [str(one.message).splitlines()[0] for one in caught if "synchroniz" in str(one.message)]
        ctx.row(
            f"temperature {temperature}",
            "synchronising calls",
            len(found),
            "",
            "; ".join(sorted(set(found)))[:200],
        )
