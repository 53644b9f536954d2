"""Many short AMUSD requests with delays on either side, early stops, and draft processes killed or paused.

Contract: `short_runs` compares every text with regular decoding's (a stopped one with its beginning) and counts
the outcomes; a deadlock would make it hang. `leftovers` counts what a run could leave behind: processes, file
descriptors, named shared memory.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bass_core import ModelPair, SamplingParams, generate
from bass_core.amusd import decoder as amusd
from bass_core.amusd.host import close, prepare
from bass_core.decoding.request import make_request
from bass_core.lanes.lane import Lane

from ..report.report import claim, finish

WAYS: list[dict[str, Any]] = [
    {},
    {"sampling": SamplingParams(0.8), "verification": "coupled"},
    {"sampling": SamplingParams(0.8)},
]


def leftovers() -> tuple[int, int, int]:
    """The numbers of child processes, of open descriptors, and of names in /dev/shm."""
    own = psutil.Process()
    shared = Path("/dev/shm")
    return len(own.children(recursive=True)), own.num_fds(), len(list(shared.iterdir())) if shared.exists() else 0


def short_runs(
    pair: ModelPair, rows: list[list[int]], *, runs: int, kills: int, hangs: int, seed: int
) -> dict[str, float]:
    """`runs` requests of 1 to len(rows) rows and 1 to 40 tokens.

    The draft process is killed in `kills` of them and paused in `hangs`; a third of the others is stopped early.
    Text sampled under Chen's rule can't be compared: it differs from regular decoding's.
    """
    chance = random.Random(seed)
    lost = chance.sample(range(runs), kills + hangs)
    texts = [
        [s.token_ids for s in generate(pair, rows, method="regular", max_new_tokens=40, **way).sequences]
        for way in WAYS
    ]
    seen: dict[str, float] = dict.fromkeys(
        ("runs", "wrong", "stopped", "lost", "drafted", "thrown_away", "rolled_back", "slowest_notice_s"), 0
    )
    delays = amusd.DELAYS
    try:
        for number in range(runs):
            amusd.DELAYS = (chance.choice((0, 0.002, 0.006)), chance.choice((0, 0.002, 0.006)))
            fault = None if number not in lost else ("kill" if lost.index(number) < kills else "hang")
            way = chance.randrange(len(WAYS))
            _one(pair, rows, texts[way], WAYS[way], fault, chance, seen)
    finally:
        amusd.DELAYS = delays
    return seen


def _one(
    pair: ModelPair,
    rows: list[list[int]],
    texts: list[list[int]],
    way: dict[str, Any],
    fault: str | None,
    chance: random.Random,
    seen: dict[str, float],
) -> None:
    batch, tokens = chance.randint(1, len(rows)), 40 if fault else chance.randint(1, 40)
    lead = chance.choice((1, 3, "bass"))
    request = make_request(pair, rows[:batch], max_new_tokens=tokens, draft_length=lead, eos_token_id=None, **way)
    lane = Lane(pair, request, "amusd")
    stop = chance.randint(1, 12) if not fault and chance.random() < 1 / 3 else None
    at, done, since = chance.randint(0, 5), 0, 0.0
    while not lane.finished:
        if fault and done == at:
            _lose(lane, fault)
            since = time.perf_counter()
        if done == stop:
            lane.end("stopped")
            seen["stopped"] += 1
            break
        if chance.random() < 0.1:
            lane.pause()
        lane.step()
        done += 1
        if fault and getattr(lane.timeline, "note", None) and since:
            seen["slowest_notice_s"] = max(seen["slowest_notice_s"], time.perf_counter() - since)
            since = 0.0
    line: Any = lane.timeline
    assert line is not None
    seen["runs"] += 1
    seen["lost"] += line.note is not None
    seen["drafted"] += line.made
    seen["thrown_away"] += line.thrown_away
    seen["rolled_back"] += line.rolled_back
    free = "sampling" in way and "verification" not in way
    for sequence, text in zip(lane.sequences, texts, strict=False):
        right = len(sequence.token_ids) if stop is not None else tokens
        seen["wrong"] += len(sequence.token_ids) != right or (not free and sequence.token_ids != text[:right])


def _lose(lane: Lane, fault: str) -> None:
    decoder = lane._decoder
    assert isinstance(decoder, amusd.AmusdDecoder)
    process = decoder.client.process
    assert process is not None
    os.kill(process, 9 if fault == "kill" else 19)


def stress(arguments: argparse.Namespace) -> None:
    """The thousand short runs (`--quick`: forty), with their own document."""
    torch.set_num_threads(1)
    pair, rows = _tiny_pair(arguments.seed)
    prepare(pair)
    close(pair)
    before = leftovers()
    runs, kills, hangs = (40, 1, 1) if arguments.quick else (1000, 20, 5)
    seen = short_runs(pair, rows, runs=runs, kills=kills, hangs=hangs, seed=arguments.seed)
    close(pair)
    after, notice = leftovers(), seen["slowest_notice_s"]
    claims = [
        claim("runs", seen["runs"], str(runs), seen["runs"] == runs),
        claim("wrong texts", seen["wrong"], "0", seen["wrong"] == 0),
        claim("drafts lost", seen["lost"], f"the {kills + hangs} that were taken", seen["lost"] == kills + hangs),
        claim("slowest notice of a lost draft, s", notice, "at most 1", None if arguments.quick else notice <= 1),
        claim("left behind", sum(abs(a - b) for a, b in zip(after, before, strict=True)), "0", after == before),
    ]
    finish("amusd", arguments, torch.device("cpu"), [seen], claims)


def _tiny_pair(seed: int) -> tuple[ModelPair, list[list[int]]]:
    """A target with a draft that agrees with it in part, and three prompts."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    target = LlamaForCausalLM(config).eval().requires_grad_(False)
    draft = LlamaForCausalLM(config).eval().requires_grad_(False)
    for ours, theirs in zip(draft.parameters(), target.parameters(), strict=True):
        if theirs.dim() > 1:
            theirs.mul_(12)
            ours.copy_(theirs + torch.randn_like(theirs) * theirs.std() * 0.025)
    rows = [torch.randint(1, 96, (length,)).tolist() for length in (5, 11, 20)]
    return ModelPair(target, draft), rows
