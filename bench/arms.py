"""Decoders as arms of a bench: `ours`, timed on their lanes' clocks, and transformers' `generate` as `theirs`.

Every arm answers the same prompts with the same number of new tokens, without an early end, and greedily by
default. `ms_per_token` excludes the prefill and its token: for our decoders it is the lane's figure, and for
transformers we take the time from the end of the prefill. Assisted generation has no `ms_per_token`, because it
writes several tokens at a time; `wall_ms`, the time of the whole call, exists for every arm.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from bass_core import ModelPair
from bass_core.decode.measuring import with_costs
from bass_core.decode.request import make_request
from bass_core.decode.transformers_generate.call import PAD, call_generate
from bass_core.lanes.lane import Lane
from bass_core.lanes.metrics import Metrics

# The value of prompt_lookup_num_tokens, the maximum number of tokens that prompt lookup copies at a time, as in
# transformers' example.
LOOKUP = 10


@dataclass(frozen=True)
class Sample:
    """The result of one call.

    Attributes:
        tokens: the new token ids of each row.
        wall_ms: the time of the whole call.
        metrics: the lane's metrics.
        flops: FLOPs of the rounds, or None if unknown.
        bytes_read: bytes that the rounds read, or None if unknown.
        decode_ms: the time of the rounds, without the prefill.
    """

    tokens: list[list[int]]
    wall_ms: float
    metrics: Metrics
    flops: float | None = None
    bytes_read: float | None = None
    decode_ms: float = 0.0


def ours(
    pair: ModelPair, method: str, prompts: list[Any], tokens: int, draft_length: Any = "bass", **others: Any
) -> Sample:
    """Run one of our decoders.

    Args:
        method: the lane's method, for example "bass".
        tokens: new tokens per row.
        draft_length: by default Algorithm 1.
        **others: further arguments of `make_request`.
    """
    start = time.perf_counter()
    request = make_request(
        pair, prompts, max_new_tokens=tokens, eos_token_id=None, draft_length=draft_length, **others
    )
    lane = Lane(pair, with_costs(pair, request, len(prompts)), method)
    while not lane.finished:
        lane.step()
    wall = 1000 * (time.perf_counter() - start)
    texts = [list(row.token_ids) for row in lane.sequences]
    return Sample(texts, wall, lane.metrics(), lane.work.flops, lane.work.bytes_read, lane.decode_ms)


def written_by(model: Any, rows: list[list[int]], tokens: int, attention: str, **options: Any) -> list[list[int]]:
    """Return the new token ids that transformers' `generate` writes greedily, without an early end.

    Args:
        model: a transformers model.
        tokens: new tokens per row.
        attention: the attention implementation, for example "eager" or "sdpa".
        **options: further arguments of `generate`.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation(attention)
    try:
        written = call_generate(
            model, rows, do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=PAD, **options
        )
    finally:
        model.set_attn_implementation(before)
    new: list[list[int]] = written[:, max(map(len, rows)) :].tolist()
    return new


class _Clock:
    """A logits processor that changes nothing and records the time of each call."""

    def __init__(self) -> None:
        self.times_ms: list[float] = []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times_ms.append(1000 * time.perf_counter())
        return scores


def theirs(pair: ModelPair, prompts: list[Any], tokens: int, **assistance: Any) -> Sample:
    """Run transformers' `generate` on the same model, in its own dtype and with eager attention.

    Args:
        prompts: texts or token ids.
        tokens: new tokens per row.
        **assistance: assistant_model or prompt_lookup_num_tokens for assisted generation, with one prompt only.
    """
    rows, clock = make_request(pair, prompts).prompts, _Clock()
    start = time.perf_counter()
    texts = written_by(pair.target, rows, tokens, "eager", logits_processor=[clock], **assistance)
    end = time.perf_counter()
    if assistance:
        return Sample(texts, 1000 * (end - start), Metrics(new_tokens=tokens * len(rows)))
    # The first call marks the end of the prefill, which yields the first token.
    decode_ms = 1000 * end - clock.times_ms[0]
    latency = decode_ms / (tokens - 1)
    spread = Metrics(
        ms_per_token=latency, ptl_first_ms=latency, ptl_last_ms=latency, ptl_all_ms=latency,
        throughput_tps=len(rows) * tokens / (end - start), new_tokens=len(rows) * tokens, rounds=tokens - 1,
    )  # fmt: skip
    return Sample(texts, 1000 * (end - start), spread)
