"""CUDA graphs for a ModelRunner: one graph per batch size and query length, captured on first use.

`make_runner` chooses the runner; its callers need not know which one they have. `runner_for` also sizes the cache.
A captured step reads its tokens, its rows' lengths and its trees from static buffers (static_step.py), so a replay
costs one launch and no round trip to the host. A batch is padded to the next power of two with rows of length 0.
For example, 5 rows of 4 tokens replay the graph for 8 rows of 4, if the cache has 8 rows.

When a runner is dropped, its cache and graphs are kept for the next request. A model that can't be captured runs
eagerly, with one warning. Prefill is never captured, because a prompt is read only once and the width of its
chunks varies. machine/capture.py does the capturing.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.backends import CAPTURABLE, captured_extent
from kernels.support import is_accelerator

from ..machine.capture import Pool, capture, empty_cache, enabled
from ..machine.setup_time import setting_up
from ..machine.transfer import to_device
from ..sample.shaping import allowed_logits
from .base import CausalModel
from .cache import RaggedCache
from .capturable import refuse_capture
from .forward import CapturedBatch, ForwardBatch, ForwardOutput, HostTreeMask
from .prefix import NOTHING_SHARED, CachedTexts, SharedPrompts
from .runner import ModelRunner, min_shared_tokens, prefix_size
from .static_step import (
    CapturedRound,
    CapturedStep,
    DeviceText,
    GraphDrafts,
    Judged,
    Padded,
    RoundInputs,
    StepJudge,
    fits_tree,
    pad_tree,
    tensors,
)

# Limit in bytes for the captured steps of one cache; the least recently used is dropped first.
STEP_BYTES = 1 << 30
# Limit for their number, because a graph also takes memory for each of its kernels, which `nbytes` does not count.
# A draft model needs the most in a race: two widths of unread tokens, for each level and number of rows.
MAX_STEPS = 128
# Rounds are captured for these numbers of drafts per row, so that all of them can be captured before a race; other
# numbers are padded to the next. Rounds with more drafts are not captured.
LEVELS = (0, 1, 2, 3, 4, 6, 8, 16, 32)
MAX_CAPTURED_WIDTH = 1 + LEVELS[-1]
# Caches have a multiple of this many columns, so that they fit later requests too.
_COLUMNS_STEP = 256
# Number of idle caches that are kept per model.
_MAX_IDLE_CACHES = 4

Recorder = Callable[[Callable[[], Any]], tuple[Any, Callable[[], Any]]]

_idle: weakref.WeakKeyDictionary[CausalModel, list[_Slot]] = weakref.WeakKeyDictionary()
# Re-entrant, because garbage collection may drop a runner, and so return its slot, while a slot is being taken.
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
    """Make a runner, which captures steps if the model and backend allow it; arguments as for ModelRunner."""
    runner_class = GraphRunner if _captures(model, backend) else ModelRunner
    return runner_class(model, max_batch, max_len, vocab, backend, shared=shared)


def runner_for(
    model: CausalModel, max_batch: int, texts: CachedTexts, vocab: int, backend: str, share: bool = True
) -> ModelRunner:
    """Make a runner for `max_batch` rows of these texts at a time; if `share` is true, they share prefixes."""
    shared = texts.shared(min_shared_tokens(model, backend) if share else None)
    runner = make_runner(model, max_batch, texts.columns(shared), vocab, backend, shared=shared)
    runner.copied = texts.copied(shared, max_batch)
    return runner


def cache_columns(model: CausalModel, columns: int, backend: str) -> int:
    """Return the number of columns of a new cache for a runner that needs `columns`."""
    return _round_up_columns(columns) if _captures(model, backend) else columns


def _captures(model: CausalModel, backend: str) -> bool:
    return enabled(model.device) and model.capturable and backend in CAPTURABLE


def _round_up_columns(columns: int) -> int:
    # Behind the longest text there is room for the padding of the last rounds.
    return -(-(columns + MAX_CAPTURED_WIDTH) // _COLUMNS_STEP) * _COLUMNS_STEP


def release_idle(model: CausalModel) -> None:
    """Free the model's caches and graphs that no runner uses."""
    with _lock:
        idle = _idle.pop(model, None)
    del idle
    empty_cache(model.device)


