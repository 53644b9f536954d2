"""The arms: who decodes, how, with which weights; and their turns, in which nobody else computes.

Contract: every call answers the same token ids greedily with the number of new tokens it is given. Ours and
OpenVINO go on after an end token, and so do vLLM and `generate_batch`; `generate` and llama.cpp never choose one.
transformers runs the model in its own dtype with its default attention, `sdpa`. A draft head can't assist it:
`assistant_model` must be a causal language model. The lane "transformers" is ours around that very `generate`.

Every round runs all arms, each with one new token (the prompt's time) and with all; the first is not counted.
After every call there is a pause of SETTLE_S, in which threads that wait for the next call in a loop go to sleep,
and then WATCH_S in which the CPU time of this process and of the children is read: `busy` says how many cores were
still at work. `others` says how many cores all other programs used during the call, and what the host of a virtual
machine took away; the system counts these in steps of 10 ms. Calls with more than MOST_OTHERS are left out, unless
an arm has no other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from bass_core import ModelPair, generate
from bass_core.decode.outside.call import PAD

from ..arms import LOOKUP, written_by
from ..report.report import median
from .child import Child

OURS, TRANSFORMERS, LLAMA_CPP, OPENVINO, VLLM = "ours", "transformers", "llama.cpp", "OpenVINO", "vLLM"
BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "int4": 4, "Q4_1": 4}
SETTLE_S, WATCH_S = 0.05, 0.05
# Cores that other programs may use during a call: two threads that wait for each other lose far more than this.
MOST_OTHERS = 0.1

Rows = list[list[int]]
Clock = Callable[[], float]


@dataclass(frozen=True, eq=False)
class Arm:
    """`run(tokens)` returns the new token ids of each row; a peer's returns none."""

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
    if BITS[weights] >= 16:
        yield Arm(TRANSFORMERS, "as our lane", len(rows), weights, partial(run, method="transformers"))


def transformers(pair: ModelPair, weights: str, rows: Rows) -> Iterator[Arm]:
    """`generate` on the padded batch; at batch 1 also with prompt lookup, at others also `generate_batch`."""
    run = partial(written_by, pair.target, rows, attention="sdpa")
    yield Arm(TRANSFORMERS, "generate", len(rows), weights, run)
    if len(rows) == 1:
        yield Arm(TRANSFORMERS, "prompt lookup", 1, weights, partial(run, prompt_lookup_num_tokens=LOOKUP))
    else:
        yield Arm(TRANSFORMERS, "generate_batch", len(rows), weights, partial(_generate_batch, pair.target, rows))


def _generate_batch(model: Any, rows: Rows, tokens: int) -> Rows:
    """The new token ids that transformers' continuous batching writes greedily, without an early end.

    Its cache has just the blocks that the rows need: by default it takes most of the free memory, and allocating
    that takes longer than all the rest. It computes in a second thread, which costs it what docs/figures.md says
    about the outside lane.
    """
    options = ContinuousBatchingConfig(max_batch_tokens=sum(map(len, rows)), allow_block_sharing=False)
    options.num_blocks = sum(-(-(len(row) + tokens) // options.page_size) for row in rows)
    greedy = GenerationConfig(do_sample=False, max_new_tokens=tokens, pad_token_id=PAD)
    out = model.generate_batch(rows, greedy, options, warmup=False)
    written = [list(one.generated_tokens) for one in out.values()]
    if [len(row) for row in written] != [tokens] * len(rows):
        raise ValueError(f"rows of {[len(row) for row in written]} tokens instead of {len(rows)} of {tokens}")
    return written


def outside(peer: Child, way: str, weights: str, rows: Rows) -> Arm:
    """llama.cpp, OpenVINO or vLLM, in its way of speculation."""

    def run(tokens: int) -> None:
        peer.complete(rows, tokens)

    return Arm(peer.name, way, len(rows), weights, run)


@dataclass
class Turns:
    """An arm's counted calls: ms of the prompts and of whole calls, token ids, and cores at other work."""

    arm: Arm
    prompt_ms: list[float] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)
    texts: list[Rows] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        """The median of the whole calls."""
        return median(self.ms)


def take_turns(arms: list[Arm], tokens: int, repeats: int, clocks: list[Clock]) -> list[Turns]:
    """Run all arms `repeats` times after an uncounted round. clocks: CPU seconds of each process."""
    made = [Turns(arm) for arm in arms]
    for _ in range(repeats + 1):
        for one in made:
            start = time.perf_counter()
            one.arm.run(1)
            one.prompt_ms.append(1000 * (time.perf_counter() - start))
            _busy(clocks)
            start, everybody, we = time.perf_counter(), _machine(), _used(clocks)
            written = one.arm.run(tokens)
            seconds = time.perf_counter() - start
            one.ms.append(1000 * seconds)
            one.others.append(max(0.0, _machine() - everybody - _used(clocks) + we) / seconds)
            one.busy.append(_busy(clocks))
            one.texts += [] if written is None else [written]
    for one in made:
        counted = range(1, repeats + 1)
        kept = [call for call in counted if one.others[call] <= MOST_OTHERS] or counted
        for name in ("prompt_ms", "ms", "busy", "others"):
            setattr(one, name, [getattr(one, name)[call] for call in kept])
    return made


def _busy(clocks: list[Clock]) -> float:
    """Cores at work, of the processes with these clocks, while none of them has anything to do."""
    time.sleep(SETTLE_S)
    start, before = time.perf_counter(), _used(clocks)
    time.sleep(WATCH_S)
    return (_used(clocks) - before) / (time.perf_counter() - start)


def _used(clocks: list[Clock]) -> float:
    return sum(clock() for clock in clocks)


def _machine() -> float:
    """Seconds of CPU time that all programs together have used, and that the host has taken away."""
    times = psutil.cpu_times()
    # Guests' time is in `user` already.
    names = ("user", "nice", "system", "irq", "softirq", "steal")
    return sum(getattr(times, name, 0.0) for name in names)
