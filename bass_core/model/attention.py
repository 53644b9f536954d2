"""Ragged attention inside transformers' models, and the choice of its backend.

A model whose attention implementation is NAME attends by the plan of the enclosing `planned` block: `with
planned(plan, "pad"): model(..., cache=PlannedCache(cache, plan))`. Instead of mask tensors, its layers get a
description of the mask: a sliding window, chunks, or None for plain causal attention. These masks are supported,
and so are logit soft-caps and attention sinks. Other masks and other additions of an architecture are refused.

A model whose implementation is MASKED runs its own attention code and gets real masks, made from the plan.

Keys and values may differ in size from each other and from the cache. If a layer is on another device than the
cache, its queries, keys and values are sent to the cache's device and the result is sent back.

`choose_backend` picks a backend without running anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, Cache, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from kernels.backends import BACKENDS, why_backend_unavailable
from kernels.plan import AttentionPlan, Chunks, Window
from kernels.reference.prefix import attend_in_parts
from kernels.support import has_tensor_cores, is_accelerator

from ..errors import PairError, RequestError
from .cache import RaggedCache
from .states import RecurrentStates
from .weights.own_code import attention_code

NAME, MASKED = "bass_ragged", "bass_masked"
_NO_PLACES: dict[int, int] = {}
_UNSUPPORTED = ("sinks", "position_bias", "head_mask", "alibi", "indices_topk")


def unsupported(name: str, reason: str, instead: str = "Choose another causal LM.") -> PairError:
    """Make the error that refuses a model; `instead` says what to do."""
    return PairError(f"{name} is not supported: {reason}. {instead}")


def refuse_replaced(model: torch.nn.Module) -> None:
    """Raise PairError if the functions that our attention stands in for are not transformers' own."""
    if replaced := attention_code(model).replaced:
        reason = (
            f"{replaced} is not transformers' own, and BASS would run its own attention, masks and cache instead"
        )
        instead = 'Put the original back, or load the model with attn_implementation="sdpa".'
        raise unsupported(type(model).__name__, reason, instead)


@dataclass
class Seen:
    """A record of the attention that the layers asked for in one step.

    Attributes:
        windows: the window of each layer, by layer index.
        expanded: whether a layer attended over other keys than the cached ones, e.g. keys computed from a cached
            latent.
        calls: number of calls of our attention.
    """

    windows: dict[int | None, Window | None] = field(default_factory=dict)
    expanded: bool = False
    calls: int = 0


def seen(plan: AttentionPlan) -> Seen:
    """Return the record of the layers that have attended by this plan."""
    return plan.once("seen by layers", Seen)


class _Call(NamedTuple):
    """A call of a model in a `planned` block. `layers`: the layer that stored the keys at each address."""

    plan: AttentionPlan
    backend: str
    seen: Seen
    layers: dict[int, int]


# The current call in this thread; some models don't pass keywords on to their layers.
_planned: ContextVar[_Call] = ContextVar("planned")


@contextmanager
def planned(plan: AttentionPlan, backend: str) -> Iterator[None]:
    """Let the models that this thread runs in the block attend by the plan."""
    layers = {view.data_ptr(): layer for layer, view in enumerate(plan.views[::2])}
    token = _planned.set(_Call(plan, backend, seen(plan), layers))
    try:
        yield
    finally:
        _planned.reset(token)


