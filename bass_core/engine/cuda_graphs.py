"""CUDA graphs under a ModelRunner: one for each (batch, query length), captured on first use and replayed.

Contract: `make_runner` gives the runner that suits the device; above it nothing knows which. A captured step reads
its tokens and row lengths from static buffers, so a replay costs one launch and no round trip to the host. Caches
and their graphs go back to a pool when a runner is dropped, and serve the next request. Batches run in the next
power of two, rows that are not there being of length 0. An architecture that can't be captured runs eagerly and
says so once. Non-goals: how a step is captured (machine/capture.py); prefill, which runs once and at any width.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernels.backends import CAPTURABLE, captured_extent

from ..attention.cache import RaggedCache
from ..machine.capture import Pool, capture, empty_cache, enabled
from ..machine.setup_time import setting_up
from ..machine.transfer import to_device
from ..models.base import CausalModel
from ..models.capturable import refuse_capture
from ..models.forward import CapturedBatch, ForwardBatch, ForwardOutput
from .runner import ModelRunner

# Bytes that the steps of one cache may hold; the one used longest ago goes first.
STEP_BYTES = 1 << 30
# Wider steps run eagerly: capturing them costs more than it saves.
WIDEST = 33
_EXACT_WIDTHS, _WIDTH_STEP = 9, 4
_LENGTH_STEP = 256
_MOST_IDLE = 4

Recorder = Callable[[Callable[[], ForwardOutput]], tuple[ForwardOutput, Callable[[], Any]]]

_idle: weakref.WeakKeyDictionary[CausalModel, list[_Slot]] = weakref.WeakKeyDictionary()
# Re-entrant: the garbage collector may drop a runner, and so give a slot back, while a slot is taken.
_lock = threading.RLock()


def make_runner(model: CausalModel, max_batch: int, max_len: int, vocab: int, backend: str) -> ModelRunner:
    """A runner for the model; arguments as for ModelRunner."""
    captured = enabled(model.device) and model.capturable and backend in CAPTURABLE
    return (GraphRunner if captured else ModelRunner)(model, max_batch, max_len, vocab, backend)


def release_idle(model: CausalModel) -> None:
    """Free the caches and graphs that wait for a next request."""
    with _lock:
        idle = _idle.pop(model, None)
    del idle
    empty_cache(model.device)


@dataclass
class StaticStep:
    """What a captured step of one shape reads, what replays it, and where its output lies.

    taken: bytes by which the pool grew when the step was captured. What lies between its layers is in there if no
    earlier step had needed as much.
    """

    batch: CapturedBatch
    output: ForwardOutput
    replay: Callable[[], Any]
    taken: int = 0

    @property
    def nbytes(self) -> int:
        return max(self.taken, sum(tensor.nbytes for tensor in _tensors(self.output)))


@dataclass(eq=False)
class _Slot:
    """A cache and the steps captured over it."""

    cache: RaggedCache
    pool: Pool
    steps: OrderedDict[tuple[Any, ...], StaticStep] = field(default_factory=OrderedDict)


class GraphRunner(ModelRunner):
    """A ModelRunner that replays. `record` is how a step is captured: a CUDA graph, or on a CPU `record_calls`."""

    def __init__(
        self,
        model: CausalModel,
        max_batch: int,
        max_len: int,
        vocab: int,
        backend: str,
        record: Recorder | None = None,
    ) -> None:
        slot = _take_slot(model, max_batch, max_len)
        super().__init__(model, max_batch, max_len, vocab, backend, cache=slot.cache)
        self.slot = slot
        self._record = record or (lambda forward: capture(forward, slot.pool))
        weakref.finalize(self, _give_slot, model, slot).atexit = False

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """As ModelRunner's; what it returns stands in static buffers until the next step of this shape."""
        step = None if batch.eager else self._replay(batch, max(batch.lengths))
        if step is None:
            return super().forward(batch)
        rows, columns = batch.tokens.shape[:2]
        logits, states = step.output.logits, step.output.states
        states = None if states is None else states[:rows, :columns]
        logits = logits[:rows, :columns, : self.vocab]
        if batch.take is not None:
            logits = logits[torch.arange(rows, device=logits.device), to_device(batch.take, logits.device)]
        return ForwardOutput(logits, states)

    @torch.inference_mode()
    def prepare(self, batch: ForwardBatch) -> None:
        """Capture the step that serves this shape, if that was not done before."""
        self._replay(batch, 0)

    def _shape(self, batch: int, width: int, longest: int) -> tuple[int, int] | None:
        """The captured shape that serves this one, or None to run eagerly."""
        if width > WIDEST or not self.model.capturable:
            return None
        rows = min(_next_power_of_two(batch), self.cache.max_batch)
        for columns in (_wider(width), width):
            if longest + columns <= self.cache.max_len:
                return rows, columns
        return None

    def _replay(self, batch: ForwardBatch, longest: int) -> StaticStep | None:
        """The step of the batch's shape, run for it; None where it can't be captured."""
        tokens = batch.tokens
        shape = self._shape(tokens.shape[0], tokens.shape[1], longest)
        if shape is None:
            return None
        rows, columns = shape
        extent = captured_extent(self.backend, longest + columns, self.cache.max_len)
        plan = getattr(self.model, "plan", None)
        key = (rows, columns, tokens.dtype, self.backend, batch.return_states, plan, extent)
        step = self.slot.steps.get(key)
        lengths = to_device([*batch.lengths, *[0] * (rows - len(batch.lengths))], tokens.device)
        if step is None:
            with setting_up(tokens.device):
                step = self._capture(batch, lengths, columns, extent)
            if step is None:
                return None
            self.slot.steps[key] = step
            self._evict()
        self.slot.steps.move_to_end(key)
        step.batch.tokens[: tokens.shape[0], : tokens.shape[1]].copy_(tokens)
        step.batch.lengths.copy_(lengths)
        step.replay()
        return step

    def _capture(self, batch: ForwardBatch, lengths: Tensor, columns: int, extent: int) -> StaticStep | None:
        """Capturing runs the step: on these very tokens, so that what it writes is what a replay will write."""
        tokens = batch.tokens
        static = torch.zeros(len(lengths), columns, *tokens.shape[2:], dtype=tokens.dtype, device=tokens.device)
        static[: tokens.shape[0], : tokens.shape[1]] = tokens
        buffers = CapturedBatch(static, lengths.clone(), extent, batch.return_states)
        # Not through self: a captured step outlives the runner.
        model, cache, backend = self.model, self.cache, self.backend

        def forward() -> ForwardOutput:
            return model.forward_captured(buffers, cache, backend)

        before = self.slot.pool.reserved()
        try:
            output, replay = self._record(forward)
        except torch.OutOfMemoryError:
            self.slot.steps.clear()
            # torch takes no more captures into a pool whose graphs are all gone.
            self.slot.pool = Pool(self.model.device)
            return None
        except Exception as error:
            refuse_capture(model, error)
            return None
        return StaticStep(buffers, output, replay, self.slot.pool.reserved() - before)

    def _evict(self) -> None:
        while len(self.slot.steps) > 1 and sum(step.nbytes for step in self.slot.steps.values()) > STEP_BYTES:
            self.slot.steps.popitem(last=False)


