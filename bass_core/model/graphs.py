"""CUDA graphs under a ModelRunner: one for each (batch, query length), captured on first use and replayed.

Contract: `make_runner` chooses the runner for the device; its callers need not know which one they have. A
captured step reads its tokens and row lengths, and what the tokens of trees see, from static buffers
(static_step.py), so a replay costs one launch and no round trip to the host. When a runner is dropped, its cache
and graphs are kept for the next request. A batch is padded to the next power of two; the added rows have length 0.
A model that can't be captured runs eagerly, with one warning. Non-goals: how a step is captured
(machine/capture.py); prefill, which runs once and at any width.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from kernels.backends import CAPTURABLE, captured_extent

from ..machine.capture import Pool, capture, empty_cache, enabled
from ..machine.setup_time import setting_up
from ..machine.transfer import to_device
from .base import CausalModel
from .cache import RaggedCache
from .capturable import refuse_capture
from .forward import BatchTree, ForwardBatch, ForwardOutput
from .prefix import NOTHING_SHARED, CachedTexts, SharedPrompts
from .runner import ModelRunner, least_saved, prefix_size
from .static_step import StaticStep, StepInputs, fits_tree, tensors

# The most bytes that the captured steps of one cache may hold; the least recently used is dropped first.
STEP_BYTES = 1 << 30
# The most tokens per row of a captured step: capturing wider ones costs more than it saves.
WIDEST = 33
# Steps up to 9 tokens wide are captured exactly, wider ones at every fourth width.
_EXACT_WIDTHS, _WIDTH_STEP = 9, 4
# Caches are made in multiples of this many tokens, so that one fits later requests too.
_LENGTH_STEP = 256
# The most idle caches of one model that are kept for later requests.
_MOST_IDLE = 4

Recorder = Callable[[Callable[[], ForwardOutput]], tuple[ForwardOutput, Callable[[], Any]]]

_idle: weakref.WeakKeyDictionary[CausalModel, list[_Slot]] = weakref.WeakKeyDictionary()
# Re-entrant: while a slot is taken, the garbage collector may drop a runner, which gives its slot back.
_lock = threading.RLock()


def make_runner(
    model: CausalModel,
    max_batch: int,
    max_len: int,
    vocab: int,
    backend: str,
    *,
    shared: SharedPrompts = NOTHING_SHARED,
) -> ModelRunner:
    """A runner for the model, one that captures steps where that is possible; arguments as for ModelRunner."""
    made = GraphRunner if _captures(model, backend) else ModelRunner
    return made(model, max_batch, max_len, vocab, backend, shared=shared)


def runner_for(
    model: CausalModel, max_batch: int, texts: CachedTexts, vocab: int, backend: str, share: bool = True
) -> ModelRunner:
    """A runner for `max_batch` rows of these texts at a time, which share what they begin with."""
    shared = texts.shared(least_saved(model, backend) if share else None)
    runner = make_runner(model, max_batch, texts.columns(shared), vocab, backend, shared=shared)
    runner.copied = texts.copied(shared, max_batch)
    return runner


def columns_made(model: CausalModel, columns: int, backend: str) -> int:
    """The columns of a new cache for a runner that asks for so many."""
    return _whole_steps(columns) if _captures(model, backend) else columns


def _captures(model: CausalModel, backend: str) -> bool:
    return enabled(model.device) and model.capturable and backend in CAPTURABLE


def _whole_steps(columns: int) -> int:
    return -(-columns // _LENGTH_STEP) * _LENGTH_STEP


def release_idle(model: CausalModel) -> None:
    """Free the model's caches and graphs that no runner uses."""
    with _lock:
        idle = _idle.pop(model, None)
    del idle
    empty_cache(model.device)


@dataclass(eq=False)
class _Slot:
    """A cache and the steps captured over it."""

    cache: RaggedCache
    pool: Pool
    steps: OrderedDict[tuple[Any, ...], StaticStep] = field(default_factory=OrderedDict)


