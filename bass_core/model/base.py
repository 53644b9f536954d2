"""Run the forward of any transformers causal LM over rows of different lengths.

`CausalModel.forward` feeds S tokens per row, each row at its own length (forward.py). `select.select_model` makes
the fastest CausalModel for a model. A CausalModel keeps no state between calls, so several lanes may share it,
each with its own cache. We never change the user's model: we run a shadow, which is a copy of its modules that
shares its weights. If our attention computes other logits than the model's own code, we refuse the model when it
is loaded (probe.py). Encoder-decoder models are not supported. Layers that keep states: states.py.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kernels.plan import AttentionPlan
from kernels.support import is_accelerator, on, on_zero_gpu

from ..machine import cpu_kernels
from ..machine.transfer import to_device
from . import attention, probe, states
from .cache import RaggedCache
from .forward import CapturedBatch, ForwardBatch, ForwardOutput, token_tree
from .states import RecurrentStates
from .weights.cost import ModelCost, model_cost
from .weights.modified import attributes_of, hooks_of
from .weights.placement import has_offloaded, home_device, is_split, offloaded_weights
from .weights.quantized import QuantizedModule, outputs_of
from .weights.shape import config_value, context_of, describe, head_dim, rope_depends_on_length

if TYPE_CHECKING:
    from kernels.cpu.chain import Chain, Drafted  # imports numba

# Architectures that run with their own attention code. We have read the code of these: it hides tokens only
# through the mask that it requests, and takes positions from `position_ids` or from the cache columns.
_MASKED = {"bloom", "falcon", "mpt"}
# Those of _MASKED whose ALiBi uses a token's cache column as its position. In a tree, a draft's column is not its
# position.
_BY_COLUMN = {"bloom", "mpt"}
# A shadow copies attributes of these packages' classes, because they may refer to modules, and shares all others.
_COPIED = {"torch", "transformers", "accelerate", "peft", "builtins", "types", "functools"}
_CONTAINERS = (list, tuple, dict, set)
_REFERENCES = (nn.Module, RemovableHandle, MethodType, partial)
# The modules that torch.ao.quantization.quantize_dynamic puts in place of linear layers.
_QUANTISED_TOGETHER = "torch.ao.nn.quantized.dynamic."
_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
# The types of layers that keep states, and of those that keep nothing.
_STATE_TYPES = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "moe", "mlp"}


@dataclass(frozen=True)
class HiddenStateTap:
    """Turn a forward's hidden states into one state per token.

    The state is the last hidden state, optionally preceded by those of earlier layers.

    Attributes:
        layers: ascending; after how many layers to read the residual stream. Each stream is divided by its root
            mean square. For example, (0, 8) reads the embeddings and the output of the eighth layer.
        project: maps the concatenation [..., (len(layers) + 1) x hidden], last hidden state last, to the state;
            None returns the concatenation itself.
    """

    layers: tuple[int, ...] = ()
    project: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        if list(self.layers) != sorted({layer for layer in self.layers if layer >= 0}):
            raise ValueError(f"layers must be ascending and none below 0, got {self.layers}.")

    def __call__(self, streams: list[Tensor], last: Tensor) -> Tensor:
        """Return the states, given a stream [..., hidden] for each of `layers` and `last` [..., hidden]."""
        scaled = [F.rms_norm(x.float(), x.shape[-1:], eps=1e-6).to(last.dtype) for x in streams]
        states = torch.cat((*scaled, last), dim=-1) if scaled else last
        return states if self.project is None else self.project(states)

    def finish(self, raw: Tensor) -> Tensor:
        """Return the states, given raw [..., (len(layers) + 1) x hidden]: the streams, then the last state."""
        *streams, last = raw.chunk(len(self.layers) + 1, dim=-1)
        return self(streams, last)


class CausalModel:
    """A transformers causal LM that runs its own code with our ragged attention.

    Attributes:
        capturable: whether to try CUDA graphs. False if the forward is known to read values on the host, if the
            model is split over devices (weights/placement.py), and after a capture has failed.
        low_precision: whether sums are rounded to 16 bits between matrix products. Near ties in a row's logits may
            then depend on the number of tokens in the batch.
    """

    cost: ModelCost
    # Why this runs transformers' own model rather than one of our forwards, as a clause; None if there is nothing
    # to report.
    reason: str | None = None
    # Whether weights were copied: later changes to the model's own weights then have no effect here.
    copies_weights = False

    # Whether matrix products skip the padding of shorter rows.
    skips_padding = False
    # Prompts share a prefix only if that saves at least this many tokens, counted as in `share_prompts`
    # (prefix.py); None if prefixes can't be shared. The value is high because torch needs more calls for attention
    # in two parts.
    min_shared_tokens: int | None = 2048
    # Whether the forward is known never to wait for the device. Transformers' own code is tested for this instead
    # (capturable.py).
    never_waits = False
    # Whether the forward can attend over trees of drafts. For trees, it has to take positions from `position_ids`.
    trees = True
    # If the model was not probed, the layers to check in the first forward (probe.refuse_forgetting).
    _slides: tuple[int, ...] = ()
    # For models that keep states: bytes of a row's states, and the place in our cache of each layer with keys.
    _state_bytes = 0
    _places: Mapping[int, int] = {}

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        self.readout = HiddenStateTap()
        self.name = type(model).__name__
        refuse_unsupported(model)
        self.device = home_device(model)
        self._split = is_split(model)
        # Offloaded weights are fetched for one forward and released after it, so a concurrent forward would lose
        # them.
        self._exclusive: AbstractContextManager[Any] = threading.Lock() if has_offloaded(model) else nullcontext()
        self.has_states = states.can_take_back(model)
        self.capturable = not (self._split or self.has_states or rope_depends_on_length(config))
        self.layers: int = config.num_hidden_layers
        self.context = context_of(config)
        self.vocab = outputs_of(model)
        self.hidden: int = config.hidden_size
        self.kv_heads = (
            config_value(config, "num_key_value_heads") or config_value(config, "num_attention_heads") or 0
        )
        self.head_dim = head_dim(config)
        # On a CPU, reading float32 keys is faster than converting bfloat16 ones.
        self.cache_dtype = model.dtype if is_accelerator(self.device) else torch.float32
        self.low_precision = model.dtype != torch.float32
        self._cache_keyword = cache_keyword(model)
        self._prepare(model)
        # Average over 16 tokens, because some caches grow by that many at once.
        self.cost = model_cost(model, (self.cache_bytes(1, 16) - self.cache_bytes(1, 0)) // 16)

    def _prepare(self, model: PreTrainedModel) -> None:
        self._shadow, self._dtype = shadow_of(model), model.dtype
        # Don't probe on ZeroGPU, where there is no device yet, or if weights are offloaded, which are slow to
        # fetch.
        config = model.config.get_text_config()
        is_known, skip_probe = not isinstance(describe(model), str), has_offloaded(model) or on_zero_gpu()
        expected = None if skip_probe else probe.expect(self._shadow, self.name, self.context)
        # Not for split models: accelerate fetches weights only for the modules that it knows.
        if not is_accelerator(self.device) and not self._split and cpu_kernels.available():
            from .weights.compiled import compile_linears  # imports numba

            self.copies_weights = compile_linears(self._shadow)
        masked = config.model_type in _MASKED
        self.trees = config.model_type not in _BY_COLUMN
        # Only a probe can show whether we handle Falcon's ALiBi.
        can_switch = model._supports_attention_backend or (masked and not config_value(config, "alibi"))
        if skip_probe and not is_known and not can_switch:
            raise probe.bypass_error(self.name)
        if skip_probe:
            self._slides = probe.sliding(config)
        attention.switch(self._shadow, attention.MASKED if masked else attention.NAME)
        if masked:
            # Their own code multiplies queries with the cached keys, so both need the same dtype.
            self.capturable, self.min_shared_tokens, self.cache_dtype = False, None, self._dtype
        if self.has_states:
            states.stand_in(self._shadow)
            self.trees = False
            layers = enumerate(DynamicCache(config=config).layers)
            attending = [index for index, layer in layers if isinstance(layer, DynamicLayer)]
            self._places = {index: place for place, index in enumerate(attending)}
            self.layers = len(attending)
        if expected is not None:
            self.layers, self.kv_heads, self.head_dim = expected.sizes
            self._state_bytes = expected.state_bytes
            if probe.check(self, expected, masked).expanded:
                self.min_shared_tokens = None

    def probe(self, batch: ForwardBatch, cache: RaggedCache) -> tuple[Tensor, attention.Seen]:
        """Return the logits [B, S, V] of a first step, and a record of the attention that its layers asked for."""
        plan = cache.plan(batch.lengths, batch.tokens.shape[1])
        return self._compute(batch, plan, cache, "sdpa").logits, attention.seen(plan)

    def new_cache(self, max_batch: int, max_len: int, prefixes: int = 0, prefix_len: int = 0) -> RaggedCache:
        """Make an empty cache of `max_batch` rows x `max_len` tokens, plus prefixes of `prefix_len` tokens."""
        prefix = self.new_cache(prefixes, prefix_len) if prefixes else None
        sizes = (self.layers, max_batch, max_len, self.kv_heads, self.head_dim)
        kept = RecurrentStates(max_batch) if self.has_states else None
        return RaggedCache(*sizes, self.cache_dtype, self.device, prefix, kept)

    def cache_bytes(self, max_batch: int, max_len: int, prefixes: int = 0, prefix_len: int = 0) -> int:
        """Return the size in bytes of the cache that `new_cache` would make."""
        per_token: int = 2 * self.layers * self.kv_heads * self.head_dim * self.cache_dtype.itemsize
        # A row has its states at its committed length and after the last step.
        states = 2 * (max_batch + prefixes) * self._state_bytes
        return (max_batch * max_len + prefixes * prefix_len) * per_token + states

    def can_draft(self, fuse: Any) -> bool:
        """Return whether `draft` can run the chains of a draft head with this body and the layer `fuse`."""
        return False

    def draft(
        self, x: Tensor, lengths: Sequence[int], counts: list[int], cache: RaggedCache, chain: Chain
    ) -> tuple[Tensor, Drafted]:
        """Run a forward over inputs, then draft a chain (kernels/cpu/chain.py), in one call.

        Use it only if `can_draft` is true.

        Args:
            x: float32 [N, hidden], contiguous, the inputs of row 0, then those of row 1, and so on. It is
                overwritten.
            lengths: how many tokens of each row are already cached.
            counts: how many inputs each row has, at least 1.
            cache: the rows' keys and values.
            chain: the chain.

        Returns:
            The logits [levels, B, V'] after each row's newest token and after all of its drafts but the last, and
            the drafts.
        """
        raise NotImplementedError

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: RaggedCache, backend: str = "pad") -> ForwardOutput:
        """Feed the batch's tokens, each row from its own length on.

        Afterwards the cache holds row b's new tokens at lengths[b] .. lengths[b] + S - 1. The lengths of the next
        batch decide which of these tokens are kept: a smaller length drops rejected drafts. `backend` is the
        attention to use (kernels/backends.py).

        Raises:
            ValueError: if a row does not fit the cache.
        """
        with self._exclusive, on(self.device):
            tree = None if batch.tree is None else token_tree(batch.tree, self.device)
            plan = cache.plan(batch.lengths, batch.tokens.shape[1], batch.window, tree)
            return self._compute(batch, plan, cache, backend)

    @torch.inference_mode()
    def forward_captured(self, batch: CapturedBatch, cache: RaggedCache, backend: str = "pad") -> ForwardOutput:
        """Run `forward` with lengths that only the device knows. Nothing is read on the host."""
        with self._exclusive, on(self.device):
            width, tree = batch.tokens.shape[1], batch.tree
            plan = cache.plan_captured(batch.lengths, width, batch.extent, batch.shared, batch.window, tree)
            return self._compute(batch, plan, cache, backend)

    def _compute(
        self, batch: ForwardBatch | CapturedBatch, plan: AttentionPlan, cache: RaggedCache, backend: str
    ) -> ForwardOutput:
        tokens, take = batch.tokens, batch.wanted_columns
        columns = None if take is None else sorted(set(take))
        logits_to_keep: Any = 0 if columns is None else to_device(columns, tokens.device)
        if columns is not None and self._split:
            # Pass a list of columns: accelerate would move a tensor to the first layer's device, but the output
            # layer's device needs it.
            logits_to_keep = columns
        inputs = {"inputs_embeds": tokens.to(self._dtype)} if tokens.is_floating_point() else {"input_ids": tokens}
        prompt = isinstance(batch, ForwardBatch) and batch.eager
        kept = nullcontext() if cache.states is None else cache.states.step(plan.host, tokens.shape[1], prompt)
        with attention.planned(plan, backend), kept:
            out = self._shadow(
                **inputs,
                position_ids=self._positions(plan),
                **{self._cache_keyword: attention.PlannedCache(cache, plan, self._places)},
                use_cache=True,
                output_hidden_states=batch.return_states,
                logits_to_keep=logits_to_keep,
            )
        if self._slides:
            probe.refuse_forgetting(self.name, attention.seen(plan), self._slides)
            self._slides = ()
        states = None
        if batch.return_states:
            *streams, last = out.hidden_states
            states = self.readout([streams[layer] for layer in self.readout.layers], last)
        if take is None or columns is None:
            return ForwardOutput(out.logits, states)
        picked = to_device([columns.index(column) for column in take], tokens.device)
        return ForwardOutput(out.logits[torch.arange(len(take), device=tokens.device), picked], states)

    def _positions(self, plan: AttentionPlan) -> Tensor:
        """Return positions int64 [B, S], clamped because padding columns past the context need valid ones too."""
        positions = plan.positions
        return positions if plan.longest <= self.context else positions.clamp(max=self.context - 1)


def cache_keyword(model: nn.Module) -> str:
    """Return the name of the forward's cache parameter, which transformers 5.24 renamed and 5.40 will drop.

    If the forward has only **kwargs, return the name that transformers' own models use.
    """
    for function in (model.forward, GenerationMixin.prepare_inputs_for_generation):
        if "cache" in inspect.signature(function).parameters:
            return "cache"
        if "past_key_values" in inspect.signature(function).parameters:
            break
    return "past_key_values"


def shadow_of(model: PreTrainedModel) -> PreTrainedModel:
    """Copy the model's modules and config, but share its parameters, buffers and other tensors.

    Rotary frequencies are copied, because some models overwrite them while they run. Hooks, containers and the
    users' own objects are shared: users go on changing those, not copies of them. So are objects that can't be
    copied, such as locks.
    """
    shared: dict[int, Any] = {
        id(tensor): tensor for tensor in chain(model.parameters(), model.buffers(), offloaded_weights(model))
    }
    shared |= {id(tensor): tensor.clone() for name, tensor in model.named_buffers() if "inv_freq" in name}
    for module in model.modules():
        shared |= {id(hooks): copy.copy(hooks) for hooks in hooks_of(module)}
        # Hook handles can't be copied. Some modules keep their handles as attributes or in lists, so share those
        # handles.
        values = (value if isinstance(value, list) else [value] for value in vars(module).values())
        shared |= {id(handle): handle for handle in chain(*values) if isinstance(handle, RemovableHandle)}
        shared |= {id(value): value for value in attributes_of(module).values() if _is_shared(value)}
        if isinstance(module, QuantizedModule):
            shared[id(module.quantized)] = module.quantized
    try:
        copied: PreTrainedModel = copy.deepcopy(model, dict(shared))
    except Exception:
        copied = copy.deepcopy(model, shared | _uncopyable(model, shared))
    copied.eval()
    return copied


def _is_shared(value: Any) -> bool:
    """Return whether shadows share this attribute: a tensor, a container, or an object of a user's class."""
    if isinstance(value, Tensor):
        return True
    package = type(value).__module__.partition(".")[0]
    return (isinstance(value, _CONTAINERS) or package not in _COPIED) and not _holds_modules(value)


def _holds_modules(value: Any, seen: frozenset[int] = frozenset()) -> bool:
    """Return whether a value refers to modules, perhaps by a method of one. `seen`: ids of what contains it."""
    if isinstance(value, _REFERENCES):
        return True
    if id(value) in seen:
        return False
    items = value.values() if isinstance(value, dict) else value if isinstance(value, _CONTAINERS) else ()
    fields = getattr(value, "__dict__", {}).values()
    inner = seen | {id(value)}
    if any(isinstance(field, _REFERENCES) for field in fields):
        return True
    return any(_holds_modules(item, inner) for item in items)


def _uncopyable(model: nn.Module, shared: dict[int, Any]) -> dict[int, Any]:
    """Return the attributes, by id, that copy.deepcopy fails on, for example locks and open files."""
    modules = {id(module): module for module in model.modules()}
    found = {}
    for module in modules.values():
        for value in attributes_of(module).values():
            try:
                copy.deepcopy(value, shared | modules)
            except Exception:
                found[id(value)] = value
    return found


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise PairError, naming the class, if we don't support the model's attention or cache."""
    config = model.config.get_text_config()
    reason = None
    layer_types = set(config_value(config, "layer_types") or ())
    has_states, attends_only = states.can_take_back(model), bool(layer_types) and layer_types <= _LAYER_TYPES
    if config_value(config, "is_encoder_decoder"):
        reason = "it is an encoder-decoder model"
    elif not (has_states or (_attends(config) and (attends_only or not getattr(model, "_is_stateful", False)))):
        reason = "it keeps a state that can't be rolled back"
    elif unknown := layer_types - (_LAYER_TYPES | _STATE_TYPES if has_states else _LAYER_TYPES):
        reason = f"it has layers of type {', '.join(sorted(unknown))}"
    elif has_states and states.has_replaced_layers(model):
        reason = "layers that keep states have another forward than their class, e.g. of a split over devices"
    elif config_value(config, "model_type") == "whisper":
        reason = "it is the decoder of a speech model"
    elif model.get_output_embeddings() is None:
        reason = "it has no language-model head"
    if reason:
        raise attention.unsupported(type(model).__name__, reason)
    if any(type(module).__module__.startswith(_QUANTISED_TOGETHER) for module in model.modules()):
        reason = (
            "torch's dynamic quantisation rounds all texts of a batch together, so each would depend on the others"
        )
        raise attention.unsupported(type(model).__name__, reason, 'Load the model with dtype="int8" instead.')
    attention.refuse_replaced(model)


def _attends(config: Any) -> bool:
    """Return whether the config has attention heads, for all layers or for each layer separately."""
    try:
        return hasattr(config, "num_attention_heads")
    except RuntimeError:
        return True
