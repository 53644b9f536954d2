"""The CPU forward of a 16-bit Llama-shaped model, in one call of our own kernels (kernels/cpu).

weights/shape.py describes such a model.

It replaces CausalModel's `forward` for the models that `why_not` accepts. The residual stream is float32. If the
CPU has native bfloat16 products, attention uses them. Products with weights use them only if they are faster than
float32 products. With int8 and int4 weights, the products' inputs are rounded to bytes (kernels/cpu/kinds.py).
There is only one attention, so `backend` is ignored.

A token's logits and states have the same bits whatever other rows, tokens, prompts and threads there are. Sliding
windows and weights of more than 16 bits are not supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kernels.cpu.attention.layout import TILE, padded, tiles_of
from kernels.cpu.attention.tree import Tree
from kernels.plan import window_start

from ..machine import cpu_kernels
from ..sample.rows import RaggedRows
from .base import CausalModel, shadow_of
from .cache import RaggedCache
from .forward import ForwardBatch, ForwardOutput
from .tiled import TiledCache
from .weights.quantized import look_up, weight_of
from .weights.shape import SIXTEEN_BIT, describe, head_dim

if TYPE_CHECKING:
    from kernels.cpu.chain import Chain, Drafted  # imports numba

# torch splits operations on at least this many numbers among its threads (at::internal::GRAIN_SIZE).
_TORCH_GRAIN = 32_768


def why_not(model: PreTrainedModel) -> str | None:
    """Return why this forward can't run the model, as a clause, or None if it can."""
    if isinstance(architecture := describe(model), str):
        return architecture
    if model.dtype not in SIXTEEN_BIT:
        return "our kernels take 16 bits and fewer"
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    # All layers need the same dtype, because we join matrices that read the same inputs.
    plain = all(type(layer.weight.data) is Tensor and layer.weight.dtype == model.dtype for layer in linears)
    if not plain or head_dim(model.config) % 2:
        return "our kernels don't know this form of weights"
    return cpu_kernels.why_unavailable()


