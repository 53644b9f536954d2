"""CUDA graphs under a ModelRunner: one for each (batch, query length), captured on first use and replayed.

Contract: `make_runner` gives the runner that suits the device; above it nothing knows which. A captured step reads
its tokens and row lengths from static buffers, so a replay costs one launch and no round trip to the host. Caches
and their graphs go back to a pool when a runner is dropped, and serve the next request. Batches run in the next
power of two, rows that are not there being of length 0. An architecture that can't be captured runs eagerly and
says so once. Off on ZeroGPU and with BASS_GRAPHS=0. Non-goals: prefill, which runs once and at any width.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernels.ragged_attention import CAPTURABLE
from kernels.support import on

from .cache import RaggedCache
from .runner import ModelRunner
from .step_model import StepModel
from .transfer import to_device

# Bytes of static outputs that one runner keeps; the graph used longest ago goes first.
OUTPUT_BYTES = 1 << 30
# Wider steps run eagerly: capturing them costs more than it saves.
WIDEST = 33
_EXACT_WIDTHS, _WIDTH_STEP = 9, 4
_LENGTH_STEP = 256
_MOST_IDLE = 4

Outputs = tuple[Tensor, "Tensor | None"]
Recorder = Callable[[Callable[[], Outputs]], tuple[Outputs, Callable[[], Any]]]

_log = logging.getLogger(__name__)
_idle: weakref.WeakKeyDictionary[StepModel, list[_Slot]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_capturing = threading.Lock()
_spent = threading.local()


def enabled(device: torch.device) -> bool:
    """Whether steps on the device are captured."""
    off = os.environ.get("SPACES_ZERO_GPU") or os.environ.get("BASS_GRAPHS") == "0"
    return device.type == "cuda" and not off


def setup_ms() -> float:
    """Milliseconds that this thread has spent on capturing: no lane's clock counts them."""
    return getattr(_spent, "ms", 0.0)


def make_runner(
    model: StepModel, max_batch: int, max_len: int, vocab: int, backend: str, keep_states: bool = False
) -> ModelRunner:
    """A runner for the model; arguments as for ModelRunner."""
    if enabled(model.device) and model.capturable and backend in CAPTURABLE:
        return GraphRunner(model, max_batch, max_len, vocab, backend, keep_states)
    return ModelRunner(model, max_batch, max_len, vocab, backend, keep_states)


def release_idle(model: StepModel) -> None:
    """Free the caches and graphs that wait for a next request."""
    with _lock:
        _idle.pop(model, None)
    if model.device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass
class StaticStep:
    """Static inputs of one shape, what a replay does, and where its outputs lie."""

    ids: Tensor
    lengths: Tensor
    outputs: Outputs
    replay: Callable[[], Any]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.outputs if tensor is not None)


@dataclass(eq=False)
class _Slot:
    """A cache and the steps captured over it."""

    cache: RaggedCache
    steps: OrderedDict[tuple[Any, ...], StaticStep] = field(default_factory=OrderedDict)
    pool: Any = None


