"""Ragged attention inside transformers' models, and which backend computes it.

Contract: a model whose attention implementation is NAME attends by the plan of the `planned` block that it is
called in (`with planned(plan, "pad"): model(..., cache=PlannedCache(cache, plan))`), never by a mask. In the place
of a mask its layers get what it would say beside the order of the tokens: a sliding window, or chunks. These, a
logit soft-cap and attention sinks are applied; any other mask, and anything else that an architecture adds, is
refused. Keys and values may differ in size, and from those that the cache holds. A layer on another device than
the cache sends its queries, keys and values to the cache's, and gets the result back. A model whose implementation
is MASKED attends by its own code, and gets real masks, which say what the plan says. `choose_backend` checks a
backend's name, or chooses for "auto"; it runs nothing. `measure_flash` does, once for a pair.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, Cache, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from kernels.backends import BACKENDS, FASTER, shape_key, why_backend_unavailable
from kernels.plan import AttentionPlan, Chunks, Window
from kernels.reference.prefix import attend_in_parts
from kernels.support import has_tensor_cores, is_accelerator, on, on_zero_gpu, runtime

from ..errors import PairError, RequestError
from ..machine.transfer import to_device
from .cache import RaggedCache

NAME, MASKED = "bass_ragged", "bass_masked"
_log = logging.getLogger(__name__)
_UNSUPPORTED = ("sinks", "position_bias", "head_mask", "alibi", "indices_topk")
# The plan and the backend of the call that runs in this thread. Some models hand no keywords on to their layers.
_planned: ContextVar[tuple[AttentionPlan, str] | None] = ContextVar("planned", default=None)


def unsupported(name: str, reason: str) -> PairError:
    """The refusal of a model, by its name."""
    return PairError(f"{name} is not supported: {reason}. Choose another causal LM.")


@contextmanager
def planned(plan: AttentionPlan, backend: str) -> Iterator[None]:
    """In this block, this thread's models attend by the plan."""
    token = _planned.set((plan, backend))
    try:
        yield
    finally:
        _planned.reset(token)


def _now() -> tuple[AttentionPlan, str]:
    call = _planned.get()
    assert call is not None, "a model that attends by a plan was called outside `planned`"
    return call


@dataclass
class Seen:
    """What the layers of a step saw: `windows` by layer; `expanded`: whether a layer attended over other keys than
    those that the cache holds, as over such that it makes of a latent; `calls` of our attention."""

    windows: dict[int | None, Window | None] = field(default_factory=dict)
    expanded: bool = False
    calls: int = 0


def seen(plan: AttentionPlan) -> Seen:
    """What the layers saw that have attended by the plan."""
    return plan.once("seen by layers", Seen)


class PlannedCache(Cache):
    """A transformers cache for one call: its layers write and read `cache` where the plan says."""

    def __init__(self, cache: RaggedCache, plan: AttentionPlan) -> None:
        super().__init__(layers=[])
        self.cache, self.plan = cache, plan

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys [B, Hkv, S, D] and values [B, Hkv', S, D']; returns what the step may read, extent columns.

        The cache has room for the largest of all layers; what a smaller one leaves of it holds zeros.
        """
        device = self.cache.buffer.device
        fitted = [self._fitted(one.to(device)) for one in (key_states, value_states)]
        keys, values = self.cache.write(layer_idx, fitted[0], fitted[1], self.plan)
        return _cut(keys, key_states), _cut(values, value_states)

    def _fitted(self, states: Tensor) -> Tensor:
        """States [B, Hkv, S, D] as large as the cache's."""
        heads, size = self.cache.kv_heads - states.shape[1], self.cache.head_dim - states.shape[3]
        if heads < 0 or size < 0:
            raise PairError(
                f"The model's keys and values are larger than its config says ({states.shape[1]} heads of "
                f"{states.shape[3]} in place of {self.cache.kv_heads} of {self.cache.head_dim}), and it could not "
                "be tried when it was loaded. Choose another causal LM, or load it whole on one device."
            )
        return F.pad(states, (0, size, 0, 0, 0, heads)) if heads or size else states

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


def _cut(stored: Tensor, states: Tensor) -> Tensor:
    """Of what the cache stores [B, Hkv, N, D], the heads and sizes that a layer's states [B, Hkv', S, D'] have."""
    heads, size = states.shape[1], states.shape[3]
    return stored if stored.shape[1] == heads and stored.shape[3] == size else stored[:, :heads, :, :size]


