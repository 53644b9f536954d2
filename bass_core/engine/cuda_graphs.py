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
from .runner import ModelRunner

# Bytes that the steps of one cache may hold; the one used longest ago goes first.
STEP_BYTES = 1 << 30
# Wider steps run eagerly: capturing them costs more than it saves.
WIDEST = 33
_EXACT_WIDTHS, _WIDTH_STEP = 9, 4
_LENGTH_STEP = 256
_MOST_IDLE = 4

Outputs = tuple[Tensor, "Tensor | None"]
Recorder = Callable[[Callable[[], Outputs]], tuple[Outputs, Callable[[], Any]]]

_idle: weakref.WeakKeyDictionary[CausalModel, list[_Slot]] = weakref.WeakKeyDictionary()
# Re-entrant: the garbage collector may drop a runner, and so give a slot back, while a slot is taken.
_lock = threading.RLock()


def make_runner(
    model: CausalModel, max_batch: int, max_len: int, vocab: int, backend: str, keep_states: bool = False
) -> ModelRunner:
    """A runner for the model; arguments as for ModelRunner."""
    if enabled(model.device) and model.capturable and backend in CAPTURABLE:
        return GraphRunner(model, max_batch, max_len, vocab, backend, keep_states)
    return ModelRunner(model, max_batch, max_len, vocab, backend, keep_states)


def release_idle(model: CausalModel) -> None:
    """Free the caches and graphs that wait for a next request."""
    with _lock:
        idle = _idle.pop(model, None)
    del idle
    empty_cache(model.device)


@dataclass
class StaticStep:
    """Static inputs of one shape, what a replay does, and where its outputs lie.

    taken: bytes by which the pool grew when the step was captured. What lies between its layers is in there if no
    earlier step had needed as much.
    """

    ids: Tensor
    lengths: Tensor
    outputs: Outputs
    replay: Callable[[], Any]
    taken: int = 0

    @property
    def nbytes(self) -> int:
        return max(self.taken, sum(tensor.nbytes for tensor in self.outputs if tensor is not None))


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
        keep_states: bool = False,
        record: Recorder | None = None,
    ) -> None:
        slot = _take_slot(model, max_batch, max_len)
        super().__init__(model, max_batch, max_len, vocab, backend, keep_states, cache=slot.cache)
        self.slot = slot
        self._record = record or (lambda forward: capture(forward, slot.pool))
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

    @torch.inference_mode()
    def prepare(self, ids: Tensor) -> None:
        """Capture the step that serves this shape, if that was not done before."""
        batch, width = ids.shape[:2]
        shape = self._shape(batch, width, 0)
        if shape is not None:
            self._step(ids, [0] * batch, *shape)

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
        extent = captured_extent(self.backend, max(lengths) + columns, self.cache.max_len)
        key = (rows, columns, ids.dtype, self.backend, self.keep_states, plan, extent)
        step = self.slot.steps.get(key)
        lengths_ = to_device(lengths + [0] * (rows - len(lengths)), ids.device)
        if step is None:
            with setting_up(ids.device):
                step = self._capture(ids, lengths_, rows, columns, extent)
            if step is None:
                return None
            self.slot.steps[key] = step
            self._evict()
        self.slot.steps.move_to_end(key)
        step.ids[: ids.shape[0], : ids.shape[1]].copy_(ids)
        step.lengths.copy_(lengths_)
        step.replay()
        return step

    def _capture(self, ids: Tensor, lengths: Tensor, rows: int, columns: int, extent: int) -> StaticStep | None:
        """Capturing runs the step: on these very tokens, so that what it writes is what a replay will write."""
        static_ids = torch.zeros(rows, columns, *ids.shape[2:], dtype=ids.dtype, device=ids.device)
        static_ids[: ids.shape[0], : ids.shape[1]] = ids
        static_lengths = lengths.clone()
        # Not through self: a captured step outlives the runner.
        model, cache, backend, want = self.model, self.cache, self.backend, self.keep_states

        def forward() -> Outputs:
            return model.forward_captured(static_ids, cache, static_lengths, backend, want, extent)

        before = self.slot.pool.reserved()
        try:
            outputs, replay = self._record(forward)
        except torch.OutOfMemoryError:
            self.slot.steps.clear()
            # torch takes no more captures into a pool whose graphs are all gone.
            self.slot.pool = Pool(self.model.device)
            return None
        except Exception as error:
            refuse_capture(model, error)
            return None
        return StaticStep(static_ids, static_lengths, outputs, replay, self.slot.pool.reserved() - before)

    def _evict(self) -> None:
        while len(self.slot.steps) > 1 and sum(step.nbytes for step in self.slot.steps.values()) > STEP_BYTES:
            self.slot.steps.popitem(last=False)


def record_calls(forward: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]]:
    """Stands in for a CUDA graph on a CPU: a replay calls again, and writes into the same outputs."""
    outputs = forward()

    def replay() -> None:
        for static, fresh in zip(outputs, forward(), strict=True):
            if static is not None and fresh is not None:
                static.copy_(fresh)

    return outputs, replay


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