class PlannedCache(Cache):
    """A transformers cache for one call, whose layers write and read `cache` according to the plan.

    `places` gives the place in `cache` of each layer with keys, or is empty if all layers have some. Layers that
    keep states never see one here, so they compute as at the beginning of a text; states.py adds the states.
    """

    def __init__(self, cache: RaggedCache, plan: AttentionPlan, places: Mapping[int, int] = _NO_PLACES) -> None:
        super().__init__(layers=[])
        self.cache, self.plan, self.places = cache, plan, places

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys [B, Hkv, S, D] and values [B, Hkv', S, D'], and return those that the step may read.

        The cache is as large as the largest layer needs. A layer with fewer or smaller heads leaves the rest of
        the cache zero.

        Returns:
            Keys [B, Hkv, extent, D] and values [B, Hkv', extent, D'].
        """
        device, size = self.cache.buffer.device, (self.cache.kv_heads, self.cache.head_dim)
        layer_idx = self.places.get(layer_idx, layer_idx)
        if key_states.shape[1::2] == value_states.shape[1::2] == size:
            return self.cache.write(layer_idx, key_states.to(device), value_states.to(device), self.plan)
        fitted = [self._pad_to_cache(states.to(device)) for states in (key_states, value_states)]
        keys, values = self.cache.write(layer_idx, fitted[0], fitted[1], self.plan)
        return _cut(keys, key_states), _cut(values, value_states)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None, so that the layer passes all its inputs to `update_conv_state`."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None: the layer's recurrence reads its state itself (states.stand_in)."""
        self._states.enter(layer_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 0, **kwargs: Any
    ) -> Tensor:
        """Return a convolution's inputs [B, C, S] with the ones before them."""
        self._states.enter(layer_idx)
        return self._states.convolve(conv_states, layer_idx, state_idx, conv_kernel_size)

    def update_recurrent_state(self, recurrent_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the states, which the layer's recurrence has written itself."""
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return True, so that one token is fed to a convolution in the same way as several."""
        return True

    @property
    def _states(self) -> RecurrentStates:
        if self.cache.states is None:
            raise PairError(
                "The model keeps states that were not found when it was loaded. Choose another causal LM."
            )
        return self.cache.states

    def _pad_to_cache(self, states: Tensor) -> Tensor:
        """Pad states [B, Hkv, S, D] with zeros to the heads and the size of the cache."""
        heads, size = self.cache.kv_heads - states.shape[1], self.cache.head_dim - states.shape[3]
        if heads < 0 or size < 0:
            raise PairError(
                f"The model's keys and values are larger than its config says ({states.shape[1]} heads of "
                f"{states.shape[3]} in place of {self.cache.kv_heads} of {self.cache.head_dim}), and it could not "
                "be tested when it was loaded. Choose another causal LM, or load it whole on one device."
            )
        return F.pad(states, (0, size, 0, 0, 0, heads)) if heads or size else states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the longest row's length before the step, for models that don't take explicit positions."""
        return max(self.plan.host, default=0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return max(self.plan.host, default=0) + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.cache.max_len

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        """Return the maximum number of columns of a row; older versions of transformers call this."""
        return self.cache.max_len


def _cut(stored: Tensor, states: Tensor) -> Tensor:
    """Cut stored [B, Hkv, N, D] to the heads and the size of a layer's states [B, Hkv', S, D']."""
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
    """Implement transformers' attention interface.

    Args:
        query: [B, Hq, S, D].
        key: [B, Hkv, extent, D].
        value: [B, Hkv, extent, D'].
        attention_mask: the result of `_mask_window`.
        scaling: factor of the scores; None for 1 / sqrt(D).
        sliding_window: the window, unless `attention_mask` has one.
        s_aux: attention sinks, one score per head, or None.
        **kwargs: ignored, unless they ask for something that is not supported.

    Returns:
        ([B, S, Hq, D'], None).

    Raises:
        PairError: if the model asks for attention that is not supported.
    """
    features = [] if kwargs.keys().isdisjoint(_UNSUPPORTED) else _unsupported_in(kwargs)
    if features or isinstance(attention_mask, Tensor):
        features += ["a mask of its own"] if isinstance(attention_mask, Tensor) else []
        raise unsupported(type(module).__name__, f"it needs attention with {', '.join(features)}")
    plan, backend, record, layers = _planned.get()
    window = sliding_window if attention_mask is None else attention_mask
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # A layer may read the keys of another layer. None: they were computed from cached values.
    layer, prefix = layers.get(key.data_ptr()), None
    record.windows[getattr(module, "layer_idx", None)] = window
    record.calls += 1
    if layer is None:
        record.expanded = True
    elif plan.shared is not None:
        keys, values = plan.shared.reads(layer)
        prefix = _cut(keys, key), _cut(values, value)
    device, size = query.device, value.shape[-1]
    options: dict[str, Any] = {"scaling": scale, "window": window, "softcap": softcap}
    query = query.to(key.device)
    if size != key.shape[-1]:
        wider = max(size, key.shape[-1])
        query, key, value = (_pad_last(part, wider) for part in (query, key, value))
        prefix = prefix and (_pad_last(prefix[0], wider), _pad_last(prefix[1], wider))
    if s_aux is not None:
        out = attend_in_parts(query, key, value, plan, prefix, sinks=s_aux.to(key.device), **options)
    else:
        # GPU kernels support sliding windows but not chunks.
        name = "sdpa" if isinstance(window, Chunks) and backend in ("fused", "flash", "mixed") else backend
        out = BACKENDS[name](query, key, value, plan, prefix=prefix, **options)
    return out[..., :size].to(device).contiguous(), None


def _unsupported_in(options: dict[str, Any]) -> list[str]:
    return [name for name in _UNSUPPORTED if options.get(name) is not None]


def _pad_last(states: Tensor, size: int) -> Tensor:
    """Pad states [..., D] with zeros to `size`."""
    return F.pad(states, (0, size - states.shape[-1]))


def _mask_window(
    *args: Any, config: Any = None, local_size: int | None = None, use_vmap: bool = False, **kwargs: Any
) -> Window | None:
    """Implement transformers' mask interface: return the window or chunks, or None for plain causal attention.

    Raises:
        PairError: if the mask is neither plain causal nor causal within a sliding window or chunks.
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
    """Replace GPT-Neo's own attention [B, Hq, S, D], whose windows count from the end of the longest row."""
    window = module.config.window_size if module.attention_type == "local" else None
    out, _ = ragged_attention(module, query, key, value, None, 1.0, window)
    return out.transpose(1, 2), None


def _mask(*args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Tensor:
    """Implement transformers' mask interface for MASKED models: [B, 1, S, extent], 0 or the dtype's minimum."""
    plan = _planned.get().plan
    window, minimum = _mask_window(*args, **kwargs), torch.finfo(dtype).min
    hidden = plan.mask(window)[:, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, minimum)


AttentionInterface.register(NAME, ragged_attention)
AttentionMaskInterface.register(NAME, _mask_window)
AttentionMaskInterface.register(MASKED, _mask)


def switch(model: PreTrainedModel, name: str) -> None:
    """Make a copy of a model use the implementation NAME or MASKED, whether or not its class allows it."""
    for module in model.modules():
        if name == NAME and type(module).__name__ == "GPTNeoSelfAttention":
            vars(module)["_attn"] = partial(_gpt_neo, module)
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            for sub_config in (config, *(getattr(config, sub, None) for sub in config.sub_configs)):
                if isinstance(sub_config, PreTrainedConfig):
                    sub_config._attn_implementation_internal = name


def choose_backend(attention: str, device: torch.device, dtype: torch.dtype | None = None) -> str:
    """Return the name of the attention backend to use.

    Args:
        attention: a backend's name, or "auto".

    Raises:
        RequestError: if the backend can't run on this device or with this dtype.
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
    """Choose our kernel and flash-attn together if both can run, else the one that can run, else torch.

    A T4 (compute capability 7.5) also uses torch. There, torch's half-precision kernels use the tensor cores, and
    ours would not (according to the code that Triton emits; not measured).
    """
    if not is_accelerator(device):
        return "sdpa"
    flash = dtype is not None and why_backend_unavailable("flash", device, dtype) is None
    if why_backend_unavailable("fused", device) is None and has_tensor_cores(device):
        return "mixed" if flash else "fused"
    return "flash" if flash else "sdpa"