def ragged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Window | Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [B, Hq, S, D], key [B, Hkv, extent, D], value [B, Hkv, extent, D'].

    attention_mask: what `_stated` returned. s_aux: the attention sinks, a score for each head. Returns
    ([B, S, Hq, D'], None). Raises PairError if the model asks for attention that is not supported.
    """
    asked = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    stated = None
    if isinstance(attention_mask, Tensor):
        asked.append("a mask of its own")
    else:
        stated = attention_mask
    if asked:
        raise unsupported(type(module).__name__, f"it needs attention with {', '.join(asked)}")
    plan, backend = _now()
    window = sliding_window if stated is None else stated
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer, prefix = _layer(key, plan), None
    noted = seen(plan)
    noted.windows[getattr(module, "layer_idx", None)] = window
    noted.calls += 1
    if layer is None:
        noted.expanded = True
    elif plan.shared is not None:
        keys, values = plan.shared.reads(layer)
        prefix = _cut(keys, key), _cut(values, value)
    here, size = query.device, value.shape[-1]
    options: dict[str, Any] = {"scaling": scale, "window": window, "softcap": softcap}
    query = query.to(key.device)
    if size != key.shape[-1]:
        most = max(size, key.shape[-1])
        query, key, value = (_widened(one, most) for one in (query, key, value))
        prefix = prefix and (_widened(prefix[0], most), _widened(prefix[1], most))
    if s_aux is not None:
        out = attend_in_parts(query, key, value, plan, prefix, aside=s_aux.to(key.device), **options)
    else:
        # The kernels of GPUs know sliding windows alone.
        name = "sdpa" if isinstance(window, Chunks) and backend in ("fused", "flash", "mixed") else backend
        out = BACKENDS[name](query, key, value, plan, prefix=prefix, **options)
    return out[..., :size].to(here).contiguous(), None


def _layer(key: Tensor, plan: AttentionPlan) -> int | None:
    """The layer whose keys these are, be they read by another; None if they are made of what the cache holds."""
    keys = plan.views[::2]
    layers = plan.once("layers", lambda: {view.data_ptr(): layer for layer, view in enumerate(keys)})
    return layers.get(key.data_ptr())


def _widened(states: Tensor, size: int) -> Tensor:
    """States [..., D] with zeros up to `size`."""
    return F.pad(states, (0, size - states.shape[-1]))


def _stated(
    *args: Any, config: Any = None, local_size: int | None = None, use_vmap: bool = False, **kwargs: Any
) -> Window | None:
    """transformers' mask interface: what a mask says beside the order of the tokens, which the lengths say.

    Raises PairError for a mask that is neither causal nor causal in a sliding window or in chunks.
    """
    if use_vmap or "allow_is_bidirectional_skip" in kwargs:
        kind = getattr(config, "model_type", "its type")
        raise unsupported(kind, "it needs masks that are not causal, or not for each text alike")
    if local_size is None:
        return None
    return Chunks(local_size) if local_size == getattr(config, "attention_chunk_size", None) else local_size


def _gpt_neo(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None
) -> tuple[Tensor, None]:
    """In the place of GPT-Neo's own attention, whose windows count from the longest row: [B, Hq, S, D]."""
    window = module.config.window_size if module.attention_type == "local" else None
    out, _ = ragged_attention(module, query, key, value, None, 1.0, window)
    return out.transpose(1, 2), None


def _mask(*args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Tensor:
    """transformers' mask interface for models that attend by their own code: [B, 1, S, extent], 0 or the least."""
    plan, _ = _now()
    window, least = _stated(*args, **kwargs), torch.finfo(dtype).min
    hidden = plan.mask(window)[:, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, least)


AttentionInterface.register(NAME, ragged_attention)
AttentionMaskInterface.register(NAME, _stated)
AttentionMaskInterface.register(MASKED, _mask)


def switch(model: PreTrainedModel, name: str) -> None:
    """Let a copy of a model attend by the implementation NAME or MASKED, whether or not its class allows it."""
    for module in model.modules():
        if name == NAME and type(module).__name__ == "GPTNeoSelfAttention":
            vars(module)["_attn"] = partial(_gpt_neo, module)
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            for one in (config, *(getattr(config, sub, None) for sub in config.sub_configs)):
                if isinstance(one, PreTrainedConfig):
                    one._attn_implementation_internal = name


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
