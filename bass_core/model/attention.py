"""Ragged attention inside transformers' models, and which backend computes it.

Contract: a model whose attention implementation is NAME attends by the plan that is passed with the call
(`model(..., cache=PlannedCache(cache, plan), ragged=plan, ragged_backend="pad")`), never by a mask. A
layer's sliding window and logit soft-cap are applied; anything else that an architecture adds is refused. A layer
on another device than the cache sends its queries, keys and values to the cache's, and gets the result back.
`choose_backend` checks a backend's name, or chooses for "auto"; it runs nothing. `measure_flash` does, once for a
pair.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, Cache
from transformers.masking_utils import AttentionMaskInterface

from kernels.backends import BACKENDS, FASTER, shape_key, why_backend_unavailable
from kernels.plan import AttentionPlan
from kernels.support import has_tensor_cores, is_accelerator, on, on_zero_gpu, runtime

from ..errors import PairError, RequestError
from ..machine.transfer import to_device
from .cache import RaggedCache

NAME = "bass_ragged"
_log = logging.getLogger(__name__)
_UNSUPPORTED = ("s_aux", "sinks", "position_bias", "head_mask", "alibi", "indices_topk")


class PlannedCache(Cache):
    """A transformers cache for one call: its layers write and read `cache` where the plan says."""

    def __init__(self, cache: RaggedCache, plan: AttentionPlan) -> None:
        super().__init__(layers=[])
        self.cache, self.plan = cache, plan

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, Hkv, S, D]; returns what the step may read: [B, Hkv, extent, D] each."""
        key_states, value_states = (one.to(self.cache.buffer.device) for one in (key_states, value_states))
        return self.cache.write(layer_idx, key_states, value_states, self.plan)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The longest row's length before the step: what models without explicit positions would use."""
        return max(self.plan.host, default=0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.cache.max_len

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        """The same under the name that older transformers use."""
        return self.cache.max_len


def ragged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    ragged: AttentionPlan | None = None,
    ragged_backend: str = "pad",
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [B, Hq, S, D], key and value [B, Hkv, extent, D] from RaggedCache.

    Returns ([B, S, Hq, D], None). Raises PairError if the model asks for attention that is not supported.
    """
    asked = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if ragged is None or asked:
        what = f"attention with {', '.join(asked)}" if asked else "an attention call without row lengths"
        raise PairError(f"{type(module).__name__} needs {what}, which is not supported; choose another model.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    backend = BACKENDS[ragged_backend]
    layer: Any = getattr(module, "layer_idx", None)
    prefix = None if ragged.shared is None else ragged.shared.reads(layer)
    here = query.device
    query = query.to(key.device)
    out = backend(query, key, value, ragged, scaling=scale, window=sliding_window, softcap=softcap, prefix=prefix)
    return out.to(here), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """No mask is built: the lengths say what a query may see."""
    return None


AttentionInterface.register(NAME, ragged_attention)
AttentionMaskInterface.register(NAME, _no_mask)


def choose_backend(attention: str, device: torch.device, dtype: torch.dtype | None = None) -> str:
    """The name of the backend for "auto" or a given name; dtype: the model's, if known.

    Raises RequestError for a backend that can't run here or can't take that dtype.
    """
    if attention == "auto":
        return _fastest(device, dtype)
    if not isinstance(attention, str) or attention not in BACKENDS:
        known = ", ".join(sorted(BACKENDS))
        raise RequestError(f"attention must be auto or one of {known}; got {attention!r}.")
    reason = why_backend_unavailable(attention, device, dtype)
    if reason:
        raise RequestError(f'attention="{attention}" can\'t run here: {reason}. Choose attention="auto".')
    return attention


def _fastest(device: torch.device, dtype: torch.dtype | None) -> str:
    """Our kernel, with flash-attn where both are there; flash-attn where Triton is missing; torch's elsewhere.

    A T4 (compute capability 7.5) also uses torch's: its half-precision kernels use the tensor cores there, ours
    would not (read from the code that Triton emits; not measured).
    """
    if not is_accelerator(device):
        return "sdpa"
    flash = dtype is not None and why_backend_unavailable("flash", device, dtype) is None
    if why_backend_unavailable("fused", device) is None and has_tensor_cores(device):
        return "mixed" if flash else "fused"
    return "flash" if flash else "sdpa"


def measure_flash(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    """Where both kernels run, time them over a prompt and a round of these heads, for "mixed".

    What can't be timed, for want of memory or of a kernel for these heads, is left to ours. Nothing is timed with
    BASS_MEASURE=0, nor on ZeroGPU, where there is no device yet. Read, not run: flash-attn needs a GPU.
    """
    off = os.environ.get("BASS_MEASURE") == "0" or on_zero_gpu()
    if off or why_backend_unavailable("mixed", device, dtype) is not None:
        return
    try:
        with on(device):
            faster = _where_flash_is_faster(device, dtype, heads, kv_heads, dim)
    except RuntimeError as error:
        _log.warning("flash-attn is not used, since it can't be timed here: %s", " ".join(str(error).split()))
    else:
        FASTER.update(faster)


def _where_flash_is_faster(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> list[tuple[Any, ...]]:
    found = []
    for rows, queries, length in ((4, 256, 0), (8, 5, 1024)):
        keys = torch.randn(rows, kv_heads, length + queries, dim, device=device, dtype=dtype)
        query = torch.randn(rows, heads, queries, dim, device=device, dtype=dtype)
        lengths = [length] * rows
        plan = AttentionPlan(to_device(lengths, device), lengths, queries)
        ours, other = (
            _time(partial(BACKENDS[name], query, keys, keys, plan, scaling=1.0), device)
            for name in ("fused", "flash")
        )
        if other < ours:
            found.append(shape_key(query, keys))
    return found


def attention_words(backend: str, key: tuple[Any, ...]) -> str:
    """Which kernels attend, for a reader; key: of a round (`shape_key`)."""
    if backend != "mixed":
        return {"fused": "our kernel", "flash": "flash-attn", "sdpa": "torch"}.get(backend, backend)
    served = [name for name, prompt in (("prompts", True), ("rounds", False)) if (*key[:-1], prompt) in FASTER]
    return "our kernel" + (f", flash-attn for {' and '.join(served)} of plain texts" if served else "")


def _time(call: Callable[[], object], device: torch.device) -> float:
    """The median of nine runs in milliseconds, after three that do not count."""
    times = []
    for _ in range(12):
        began = time.perf_counter()
        call()
        runtime(device).synchronize(device)
        times.append(1000 * (time.perf_counter() - began))
    return sorted(times[3:])[4]
