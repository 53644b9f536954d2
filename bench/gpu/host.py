"""`python -m bench host`: the time that Python takes in a round on a GPU, measured without one.

A tiny pair runs on the CPU as on a GPU: every round is "captured", and a replay only writes outcomes of a round
whose drafts are accepted with probability ACCEPTED. So what is left is the host's work, without CUDA's calls:
launches, copies and the wait, which a GPU adds. A figure is the lowest of --rounds times of the thread. "us" and
"us per row" are the line through the times of all batches.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from bass_core import ModelPair, SamplingParams
from bass_core.decode.request import make_request
from bass_core.lanes.lane import Lane
from bass_core.machine.capture import Pool
from bass_core.model import graphs
from bass_core.model.draft_head import DraftHead, HeadConfig
from bass_core.model.static_step import Judged, RoundInputs
from bass_core.predict.hardware import HARDWARE
from bass_core.predict.roofline import Roofline
from bass_core.predict.shapes import shape
from bass_core.sample.noise import NoiseKeys
from bass_core.verify.judge import Judge

from ..report.report import Row, at_most, finish, parser, whole

ACCEPTED, VOCAB, PROMPT, TOKENS = 0.6, 96, 20, 400
# Arms: the method, its options, and the bars for "us" and "us per row".
ARMS: dict[str, tuple[str, dict[str, Any], tuple[float, float] | None]] = {
    "regular": ("regular", {}, (120.0, 5.0)),
    "regular, sampled": ("regular", {"sampling": SamplingParams(0.7)}, None),
    "BASS, 3 drafts": ("bass", {"draft_length": 3}, (250.0, 10.0)),
    "BASS, 3 drafts, sampled": ("bass", {"draft_length": 3, "sampling": SamplingParams(0.7)}, None),
    "BASS, Algorithm 1": ("bass", {"draft_length": "bass"}, None),
    "BASS, auto": ("bass", {"draft_length": "auto"}, None),
}
RUN = Judge.run
# Rounds before the first one that is measured.
FIRST = 6


class Replays:
    """Stands in for CUDA graphs; `seconds` is the time that they take, which is none of the host's."""

    def __init__(self, seed: int) -> None:
        self.dice, self.seconds = random.Random(seed), 0.0
        self._counts = torch.zeros(0)

    def judge(self, judge: Judge, logits: Tensor, fed: Tensor, inputs: RoundInputs, *others: Any) -> Judged:
        """Judge as `Judge.run` does, and note where a round has its numbers of drafts."""
        self._counts = inputs.counts
        return RUN(judge, logits, fed, inputs, *others)

    def capture(self, forward: Callable[[], Any], pool: Pool) -> tuple[Any, Callable[[], None]]:
        """Run a function once; its replay writes outcomes if it judges, and else does nothing."""
        with torch.inference_mode():
            output = forward()
        judged = output[1] if isinstance(output, tuple) and isinstance(output[1], Judged) else None
        if judged is None:
            return output, lambda: None
        counts, outcomes = self._counts, [self._outcomes(judged.packed) for _ in range(16)]

        def replay() -> None:
            began = time.thread_time()
            judged.packed.copy_(self.dice.choice(outcomes))
            judged.packed[:, 0].clamp_(max=counts)
            self.seconds += time.thread_time() - began

        return output, replay

    def _outcomes(self, packed: Tensor) -> Tensor:
        """Return packed outcomes of a round (Outcome.packed), with the numbers u and chances of the capture."""
        width, lines = (packed.shape[1] - 4) // 5, []
        u, _, chances = (packed[0, 4 + i * width : 4 + (i + 1) * width].tolist() for i in (2, 3, 4))
        for _ in range(len(packed)):
            accepted = next((i for i in range(width) if self.dice.random() >= ACCEPTED), width)
            p = [float(i < accepted) for i in range(width)]
            drafts = [float(self.dice.randrange(2, VOCAB)) for _ in range(width)]
            own = [accepted, self.dice.randrange(2, VOCAB), 0.5, width]
            lines.append([*own, *p, *[1.0] * width, *u, *drafts, *chances])
        return torch.tensor(lines, dtype=torch.float32)


def main(argv: list[str]) -> None:
    """Measure, print, and write."""
    options = parser("host", __doc__ or "")
    options.add_argument("--batch", type=whole(), nargs="+", default=[1, 8, 32])
    options.add_argument("--rounds", type=whole(1, 60), default=24, help="measured rounds of each arm and batch")
    arguments = options.parse_args(argv)
    if arguments.quick:
        arguments.batch, arguments.rounds = [1, 2], 4
    torch.manual_seed(arguments.seed)
    results: list[Row] = []
    with replayed(arguments.seed) as replays:
        pair = _pair()
        for name, (method, more, _) in ARMS.items():
            us = [_host_us(pair, replays, method, more, rows, arguments.rounds) for rows in arguments.batch]
            per_row, base = np.polyfit(arguments.batch, us, 1) if len(us) > 1 else (0.0, us[0])
            measured = {f"batch {rows}": round(at, 1) for rows, at in zip(arguments.batch, us, strict=True)}
            results.append({"arm": name} | measured | {"us": float(base), "us per row": float(per_row)})
    claims = [
        at_most(f"{row['arm']}, {unit}", row[unit], bar, not arguments.quick)
        for row, (_, _, bars) in zip(results, ARMS.values(), strict=True)
        for unit, bar in zip(("us", "us per row"), bars or (), strict=False)
    ]
    finish("host", arguments, pair, results, claims)


@contextmanager
def replayed(seed: int) -> Iterator[Replays]:
    """Let the CPU's runners capture, with replays that compute nothing."""
    replays = Replays(seed)
    # The CPU's noise takes no tensor as a seed.
    keys = property(lambda inputs: NoiseKeys(int(inputs.seeds[0]), inputs.ids, inputs.positions))
    with (
        mock.patch.object(RoundInputs, "keys", keys),
        mock.patch.object(Judge, "run", lambda judge, *inputs: replays.judge(judge, *inputs)),
        mock.patch.object(graphs, "enabled", lambda device: True),
        mock.patch.object(graphs, "capture", replays.capture),
    ):
        yield replays


def _pair() -> ModelPair:
    """Return a tiny target and its head, with random weights."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=1024,
    )  # fmt: skip
    target: Any = LlamaForCausalLM(config).eval().requires_grad_(False)
    head = DraftHead(target, HeadConfig(1, config.hidden_size), torch.arange(VOCAB))
    return ModelPair(target, head.eval().requires_grad_(False), name="tiny, random weights")


def _host_us(
    pair: ModelPair, replays: Replays, method: str, more: dict[str, Any], rows: int, rounds: int
) -> float:
    """Return the microseconds of Python in the fastest of `rounds` rounds, in which all rows are written."""
    request = make_request(
        pair, [[5 + row] * PROMPT for row in range(rows)], max_new_tokens=TOKENS, eos_token_id=None,
        drafter="model", attention="sdpa", **more,
    )  # fmt: skip
    costs = Roofline(HARDWARE["H200"], shape("135M"), shape("135M"), PROMPT)
    lane, taken = Lane(pair, replace(request, costs=costs), method), list[float]()
    lane.prepare()
    while len(taken) < FIRST + rounds and not lane.finished:
        replays.seconds, began = 0.0, time.thread_time()
        round_ = lane.step()
        if round_.kind != "prefill" and len(round_.rows) == rows:
            taken.append(time.thread_time() - began - replays.seconds)
    lane.end("stopped")
    return 1e6 * min(taken[FIRST:])
