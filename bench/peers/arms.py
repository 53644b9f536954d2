"""The arms: who decodes, how, with which weights, and a call that does it.

Contract: every call answers the same token ids greedily with the number of new tokens it is given. Ours go on
behind an end token; transformers and llama.cpp never choose one. transformers runs the model in its own dtype
with its default attention, `sdpa`. A draft head can't assist it: `assistant_model` must be a causal language
model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bass_core import ModelPair, generate

from .llama_cpp import LlamaCpp

OURS, TRANSFORMERS, LLAMA_CPP = "ours", "transformers", "llama.cpp"
BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "int4": 4, "Q4_1": 4}
# prompt_lookup_num_tokens: most tokens that prompt lookup copies at a time; the value of transformers' example.
LOOKUP = 10

Rows = list[list[int]]


@dataclass(frozen=True, eq=False)
class Arm:
    """`run(tokens)` returns the new token ids of each row; llama.cpp's returns none."""

    who: str
    method: str
    batch: int
    weights: str
    run: Callable[[int], Rows | None]

    @property
    def key(self) -> tuple[str, str, int, str]:
        """What tells it from the other arms of a run."""
        return self.who, self.method, self.batch, self.weights


def ours(pair: ModelPair, weights: str, rows: Rows, draft_length: Any) -> Iterator[Arm]:
    """Regular and BASS at every batch, single-sequence speculation at batch 1."""
    options: dict[str, Any] = {"eos_token_id": None, "draft_length": draft_length}

    def run(tokens: int, method: str) -> Rows:
        out = generate(pair, rows, method=method, max_new_tokens=tokens, **options)
        return [one.token_ids for one in out.sequences]

    for method in ("regular", "speculative", "bass") if len(rows) == 1 else ("regular", "bass"):
        yield Arm(OURS, method, len(rows), weights, partial(run, method=method))


def transformers(pair: ModelPair, weights: str, rows: Rows) -> Iterator[Arm]:
    """`generate` on the padded batch, and at batch 1 with prompt lookup."""
    run = partial(_generate, pair.target, rows)
    yield Arm(TRANSFORMERS, "generate", len(rows), weights, run)
    if len(rows) == 1:
        yield Arm(TRANSFORMERS, "prompt lookup", 1, weights, partial(run, prompt_lookup_num_tokens=LOOKUP))


def llama_cpp(peer: LlamaCpp, rows: Rows) -> Arm:
    """llama.cpp, in its way of speculation."""

    def run(tokens: int) -> None:
        peer.complete(rows, tokens)

    return Arm(LLAMA_CPP, peer.way, len(rows), "Q4_1", run)


def _generate(model: Any, rows: Rows, tokens: int, **assistance: Any) -> Rows:
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        written = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens,
            pad_token_id=0, **assistance,
        )  # fmt: skip
    finally:
        model.set_attn_implementation(before)
    new: Rows = written[:, longest:].tolist()
    return new
