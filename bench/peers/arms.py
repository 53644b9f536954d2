"""The arms of `bench peers` (program, method, weights), and `take_turns`, which runs them one at a time.

Every call answers the same token ids greedily with a fixed number of new tokens. Our lanes, OpenVINO, vLLM and
`generate_batch` continue after an end token; `generate` and llama.cpp never choose an end token. transformers runs
the model in its own dtype with its default attention, `sdpa`. A draft head can't assist it, because
`assistant_model` must be a causal language model. The method "as our lane" is our lane around the same `generate`.

Every round runs all arms twice: with one new token, which gives the time of the prompt, and with all new tokens.
The first round does not count. After every call we wait SETTLE_S, so that spinning threads go to sleep, and then
measure the CPU time of this process and of the children over WATCH_S: `busy` is the number of cores that were
still at work. `others` is the number of cores that all other programs used during the call, including time taken
by the host of a virtual machine; the system counts these in steps of 10 ms. We leave out calls during which
`others` was above MAX_OTHERS, unless that is true of all calls of an arm.
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
from bass_core.decode.transformers_generate.call import PAD

from ..arms import LOOKUP, written_by
from ..report.report import median
from .child import Child

OURS, TRANSFORMERS, LLAMA_CPP, OPENVINO, VLLM = "ours", "transformers", "llama.cpp", "OpenVINO", "vLLM"
BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "int4": 4, "Q4_1": 4}
SETTLE_S, WATCH_S = 0.05, 0.05
# The maximum number of cores that other programs may use during a call. The limit is low because two threads that
# wait for each other lose far more time than the share that was taken from them.
MAX_OTHERS = 0.1

Rows = list[list[int]]
Clock = Callable[[], float]


@dataclass(frozen=True, eq=False)
class PeerArm:
    """One arm.

    Attributes:
        who: the program.
        method: its method, for example "regular".
        weights: a key of BITS.
        run: takes the number of new tokens and returns the token ids of each row, or None for a peer.
    """

    who: str
    method: str
    batch: int
    weights: str
    run: Callable[[int], Rows | None]

    @property
    def key(self) -> tuple[str, str, int, str]:
        """A key that is unique in a run."""
        return self.who, self.method, self.batch, self.weights


def ours(pair: ModelPair, weights: str, rows: Rows, draft_length: Any) -> Iterator[PeerArm]:
    """Yield our arms: regular and BASS at every batch, single-sequence speculation at batch 1."""
    options: dict[str, Any] = {"eos_token_id": None, "draft_length": draft_length}

    def run(tokens: int, method: str) -> Rows:
        out = generate(pair, rows, method=method, max_new_tokens=tokens, **options)
        return [sequence.token_ids for sequence in out.sequences]

    for method in ("regular", "speculative", "bass") if len(rows) == 1 else ("regular", "bass"):
        yield PeerArm(OURS, method, len(rows), weights, partial(run, method=method))
    if BITS[weights] >= 16:
        yield PeerArm(TRANSFORMERS, "as our lane", len(rows), weights, partial(run, method="transformers"))


def transformers(pair: ModelPair, weights: str, rows: Rows) -> Iterator[PeerArm]:
    """Yield the arms of `generate` (rows are padded), and prompt lookup at batch 1, else `generate_batch`."""
    run = partial(written_by, pair.target, rows, attention="sdpa")
    yield PeerArm(TRANSFORMERS, "generate", len(rows), weights, run)
    if len(rows) == 1:
        yield PeerArm(TRANSFORMERS, "prompt lookup", 1, weights, partial(run, prompt_lookup_num_tokens=LOOKUP))
    else:
        yield PeerArm(
            TRANSFORMERS, "generate_batch", len(rows), weights, partial(_generate_batch, pair.target, rows)
        )


def _generate_batch(model: Any, rows: Rows, tokens: int) -> Rows:
    """Return the new token ids that transformers' continuous batching writes greedily, without an early end.

    We give its cache only the blocks that the rows need. By default it takes most of the free memory, and
    allocating that takes longer than everything else. Continuous batching computes in a second thread;
    docs/figures.md describes, for the outside lane, how much that slows it down.
    """
    options = ContinuousBatchingConfig(max_batch_tokens=sum(map(len, rows)), allow_block_sharing=False)
    options.num_blocks = sum(-(-(len(row) + tokens) // options.page_size) for row in rows)
    greedy = GenerationConfig(do_sample=False, max_new_tokens=tokens, pad_token_id=PAD)
    out = model.generate_batch(rows, greedy, options, warmup=False)
    written = [list(request.generated_tokens) for request in out.values()]
    if [len(row) for row in written] != [tokens] * len(rows):
        raise ValueError(f"rows of {[len(row) for row in written]} tokens instead of {len(rows)} of {tokens}")
    return written


def outside(peer: Child, way: str, weights: str, rows: Rows) -> PeerArm:
    """Return the arm of a peer outside this process (llama.cpp, OpenVINO or vLLM).

    Args:
        peer: the peer's process.
        way: the name of its speculation, for example "plain".
        weights: a key of BITS.
        rows: the token ids of each prompt.
    """

    def run(tokens: int) -> None:
        peer.complete(rows, tokens)

    return PeerArm(peer.name, way, len(rows), weights, run)


@dataclass
class ArmCalls:
    """An arm's counted calls.

    Attributes:
        arm: the arm.
        prompt_ms: times of the calls with one token.
        ms: times of the whole calls.
        texts: the token ids of each call, empty for a peer.
        busy: cores still at work after each call.
        others: cores used by other programs during each call.
    """

    arm: PeerArm
    prompt_ms: list[float] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)
    texts: list[Rows] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        """The median of the whole calls."""
        return median(self.ms)


def take_turns(arms: list[PeerArm], tokens: int, repeats: int, clocks: list[Clock]) -> list[ArmCalls]:
    """Run all arms `repeats` times, after a round that does not count.

    Args:
        tokens: new tokens of a whole call.
        repeats: counted rounds.
        clocks: functions that return the CPU seconds of each of our processes.
    """
    turns = [ArmCalls(arm) for arm in arms]
    for _ in range(repeats + 1):
        for turn in turns:
            start = time.perf_counter()
            turn.arm.run(1)
            turn.prompt_ms.append(1000 * (time.perf_counter() - start))
            _busy(clocks)
            start, machine, used = time.perf_counter(), _machine(), _used(clocks)
            written = turn.arm.run(tokens)
            seconds = time.perf_counter() - start
            turn.ms.append(1000 * seconds)
            turn.others.append(max(0.0, _machine() - machine - _used(clocks) + used) / seconds)
            turn.busy.append(_busy(clocks))
            turn.texts += [] if written is None else [written]
    for turn in turns:
        counted = range(1, repeats + 1)
        undisturbed = [call for call in counted if turn.others[call] <= MAX_OTHERS] or counted
        for name in ("prompt_ms", "ms", "busy", "others"):
            setattr(turn, name, [getattr(turn, name)[call] for call in undisturbed])
    return turns


def _busy(clocks: list[Clock]) -> float:
    """Return the number of cores that our processes use while none of them has anything to do."""
    time.sleep(SETTLE_S)
    start, before = time.perf_counter(), _used(clocks)
    time.sleep(WATCH_S)
    return (_used(clocks) - before) / (time.perf_counter() - start)


def _used(clocks: list[Clock]) -> float:
    return sum(clock() for clock in clocks)


def _machine() -> float:
    """Return the CPU seconds that all programs together have used, or that the host has taken away."""
    times = psutil.cpu_times()
    # `user` already includes the time of guests.
    names = ("user", "nice", "system", "irq", "softirq", "steal")
    return sum(getattr(times, name, 0.0) for name in names)