class GraphRunner(ModelRunner):
    """A ModelRunner that replays. `record` is how a step is captured: a CUDA graph, or on a CPU `record_calls`."""

    def __init__(
        self,
        model: StepModel,
        max_batch: int,
        max_len: int,
        vocab: int,
        backend: str,
        keep_states: bool = False,
        record: Recorder | None = None,
    ) -> None:
        slot = _take_slot(model, max_batch, max_len)
        super().__init__(model, max_batch, max_len, vocab, backend, keep_states, cache=slot.cache)
        self.slot = slot
        self._record = record or (lambda forward: _record_graph(forward, slot))
        weakref.finalize(self, _give_slot, model, slot).atexit = False

    @torch.inference_mode()
    def feed_ids(
        self, ids: Tensor, lengths: list[int], take: list[int] | None = None, counts: list[int] | None = None
    ) -> Tensor:
        """As ModelRunner's; the logits stand in a static buffer until the next step of this shape."""
        shape = self._shape(ids.shape[0], ids.shape[1], max(lengths))
        step = None if shape is None else self._step(ids, lengths, *shape)
        if step is None:
            return self.feed_eagerly(ids, lengths, take, counts)
        batch, width = ids.shape[:2]
        logits, states = step.outputs
        self.states = None if states is None else states[:batch, :width]
        logits = logits[:batch, :width, : self.vocab]
        if take is None:
            return logits
        return logits[torch.arange(batch, device=logits.device), to_device(take, logits.device)]

    def _shape(self, batch: int, width: int, longest: int) -> tuple[int, int] | None:
        """The captured shape that serves this one, or None to run eagerly."""
        if width > WIDEST or not self.model.capturable:
            return None
        rows = min(_next_power_of_two(batch), self.cache.max_batch)
        for columns in (_wider(width), width):
            if longest + columns <= self.cache.max_len:
                return rows, columns
        return None

    def _step(self, ids: Tensor, lengths: list[int], rows: int, columns: int) -> StaticStep | None:
        """The step of that shape, run for these tokens; None where it can't be captured."""
        plan = getattr(self.model, "plan", None)
        key = (rows, columns, ids.dtype, self.backend, self.keep_states, plan)
        step = self.slot.steps.get(key)
        lengths_ = to_device(lengths + [0] * (rows - len(lengths)), ids.device)
        if step is None:
            started = time.perf_counter()
            step = self._capture(ids, lengths_, rows, columns)
            _spent.ms = setup_ms() + 1000 * (time.perf_counter() - started)
            if step is None:
                return None
            self.slot.steps[key] = step
            self._evict()
        self.slot.steps.move_to_end(key)
        step.ids[: ids.shape[0], : ids.shape[1]].copy_(ids)
        step.lengths.copy_(lengths_)
        step.replay()
        return step

    def _capture(self, ids: Tensor, lengths: Tensor, rows: int, columns: int) -> StaticStep | None:
        """Capturing runs the step: on these very tokens, so that what it writes is what a replay will write."""
        static_ids = torch.zeros(rows, columns, *ids.shape[2:], dtype=ids.dtype, device=ids.device)
        static_ids[: ids.shape[0], : ids.shape[1]] = ids
        static_lengths = lengths.clone()
        # Not through self: a captured step outlives the runner.
        model, cache, backend, want = self.model, self.cache, self.backend, self.keep_states

        def forward() -> Outputs:
            return model.forward_anywhere(static_ids, cache, static_lengths, backend, want)

        try:
            outputs, replay = self._record(forward)
        except torch.cuda.OutOfMemoryError:
            self.slot.steps.clear()
            return None
        except Exception as error:
            if self.model.capturable:
                self.model.capturable = False
                _log.warning(
                    "%s can't be captured in a CUDA graph and runs eagerly (%s: %s).",
                    self.model.name, type(error).__name__, str(error).splitlines()[0] if str(error) else "",
                )  # fmt: skip
            return None
        return StaticStep(static_ids, static_lengths, outputs, replay)

    def _evict(self) -> None:
        while len(self.slot.steps) > 1 and sum(step.nbytes for step in self.slot.steps.values()) > OUTPUT_BYTES:
            self.slot.steps.popitem(last=False)


def record_calls(forward: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]]:
    """Stands in for a CUDA graph on a CPU: a replay calls again, and writes into the same outputs."""
    outputs = forward()

    def replay() -> None:
        for static, fresh in zip(outputs, forward(), strict=True):
            if static is not None and fresh is not None:
                static.copy_(fresh)

    return outputs, replay


def _record_graph(forward: Callable[[], Outputs], slot: _Slot) -> tuple[Outputs, Callable[[], None]]:
    """Warm up on a side stream (kernels are compiled, libraries make their handles), then capture.

    One capture at a time: another thread's would not survive the synchronisations of this one.
    """
    with _capturing, on(slot.cache.buffer.device):
        return _warm_and_capture(forward, slot)


def _warm_and_capture(forward: Callable[[], Outputs], slot: _Slot) -> tuple[Outputs, Callable[[], None]]:
    torch.cuda.synchronize()
    if slot.pool is None:
        # One pool a runner: its graphs are replayed one after another and may share what lies between.
        slot.pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            forward()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=slot.pool, stream=stream, capture_error_mode="thread_local"):
        outputs = forward()
    torch.cuda.synchronize()
    return outputs, graph.replay


def _take_slot(model: StepModel, max_batch: int, max_len: int) -> _Slot:
    """An idle cache that is large enough, and not four times too large, or a new one."""
    with _lock:
        idle = _idle.setdefault(model, [])
        for slot in idle:
            cache = slot.cache
            if max_batch <= cache.max_batch <= 2 * max_batch and max_len <= cache.max_len <= 2 * max_len + 512:
                idle.remove(slot)
                return slot
    return _Slot(model.new_cache(max_batch, -(-max_len // _LENGTH_STEP) * _LENGTH_STEP))


def _give_slot(model: StepModel, slot: _Slot) -> None:
    with _lock:
        idle = _idle.setdefault(model, [])
        idle.append(slot)
        del idle[:-_MOST_IDLE]


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _wider(width: int) -> int:
    """Exact up to 9, then every fourth width: Algorithm 1 visits most of them."""
    if width <= _EXACT_WIDTHS:
        return width
    return -(-(width - 1) // _WIDTH_STEP) * _WIDTH_STEP + 1