class LlamaCompiled(CausalModel):
    """A Llama-shaped model on a CPU, with weights that are packed once."""

    skips_padding = True
    never_waits = True
    copies_weights = True
    # Feeding a prefix separately costs an additional step, which takes as long as about ten tokens. For example,
    # if four prompts share a chat template of 24 tokens, the prefill takes 0.82 of the time without sharing, in
    # bfloat16 and in int8.
    min_shared_tokens = 16

    def _prepare(self, model: PreTrainedModel) -> None:
        from .weights.compiled import pack_llama  # imports numba

        body: Any = model.model
        self.low_precision, self._dtype = False, model.dtype
        self.embedding = weight_of(model.get_input_embeddings())
        architecture = describe(model)
        assert not isinstance(architecture, str)
        self.packed, self._factor = pack_llama(model, architecture), architecture.embedding_factor
        self.cache_dtype = torch.bfloat16 if self.packed.dot else torch.float32
        self._rotary: Any = shadow_of(body.rotary_emb)
        self._rotated = 2 * len(body.rotary_emb.inv_freq)
        self._rope_table = self._make_rope_table(min(1024, self.context))
        # Compile the forward and the moving of columns, or load their code from disk, before any clock runs.
        cache = self.new_cache(1, 1)
        self.forward(ForwardBatch(torch.zeros(1, 1, dtype=torch.int64), [0]), cache)
        cache.keep(0, 0, [0])

    def new_cache(self, max_batch: int, max_len: int, prefixes: int = 0, prefix_len: int = 0) -> TiledCache:
        prefix = self.new_cache(prefixes, prefix_len) if prefixes else None
        sizes = (self.layers, max_batch, max_len, self.kv_heads, self.head_dim)
        return TiledCache(*sizes, self.cache_dtype, self.device, prefix)

    def cache_bytes(self, max_batch: int, max_len: int, prefixes: int = 0, prefix_len: int = 0) -> int:
        tiles = max_batch * tiles_of(max_len) + prefixes * tiles_of(prefix_len)
        per_tile: int = TILE * padded(self.head_dim) * self.cache_dtype.itemsize
        heads: int = self.layers * self.kv_heads
        return 2 * heads * tiles * per_tile

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: RaggedCache, backend: str = "sdpa") -> ForwardOutput:
        rows, width = batch.tokens.shape[:2]
        cache.check_room(batch.lengths, width)
        counts = [width] * rows if batch.counts is None else [min(count, width) for count in batch.counts]
        firsts = np.cumsum([0, *counts])
        ids, real = batch.tokens.flatten(0, 1), None
        if sum(counts) < rows * width:
            real = torch.from_numpy(np.flatnonzero(np.arange(width) < np.array(counts)[:, None]))
            ids = ids.index_select(0, real)
        x = self._embedded(ids)
        logit_rows = np.arange(len(x))
        if batch.wanted_columns is not None:
            logit_rows = firsts[:-1] + np.array(batch.wanted_columns, np.int64)
        logits, last, streams = self.packed.run(
            x,
            firsts,
            batch.lengths,
            logit_rows,
            cache,
            self._rope_until(max(batch.lengths) + width),
            _window_starts(batch),
            self.readout.layers if batch.return_states else (),
            keep=batch.eager,
            tree=None if batch.tree is None else _tree(batch, counts),
        )
        states: Tensor | RaggedRows | None = None
        if batch.return_states:
            flat_states = _concatenate([*streams, last]) if batch.raw_states else self.readout(streams, last)
            states = _by_rows(flat_states, real, firsts, width)
        by_row = batch.wanted_columns is not None
        return ForwardOutput(logits if by_row else _by_rows(logits, real, firsts, width), states)

    def can_draft(self, fuse: Any) -> bool:
        return hasattr(fuse, "packed") and self.packed.can_draft(fuse.packed)

    @torch.inference_mode()
    def draft(
        self, x: Tensor, lengths: Sequence[int], counts: list[int], cache: RaggedCache, chain: Chain
    ) -> tuple[Tensor, Drafted]:
        width, levels = max(counts), chain.levels
        cache.check_room(lengths, width)
        ends = [length + count for length, count in zip(lengths, counts, strict=True)]
        cache.check_room(ends, levels - 1)
        firsts, rope_table = np.cumsum([0, *counts]), self._rope_until(max(ends) + max(width, levels))
        return self.packed.draft(x, firsts, lengths, cache, rope_table, chain)

    def _embedded(self, ids: Tensor) -> Tensor:
        """Return new float32 embeddings [N, hidden] of ids [N] or of embeddings of any float dtype.

        They are multiplied by the model's factor. It works in parts of fewer than _TORCH_GRAIN numbers. For larger
        parts, torch would wake its threads. They would then spin for 2 ms on the cores that our own threads need.
        """
        x = torch.empty(len(ids), self.hidden)
        rows_per_part = max(1, (_TORCH_GRAIN - 1) // self.hidden)
        for start in range(0, len(ids), rows_per_part):
            part = ids[start : start + rows_per_part]
            if not part.is_floating_point():
                part = look_up(part, self.embedding).to(self._dtype)
            x[start : start + rows_per_part] = part if self._factor == 1 else part.float() * self._factor
        return x

    def _rope_until(self, positions: int) -> Any:
        """Return cosines, then sines, for at least `positions` positions: float32 [positions x rotated], flat."""
        rope_table = self._rope_table
        if positions * self._rotated > len(rope_table):
            # Padding may be past the context. Return this local table, because another thread may replace the
            # attribute by a smaller one.
            self._rope_table = rope_table = self._make_rope_table(max(positions, min(2 * positions, self.context)))
        return rope_table

    def _make_rope_table(self, size: int) -> Any:
        # longrope changes all angles once a position exceeds the context, and padding may exceed it.
        positions = torch.arange(size).clamp(max=self.context - 1)
        cos, sin = self._rotary(torch.zeros(1, dtype=torch.float32), positions[None])
        half = self._rotated // 2
        return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=1).float().flatten().numpy()


def _window_starts(batch: ForwardBatch) -> Any:
    """Return int64 [B], where each row's window begins (kernels/plan.py); None without a window."""
    if batch.window is None:
        return None
    return np.array([window_start(length, batch.window) for length in batch.lengths], np.int64)


def _tree(batch: ForwardBatch, counts: list[int]) -> Tree:
    tree = batch.tree
    assert tree is not None and batch.window is None
    real = np.arange(batch.tokens.shape[1]) < np.array(counts)[:, None]
    bases = np.array(batch.lengths, np.int64) - np.array(tree.before, np.int64)
    return Tree(bases, np.array(tree.sees, np.int64)[real], np.array(tree.depths, np.int64)[real])


def _concatenate(parts: list[Tensor]) -> Tensor:
    """Concatenate along the last dimension on this thread: torch's threads would wait for each other."""
    return torch.from_numpy(np.concatenate([part.numpy() for part in parts], axis=-1))


def _by_rows(x: Tensor, real: Tensor | None, firsts: Any, width: int) -> Tensor | RaggedRows:
    """Return numbers of the real tokens, x [N, ...], as [B, S, ...] or as RaggedRows."""
    if real is None:
        return x.view(len(firsts) - 1, width, *x.shape[1:])
    return RaggedRows(x, firsts.tolist(), width, real)
