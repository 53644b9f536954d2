"""`python -m bench overhead`: the engine's time in a BASS round, beyond its model forwards.

Models of 2 layers and hidden size 64, batch 8, draft length 4, one CPU thread. We compare a whole BASS round with
its forwards (one draft forward per draft token, one verification). In the same run, after each round, we time the
forwards separately with the same shapes and lengths. Figures are medians.

Then, on two threads, we time the verification of 4 and of 8 rows with three drafts over 49,152 tokens: greedy, at
temperature 0.7, and with top-p 0.95, in turns. Figures are the lowest of the repeats, because other programs can
only add time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bass_core import ModelPair, SamplingParams
from bass_core.decode.request import make_request
from bass_core.lanes.lane import Lane
from bass_core.model.forward import ForwardBatch
from bass_core.sample.distribution import probabilities
from bass_core.sample.draw import draw
from bass_core.sample.noise import NoiseKeys, Role
from bass_core.verify.rejection import verify

from ..report.report import CPU, Row, at_most, claim, finish, median, parser

BATCH, LENGTH = 8, 4
VOCAB, DRAFTS = 49_152, 3


def main(argv: list[str]) -> None:
    """Measure, print, and write."""
    arguments = parser("overhead", __doc__ or "").parse_args(argv)
    torch.set_num_threads(1)
    rounds = 20 if arguments.quick else 300
    whole, bare, accepted = _measure(arguments.seed, rounds)
    ms, ratio = median(whole), median(whole) / median(bare)
    row: Row = {"round ms": ms, "its forwards ms": median(bare), "ratio": ratio, "acceptance": accepted}
    claims = [
        at_most("round / its forwards", ratio, 1.5, not arguments.quick),
        at_most("round, ms", ms, 5, not arguments.quick),
        # If the draft were always right or always wrong, rows would never diverge and the round would be cheaper.
        claim("acceptance", accepted, "0.2 to 0.8", 0.2 <= accepted <= 0.8),
    ]
    sampled = _verifications(arguments.seed, rounds)
    for rows, most in ((4, 1.5), (8, 2.5)):
        value = sampled[rows, "top-p"]
        claims.append(at_most(f"verification of {rows} rows with top-p, ms", value, most, not arguments.quick))
    table: list[Row] = [{"rows": rows, "sampling": how, "ms": ms} for (rows, how), ms in sampled.items()]
    finish("overhead", arguments, CPU, [row, *table], claims)


def _measure(seed: int, rounds: int) -> tuple[list[float], list[float], float]:
    pair = _pair(seed)
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(1, 1000, (length,), generator=generator).tolist() for length in range(16, 16 + BATCH)]
    whole: list[float] = []
    bare: list[float] = []
    accepted = drafted = 0
    while len(whole) < rounds:
        request = make_request(pair, prompts, max_new_tokens=400, draft_length=LENGTH, eos_token_id=None)
        lane = Lane(pair, request, "bass")
        caches = [pair.target_step.new_cache(BATCH, 1024), pair.target_step.new_cache(BATCH, 1024)]
        while not lane.finished and len(whole) < rounds:
            lengths = [len(sequence.tokens) - 1 for sequence in lane.sequences]
            start = time.perf_counter()
            round_ = lane.step()
            ended = time.perf_counter()
            if round_.kind != "verify" or len(round_.rows) < BATCH:
                continue
            whole.append(1000 * (ended - start))
            bare.append(_forwards(pair, caches, lengths, request.backend))
            accepted += sum(row.accepted for row in round_.rows)
            drafted += sum(len(row.drafted) for row in round_.rows)
    return whole, bare, accepted / drafted


def _verifications(seed: int, repeats: int) -> dict[tuple[int, str], float]:
    """Return the lowest milliseconds of a round's verification, by rows and kind of sampling."""
    torch.set_num_threads(2)
    torch.manual_seed(seed)
    params_by = {
        "greedy": SamplingParams(),
        "plain": SamplingParams(0.7),
        "top-p": SamplingParams(0.7, top_p=0.95),
    }
    calls: dict[tuple[int, str], Callable[[], object]] = {}
    for rows in (4, 8):
        # A few likely tokens above many unlikely ones, like a language model's logits.
        logits = torch.randn(rows, DRAFTS + 1, VOCAB) * 2.2
        logits[..., torch.randint(0, VOCAB, (40,))] += 4 + 4 * torch.randn(40).abs()
        keys = NoiseKeys(seed, torch.arange(rows), torch.arange(rows) + 9)
        near, counts = logits[:, :DRAFTS] + 0.3 * torch.randn(rows, DRAFTS, VOCAB), torch.full((rows,), DRAFTS)
        for name, params in params_by.items():
            q = None if params.greedy else probabilities(near, params)
            drafts = near.argmax(-1)
            if q is not None:
                drafts = draw(q, seed, *keys.at(DRAFTS), keys.stream(Role.DRAFT)[:, None])
            calls[rows, name] = partial(verify, logits, drafts, q, counts, keys, params)
    lowest = {call: math.inf for call in calls}
    for _ in range(repeats):
        for which, call in calls.items():
            start = time.perf_counter()
            call()
            lowest[which] = min(lowest[which], 1000 * (time.perf_counter() - start))
    return lowest


def _forwards(pair: ModelPair, caches: list[Any], lengths: list[int], backend: str) -> float:
    """Return the milliseconds that the forwards of one round take by themselves."""
    assert pair.draft_step is not None
    draft_ids = torch.ones(BATCH, 1, dtype=torch.long)
    target_ids = torch.ones(BATCH, LENGTH + 1, dtype=torch.long)
    start = time.perf_counter()
    for step in range(LENGTH):
        pair.draft_step.forward(ForwardBatch(draft_ids, [length + step for length in lengths]), caches[0], backend)
    pair.target_step.forward(ForwardBatch(target_ids, lengths), caches[1], backend)
    return 1000 * (time.perf_counter() - start)


def _pair(seed: int) -> ModelPair:
    """Build a target and a draft that agrees with it only partly, so that rows diverge."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024,
    )  # fmt: skip
    target = LlamaForCausalLM(config).eval().requires_grad_(False)
    draft = LlamaForCausalLM(config).eval().requires_grad_(False)
    for ours, theirs in zip(draft.parameters(), target.parameters(), strict=True):
        if theirs.dim() > 1:
            theirs.mul_(8)
            ours.copy_(theirs + torch.randn_like(theirs) * theirs.std() * 0.03)
    return ModelPair(target, draft)