@dataclass(eq=False)
class _Slot:
    """A cache and the steps that were captured over it."""

    cache: RaggedCache
    pool: Pool
    steps: OrderedDict[tuple[Any, ...], CapturedStep] = field(default_factory=OrderedDict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    host_words: Tensor | None = None


class GraphRunner(ModelRunner):
    """A ModelRunner that replays captured steps."""

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
        """Take an idle cache or make one. All arguments except `record` are as for ModelRunner.

        `record` captures a forward. None captures CUDA graphs; on a CPU, pass `record_calls`.
        """
        slot = _take_slot(model, max_batch, max_len, *prefix_size(shared, max_batch))
        super().__init__(model, max_batch, max_len, vocab, backend, shared=shared, cache=slot.cache)
        self.slot = slot
        # Rows may still be attached to prefixes of the last runner.
        self.cache.detach()
        self._record = record or (lambda forward: capture(forward, slot.pool))
        # Keys of steps that the memory can't hold. This runner doesn't try to capture them again.
        self._too_large: set[tuple[Any, ...]] = set()
        weakref.finalize(self, _return_slot, model, slot).atexit = False

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Feed a batch as ModelRunner does; the next step of this shape overwrites the output."""
        step = None if batch.eager else self._replay(batch, self.cache.max_len - self.cache.room(batch.lengths))
        if step is None:
            return super().forward(batch)
        rows, columns = batch.tokens.shape[:2]
        logits, states = step.output.logits, step.output.states
        states = None if states is None else states[:rows, :columns]
        logits = logits[:rows, :columns, : self.vocab]
        if batch.wanted_columns is not None:
            wanted = to_device(batch.wanted_columns, logits.device)
            logits = logits[torch.arange(rows, device=logits.device), wanted]
        return ForwardOutput(logits, states)

    @torch.inference_mode()
    def prepare(self, batch: ForwardBatch) -> None:
        """Capture the step for this shape, unless it is captured already."""
        self._replay(batch, 0)

    @torch.inference_mode()
    def verify_in_graph(
        self,
        drafts: GraphDrafts,
        judge: StepJudge,
        inputs: RoundInputs,
        return_states: bool,
        text: Tensor | None = None,
        advances: bool = False,
    ) -> CapturedRound | None:
        batch, (tokens, probs, copies, write_masks) = len(inputs.counts), drafts
        width = 1 + max(tokens.shape[1], *map(len, copies or [[]]))
        if probs is not None and (probs.dtype, probs.device, probs.shape[2]) != (
            torch.float32, self.device, self.vocab,
        ):  # fmt: skip
            return None
        longest = self.cache.max_len - self.cache.room(self._lengths[:batch])
        shape = self._shape(batch, judge.columns or width, longest, exact=judge.columns is not None)
        if shape is None:
            return None
        rows, columns = shape
        extent = captured_extent(self.backend, longest + columns, self.cache.max_len)
        inputs = self.placed(inputs._replace(lengths=self._lengths[:batch]))
        if copies is not None:
            copied = Padded(copies, columns - 1)
            inputs = inputs._replace(num_copied=list(map(len, copies)), copied_drafts=copied)
        probs_buffer = None
        if probs is not None:
            places = columns - 1 if judge.columns is None else probs.shape[1]
            probs_buffer = self.draft_probs(rows, places, self.vocab)
            if probs_buffer is None:
                return None
        # No reference to self, because a captured step outlives the runner.
        model, cache, backend, vocab = self.model, self.cache, self.backend, self.vocab

        def make(static: RoundInputs) -> tuple[Callable[[], Any], dict[str, Tensor]]:
            fed = torch.zeros(rows, columns, dtype=torch.long, device=cache.buffer.device)
            constants, masks = judge.constants(fed.device), None
            static_inputs = {"tokens": fed} | constants
            if write_masks is not None:
                masks = torch.full((rows, columns, -(-vocab // 32)), -1, dtype=torch.int32, device=fed.device)
                static_inputs["masks"] = masks

            def verify_round() -> tuple[ForwardOutput, Judged]:
                fed[:, 0].copy_(static.tokens)
                if static.copied_drafts is not None:
                    _copy_drafts(static.num_copied > 0, static.copied_drafts, fed[:, 1:], probs_buffer)
                tree = judge.tree(constants, rows)
                step = CapturedBatch(fed, static.lengths, extent, return_states, static.prefix, tree=tree)
                output = model.forward_captured(step, cache, backend)
                logits = output.logits = output.logits[..., :vocab]
                texts = None if text is None else text[:rows]
                # Penalties, which come first elsewhere, leave a logit of -inf as it is.
                logits = logits if masks is None else allowed_logits(logits, masks)
                judged = judge.run(logits, fed, static, probs_buffer, texts, constants)
                if advances:
                    judge.advance(static, judged.packed)
                return output, judged if masks is None or judged.logits is not None else Judged(judged[0], logits)

            return verify_round, static_inputs

        given = probs is not None, copies is not None, write_masks is not None
        key = ("judged", *shape, self._kind(), return_states, extent, judge, *given, advances)
        step = self._captured(key, inputs, rows, make, () if probs is None else ("probs",))
        if step is None:
            return None
        fed = step.static_inputs["tokens"]

        def repeat(drafts: GraphDrafts) -> None:
            if drafts.tokens.shape[1]:
                target = fed[:batch, 1 : 1 + drafts.tokens.shape[1]]
                on_device = is_accelerator(drafts.tokens.device)
                target.copy_(drafts.tokens if on_device else to_device(drafts.tokens, target.device))
            if probs_buffer is not None and drafts.probs is not None:
                probs_buffer[:batch, : drafts.probs.shape[1]].copy_(drafts.probs)
            step.replay()

        def repeats(written: int) -> bool:
            return cache.max_len - cache.room(self._lengths[:batch]) + written + columns <= extent

        if write_masks is not None:
            masks = step.static_inputs["masks"]
            bits = self._host_words(masks.numel()).view(masks.shape)
            write_masks(bits.numpy())
            masks.copy_(bits, non_blocking=True)
        repeat(drafts)
        output, judged = step.output
        states = None if output.states is None else output.states[:batch, :width]
        logits = output.logits[:batch, :width]
        changed = logits if judged.logits is None else judged.logits[:batch, :width]
        return CapturedRound(
            ForwardOutput(logits, states), Judged(judged.packed[:batch], changed), repeat, repeats
        )

    def _host_words(self, count: int) -> Tensor:
        """Return int32 [count] on the host, pinned for CUDA, which every round overwrites."""
        # A round ends with a wait for the device, so the copy of the round before is over.
        if self.slot.host_words is None or len(self.slot.host_words) < count:
            self.slot.host_words = torch.empty(count, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        return self.slot.host_words[:count]

    def call(
        self,
        key: tuple[Any, ...],
        inputs: RoundInputs,
        rows: int,
        function: Callable[[RoundInputs], Any],
        keep_alive: Callable[[], Sequence[Tensor]] = tuple,
        shared: Sequence[str] = (),
    ) -> CapturedStep | None:
        """Replay `function` over this runner's cache, captured on first use; None if that is impossible.

        Args:
            key: what the captured function depends on besides the inputs. The runner's own part is added.
            inputs: padded with zeros to `rows`, and given to the function as views of a static buffer.
            rows: the rows of the function.
            function: must not refer to the runner, which it outlives.
            keep_alive: returns tensors that the function reads and that its graph has to keep alive.
            shared: names of the buffers that it uses and that may be replaced by larger ones (`draft_probs`).

        Returns:
            The captured step, whose output the next replay overwrites.
        """
        key = (*key, rows, self._kind())
        step = self._captured(key, inputs, rows, lambda static: (partial(function, static), {}), shared)
        if step is None:
            return None
        # The graph reads the tensors of its capture, also if a later call brings others.
        step.keep_alive = step.keep_alive or tuple(keep_alive())
        step.replay()
        return step

    @property
    def captures(self) -> bool:
        return self.model.capturable

    def captured_rounds(self, batch: int, limit: int) -> list[tuple[int, int]]:
        largest = {self.captured_rows(rows): rows for rows in range(1, batch + 1)}
        last = captured_level(min(limit, LEVELS[-1]))
        # The longest drafts first: a larger buffer of distributions, made later, would drop captures.
        return [(rows, level) for level in reversed(LEVELS) if level <= last for rows in largest.values()]

    def captured_rows(self, batch: int) -> int:
        """Return the number of rows of the captures that serve a batch."""
        return min(_next_power_of_two(batch), self.cache.max_batch)

    def buffer(self, name: str, *sizes: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor that lives as long as this cache and its captures; zeros when it is made."""
        found = self.slot.buffers.get(name)
        if found is None:
            found = self.slot.buffers[name] = torch.zeros(*sizes, dtype=dtype, device=self.device)
        return found

    def draft_probs(self, rows: int, drafts: int, size: int) -> Tensor | None:
        """Return float32 [rows, drafts, size] for the distributions of a round's drafts; None without the memory.

        All captures over this cache share one buffer (`probs_numbers`). A larger one replaces it, and then the
        captures that use the old one are dropped.
        """
        buffers = self.slot.buffers
        needed = probs_numbers(self.cache.max_batch, drafts, size)
        if "probs" not in buffers or buffers["probs"].numel() < needed:
            try:
                buffers["probs"] = torch.zeros(needed, dtype=torch.float32, device=self.device)
            except torch.OutOfMemoryError:
                return None
        return buffers["probs"][: rows * drafts * size].view(rows, drafts, size)

    def placed(self, inputs: RoundInputs) -> RoundInputs:
        """Return the inputs with the rows' places in the cache's prefix, if there is one."""
        cache, batch = self.cache, len(inputs.lengths)
        if cache.prefix is None:
            return inputs
        return inputs._replace(starts=cache.starts[:batch], groups=cache.groups[:batch])

    def device_text(self) -> DeviceText:
        cache = self.cache
        # After the longest text, there is room for a step's padding.
        columns = cache.max_len + (0 if cache.prefix is None else cache.prefix.max_len) + MAX_CAPTURED_WIDTH
        return DeviceText(self.buffer("text", cache.max_batch, columns, dtype=torch.long))

    def _kind(self) -> tuple[Any, ...]:
        return self.backend, getattr(self.model, "plan", None), self.vocab

    def _captured(
        self,
        key: tuple[Any, ...],
        inputs: RoundInputs,
        rows: int,
        make: Callable[[RoundInputs], tuple[Callable[[], Any], dict[str, Tensor]]],
        shared: Sequence[str] = (),
    ) -> CapturedStep | None:
        """Return the captured step of this key with its inputs refilled; None if it can't be captured."""
        if not self.model.capturable or key in self._too_large:
            return None
        packed = inputs.packed(rows, self.device)
        step = self.slot.steps.get(key)
        if step is None or not self._is_current(step):
            with setting_up(self.device):
                # A copy, because the function may change the numbers while it is captured.
                numbers = torch.empty_like(packed, device=self.device)
                numbers.copy_(packed, non_blocking=True)
                function, static_inputs = make(inputs.views(numbers[:, :rows]))
                captured = self._record_in_pool(key, function)
            if captured is None:
                return None
            step = self.slot.steps[key] = CapturedStep(numbers, *captured, static_inputs)
            step.shared = {name: self.slot.buffers[name] for name in shared}
            # A step that replaces an outdated one has the old one's place.
            self.slot.steps.move_to_end(key)
            self._evict()
        step.fill(packed)
        self.slot.steps.move_to_end(key)
        return step

    def _shape(
        self, batch: int, width: int, longest: int, tree: HostTreeMask | None = None, exact: bool = False
    ) -> tuple[int, int] | None:
        """Return the captured (rows, columns), or None to run eagerly; the fullest row has `longest` columns."""
        if width > MAX_CAPTURED_WIDTH or not self.model.capturable:
            return None
        rows = self.captured_rows(batch)
        for columns in (width if exact else 1 + captured_level(width - 1), width):
            if longest + columns <= self.cache.max_len and fits_tree(tree, columns):
                return rows, columns
        return None

    def _replay(self, batch: ForwardBatch, longest: int) -> CapturedStep | None:
        """Replay the captured step for the batch's shape; None if there is none and it can't be captured."""
        tokens, count = batch.tokens, len(batch.tokens)
        shape = self._shape(count, tokens.shape[1], longest, batch.tree)
        if shape is None:
            return None
        rows, columns = shape
        extent = captured_extent(self.backend, longest + columns, self.cache.max_len)
        inputs = self.placed(RoundInputs(lengths=list(batch.lengths)))
        if batch.tree is not None:
            tree = pad_tree(batch.tree, rows, columns)
            sees, depths = Padded(tree.sees, columns), Padded(tree.depths, columns)
            inputs = inputs._replace(sees=sees, depths=depths, before=tree.before)
        # No reference to self, because a captured step outlives the runner.
        model, cache, backend = self.model, self.cache, self.backend
        wanted = batch.return_states, batch.window

        def make(static: RoundInputs) -> tuple[Callable[[], Any], dict[str, Tensor]]:
            fed = torch.zeros(rows, columns, *tokens.shape[2:], dtype=tokens.dtype, device=tokens.device)
            fed[:count, : tokens.shape[1]] = tokens

            def forward() -> ForwardOutput:
                step = CapturedBatch(fed, static.lengths, extent, wanted[0], static.prefix, wanted[1], static.tree)
                return model.forward_captured(step, cache, backend)

            return forward, {"tokens": fed}

        trees = batch.tree is not None
        key = (rows, columns, tokens.dtype, self._kind(), *wanted, extent, trees)
        step = self._captured(key, inputs, rows, make)
        if step is None:
            return None
        step.static_inputs["tokens"][:count, : tokens.shape[1]].copy_(tokens)
        step.replay()
        return step

    def _record_in_pool(
        self, key: tuple[Any, ...], forward: Callable[[], Any]
    ) -> tuple[Any, Callable[[], Any], int] | None:
        """Capture a function; return its output, its replay and the bytes it took, or None if that fails."""
        # If memory runs out, drop all captures of the cache and try once more: unlike other work, a capture can't
        # use the memory that torch keeps cached.
        for _ in range(2):
            before = self.slot.pool.reserved()
            try:
                output, replay = self._record(forward)
                return output, replay, self.slot.pool.reserved() - before
            except torch.OutOfMemoryError:
                pass  # Free memory only after this block, because the error keeps the forward's tensors alive.
            except Exception as error:
                refuse_capture(self.model, error)
                return None
            self.slot.steps.clear()
            # torch can't capture into a pool whose graphs have all been freed.
            self.slot.pool = Pool(self.model.device)
            empty_cache(self.device)
        self._too_large.add(key)
        return None

    def _is_current(self, step: CapturedStep) -> bool:
        """Return whether no buffer that the step shares with others has been replaced since it was captured."""
        return all(self.slot.buffers[name] is buffer for name, buffer in step.shared.items())

    def _evict(self) -> None:
        """Drop steps with outdated buffers, and the least recently used ones beyond MAX_STEPS or STEP_BYTES."""
        # Only after a capture: torch can't capture into a pool whose graphs have all been freed.
        for key in [key for key, step in self.slot.steps.items() if not self._is_current(step)]:
            del self.slot.steps[key]
        while len(self.slot.steps) > MAX_STEPS:
            self.slot.steps.popitem(last=False)
        while len(self.slot.steps) > 1 and sum(step.nbytes for step in self.slot.steps.values()) > STEP_BYTES:
            self.slot.steps.popitem(last=False)


def _copy_drafts(copies: Tensor, copied_drafts: Tensor, drafts: Tensor, probs: Tensor | None) -> None:
    """Overwrite the drafts [R, l], and their distributions [R, l, V], of the rows that copy, bool [R]."""
    drafts.copy_(copied_drafts.where(copies[:, None], drafts))
    if probs is not None:
        at, is_copy = copied_drafts[..., None], copies[:, None, None]
        probs.masked_fill_(is_copy, 0.0)
        probs.scatter_(2, at, probs.gather(2, at).masked_fill(is_copy, 1.0))


def record_calls(forward: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """Stand in for a CUDA graph on a CPU: a replay calls `forward` and copies into the same output."""
    output = forward()

    def replay() -> None:
        for static, fresh in zip(tensors(output), tensors(forward()), strict=True):
            static.copy_(fresh)

    return output, replay


def _take_slot(model: CausalModel, max_batch: int, max_len: int, prefixes: int, prefix_len: int) -> _Slot:
    """Return an idle cache that is large enough but not far too large, or a new one."""
    with _lock:
        idle = _idle.setdefault(model, [])
        # If a slot was returned meanwhile (by garbage collection), it may have pushed another one out of the list.
        candidates = [slot for slot in idle if _is_suitable(slot.cache, max_batch, max_len, prefixes, prefix_len)]
        for slot in candidates:
            if slot in idle:
                idle.remove(slot)
                return slot
    cache = model.new_cache(max_batch, _round_up_columns(max_len), prefixes, prefix_len)
    return _Slot(cache, Pool(model.device))


def _is_suitable(cache: RaggedCache, max_batch: int, max_len: int, prefixes: int, prefix_len: int) -> bool:
    if (cache.prefix is None) != (prefixes == 0):
        return False
    if cache.prefix is not None and not (
        prefixes <= cache.prefix.max_batch <= 2 * prefixes
        and prefix_len <= cache.prefix.max_len <= 2 * prefix_len + 512
    ):
        return False
    least = max_len + MAX_CAPTURED_WIDTH
    return max_batch <= cache.max_batch <= 2 * max_batch and least <= cache.max_len <= 2 * least + 512


def _return_slot(model: CausalModel, slot: _Slot) -> None:
    with _lock:
        idle = _idle.setdefault(model, [])
        idle.append(slot)
        del idle[:-_MAX_IDLE_CACHES]


def probs_numbers(rows: int, drafts: int, size: int) -> int:
    """Return the numbers in the buffer of `draft_probs` for a cache of `rows` rows; drafts in powers of two."""
    return rows * _next_power_of_two(drafts) * size if drafts else 0


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def captured_level(drafts: int) -> int:
    """Return the number of drafts per row to capture for rounds of `drafts` drafts, at most the last of LEVELS."""
    return next(level for level in LEVELS if level >= drafts)
