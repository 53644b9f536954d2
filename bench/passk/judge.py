"""Judges finished sequences: does the program pass, and what is its log-probability under the target?

Contract: `judge` fills `passed` and `logprob` of every finished sequence; equal texts of one problem are judged
once. Programs run only in bench/passk/sandbox.py, a few at a time, while no lane's clock runs.
"""

from __future__ import annotations

import copy
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import DynamicCache

from bass_core import ModelPair

from ..report.report import claim
from .problems import Problem, canonical, program, prompt, stub
from .sandbox import run
from .score import Record


def judge(pair: ModelPair, problems: list[Problem], records: list[Record]) -> None:
    """Fill in `passed` and `logprob`, in place."""
    for problem, record in zip(problems, records, strict=True):
        done = [one for lane in record["lanes"].values() for one in lane if one["ended_ms"] is not None]
        texts = {tuple(one["token_ids"]): program(problem, one["text"]) for one in done}
        passed = dict(zip(texts, passes(list(texts.values())), strict=True))
        likely = dict(zip(texts, mean_logprobs(pair, prompt(pair, problem), list(texts)), strict=True))
        for one in done:
            key = tuple(one["token_ids"])
            one["passed"], one["logprob"] = passed[key], likely[key]


def passes(programs: list[str]) -> list[bool]:
    """Whether each program runs to its end."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as workers:
        return [verdict.passed for verdict in workers.map(run, programs)]


def canonical_claims(problems: list[Problem]) -> list[dict[str, Any]]:
    """Claims: the sandbox passes every canonical solution, and no stub."""
    right = sum(passes([canonical(problem) for problem in problems]))
    wrong = sum(passes([stub(problem) for problem in problems]))
    return [
        claim("canonical solutions that pass", right, f"all {len(problems)}", right == len(problems)),
        claim("empty solutions that pass", wrong, "0", wrong == 0),
    ]


@torch.inference_mode()
def mean_logprobs(pair: ModelPair, text: str, completions: list[tuple[int, ...]]) -> list[float]:
    """Mean log-probability of each completion's tokens after the text, the last included, at temperature 1."""
    model, device = pair.target, pair.device
    *before, last = pair.tokenizer(text)["input_ids"]
    cache = DynamicCache(config=model.config)
    model(torch.tensor([before], device=device), past_key_values=cache, use_cache=True, logits_to_keep=1)
    means = []
    for tokens in completions:
        ids = torch.tensor([[last, *tokens[:-1]]], device=device)
        logits = model(ids, past_key_values=copy.deepcopy(cache), use_cache=True).logits[0].float()
        chosen = torch.tensor(tokens, device=device)[:, None]
        means.append(logits.log_softmax(-1).gather(1, chosen).mean().item())
    return means