class GraphRunner(ModelRunner):
    """A ModelRunner that replays captured steps.

    record: captures a forward; None for a CUDA graph, `record_calls` on a CPU.
    """

    def __init__(
        self,
        model: CausalModel,
        max_batch: int,
        max_len: int,
        vocab: int,
        backend: str,
        record: Recorder | None = None,
        *,
        shared: SharedPrompts = NOTHING_SHARED,
    ) -> None:
        slot = _take_slot(model, max_batch, max_len, *prefix_size(shared, max_batch))
        super().__init__(model, max_batch, max_len, vocab, backend, shared=shared, cache=slot.cache)
        self.slot = slot
        # The last runner's rows may have had prefixes.
        self.cache.detach()
        self._record = record or (lambda forward: capture(forward, slot.pool))
        weakref.finalize(self, _give_slot, model, slot).atexit = False

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """As ModelRunner's; the output is overwritten by the next step of this shape."""
        step = None if batch.eager else self._replay(batch, self.cache.max_len - self.cache.room(batch.lengths))
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
        """Capture the step that serves this shape, unless it is captured already."""
        self._replay(batch, 0)

    def _shape(
        self, batch: int, width: int, longest: int, tree: BatchTree | None = None
    ) -> tuple[int, int] | None:
        """The captured shape that serves this one, or None to run eagerly; longest: filled columns of a row."""
        if width > WIDEST or not self.model.capturable:
            return None
        rows = min(_next_power_of_two(batch), self.cache.max_batch)
        for columns in (_wider(width), width):
            if longest + columns <= self.cache.max_len and fits_tree(tree, columns):
                return rows, columns
        return None

    def _replay(self, batch: ForwardBatch, longest: int) -> StaticStep | None:
        """Replay the captured step of the batch's shape; None if there is none and it can't be captured."""
        tokens = batch.tokens
        shape = self._shape(tokens.shape[0], tokens.shape[1], longest, batch.tree)
        if shape is None:
            return None
        rows, columns = shape
        extent = captured_extent(self.backend, longest + columns, self.cache.max_len)
        plan = getattr(self.model, "plan", None)
        trees = batch.tree is not None
        key = (rows, columns, tokens.dtype, self.backend, batch.return_states, plan, batch.window, extent, trees)
        step = self.slot.steps.get(key)
        inputs = StepInputs.of(batch, self.cache, rows, columns)
        if step is None:
            with setting_up(tokens.device):
                step = self._capture(batch, inputs, columns, extent)
            if step is None:
                return None
            self.slot.steps[key] = step
            self._evict()
        self.slot.steps.move_to_end(key)
        inputs.fill(step.batch, tokens)
        step.replay()
        return step

    def _capture(self, batch: ForwardBatch, inputs: StepInputs, columns: int, extent: int) -> StaticStep | None:
        """Capture a step. This also runs it on the batch's tokens, so the cache gets what a replay would write."""
        buffers = inputs.buffers(batch, columns, extent)
        # No reference to self: a captured step outlives the runner.
        model, cache, backend = self.model, self.cache, self.backend

        def forward() -> ForwardOutput:
            return model.forward_captured(buffers, cache, backend)

        before = self.slot.pool.reserved()
        try:
            output, replay = self._record(forward)
        except torch.OutOfMemoryError:
            self.slot.steps.clear()
            # torch accepts no capture into a pool whose graphs have all been freed.
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
    """Replaces a CUDA graph on a CPU: a replay calls `forward` again and writes into the same output."""
    output = forward()

    def replay() -> None:
        for static, fresh in zip(tensors(output), tensors(forward()), strict=True):
            static.copy_(fresh)

    return output, replay


def _take_slot(model: CausalModel, max_batch: int, max_len: int, prefixes: int, prefix_len: int) -> _Slot:
    """An idle cache that is large enough and not far too large, or a new one."""
    with _lock:
        idle = _idle.setdefault(model, [])
        # A slot that was given back in the meantime may have pushed another out of the list.
        fitting = [slot for slot in idle if _serves(slot.cache, max_batch, max_len, prefixes, prefix_len)]
        for slot in fitting:
            if slot in idle:
                idle.remove(slot)
                return slot
    cache = model.new_cache(max_batch, _whole_steps(max_len), prefixes, prefix_len)
    return _Slot(cache, Pool(model.device))


def _serves(cache: RaggedCache, max_batch: int, max_len: int, prefixes: int, prefix_len: int) -> bool:
    if (cache.prefix is None) != (prefixes == 0):
        return False
    if cache.prefix is not None and not (
        prefixes <= cache.prefix.max_batch <= 2 * prefixes
        and prefix_len <= cache.prefix.max_len <= 2 * prefix_len + 512
    ):
        return False
    return max_batch <= cache.max_batch <= 2 * max_batch and max_len <= cache.max_len <= 2 * max_len + 512


def _give_slot(model: CausalModel, slot: _Slot) -> None:
    with _lock:
        idle = _idle.setdefault(model, [])
        idle.append(slot)
        del idle[:-_MOST_IDLE]


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _wider(width: int) -> int:
    """The captured width for steps of `width` tokens: Algorithm 1 asks for most widths up to 33."""
    if width <= _EXACT_WIDTHS:
        return width
    return -(-(width - 1) // _WIDTH_STEP) * _WIDTH_STEP + 1