def record_calls(forward: Callable[[], ForwardOutput]) -> tuple[ForwardOutput, Callable[[], None]]:
    """Stands in for a CUDA graph on a CPU: a replay calls again, and writes into the same output."""
    output = forward()

    def replay() -> None:
        for static, fresh in zip(_tensors(output), _tensors(forward()), strict=True):
            static.copy_(fresh)

    return output, replay


def _tensors(output: ForwardOutput) -> list[Tensor]:
    return [output.logits] if output.states is None else [output.logits, output.states]


def _take_slot(model: CausalModel, max_batch: int, max_len: int) -> _Slot:
    """An idle cache that is large enough, and not four times too large, or a new one."""
    with _lock:
        idle = _idle.setdefault(model, [])
        # A slot that is given back meanwhile may push one out.
        fitting = [slot for slot in idle if _serves(slot.cache, max_batch, max_len)]
        for slot in fitting:
            if slot in idle:
                idle.remove(slot)
                return slot
    cache = model.new_cache(max_batch, -(-max_len // _LENGTH_STEP) * _LENGTH_STEP)
    return _Slot(cache, Pool(model.device))


def _serves(cache: RaggedCache, max_batch: int, max_len: int) -> bool:
    return max_batch <= cache.max_batch <= 2 * max_batch and max_len <= cache.max_len <= 2 * max_len + 512


def _give_slot(model: CausalModel, slot: _Slot) -> None:
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
