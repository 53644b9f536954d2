"""One forward of a causal language model over rows of different lengths.

Contract: `CausalModel.forward` feeds S tokens per row at each row's own length (model/forward.py). It keeps no
state between calls, so several lanes may call it at once, each with its own cache. The user's model is never
changed: we work on a shadow, a copy of its modules that shares its weights. A model that does not compute what its
own code does is refused when it is made (probe.py). Non-goals: encoder-decoder models, state-space layers,
training.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import GenerationMixin, PreTrainedModel

from kernels.plan import AttentionPlan
from kernels.support import is_accelerator, on, on_zero_gpu

from ..machine import cpu_kernels
from ..machine.transfer import to_device
from . import attention, probe
from .cache import RaggedCache
from .forward import CapturedBatch, ForwardBatch, ForwardOutput, token_tree
from .weights.cost import ModelCost, model_cost
from .weights.modified import hooks_of
from .weights.placement import has_waiting, home_device, is_split, waiting_weights
from .weights.quantized import QuantizedModule, outputs_of
from .weights.shape import context_of, head_dim, is_llama, said, turns_with_length

if TYPE_CHECKING:
    from kernels.cpu.chain import Chain, Drafted  # imports numba

# Models that attend by their own code, which was read: all that it hides from a token is in the mask that it asks
# for, and where a token stands it takes from `position_ids` or from the columns of the cache.
_MASKED = {"bloom", "falcon", "mpt"}
# Those of them whose ALiBi goes by the columns of the cache, which in a tree are not how deep its drafts are.
_BY_COLUMN = {"bloom", "mpt"}
_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(frozen=True)
class HiddenStateTap:
    """What a forward returns as a token's state: the last hidden state, optionally after those of earlier layers.

    layers: after how many layers the residual stream is read; each such state is divided by its root mean square.
    project: maps their concatenation [..., (len(layers) + 1) x hidden], last hidden state last, to the result.
    """

    layers: tuple[int, ...] = ()
    project: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        if list(self.layers) != sorted({layer for layer in self.layers if layer >= 0}):
            raise ValueError(f"layers must be ascending and none below 0, got {self.layers}.")

    def __call__(self, streams: list[Tensor], last: Tensor) -> Tensor:
        """streams: one [..., hidden] for each of `layers`; last [..., hidden]."""
        scaled = [F.rms_norm(x.float(), x.shape[-1:], eps=1e-6).to(last.dtype) for x in streams]
        states = torch.cat((*scaled, last), dim=-1) if scaled else last
        return states if self.project is None else self.project(states)

    def finish(self, raw: Tensor) -> Tensor:
        """The same of what was only put side by side: raw [..., (len(layers) + 1) x hidden], last state last."""
        *streams, last = raw.chunk(len(self.layers) + 1, dim=-1)
        return self(streams, last)


class CausalModel:
    """Any transformers causal LM with an attention interface, run by its own code with ragged attention.

    capturable: False if the forward is known to read values on the host, if the model is split over devices
    (weights/placement.py), and after a CUDA graph could not be made.
    low_precision: sums are rounded to 16 bits between the products, so near ties in a row's logits may be decided
    by the number of tokens in the batch.
    """

    cost: ModelCost
    # Why this is transformers' own model and not a forward of ours, as a clause; None if there is nothing to say.
    reason: str | None = None
    # Whether weights were copied, so that changing the model's own would no longer change what is computed.
    copies_weights = False

    # Whether the padding of shorter rows is left out of the matrix products.
    skips_padding = False
    # The fewest tokens that prompts must have in common, counted for each row but one, to share a prefix; None:
    # they can't. In torch, attention in two parts is more calls.
    least_saved: int | None = 2048
    # Whether the forward is known not to wait for the device. transformers' own code is tested (capturable.py).
    never_waits = False
    # Whether it attends over trees of drafts. Where a token stands must come from `position_ids` for that.
    trees = True
    # Of a model that was not tried, layers to look at in the first forward (probe.py).
    _slides: tuple[int, ...] = ()

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        self.readout = HiddenStateTap()
        self.name = type(model).__name__
        refuse_unsupported(model)
        self.device = home_device(model)
        self._split = is_split(model)
        # Weights that wait are fetched for one forward and let go after it: another one at once would lose them.
        self._turn: AbstractContextManager[Any] = threading.Lock() if has_waiting(model) else nullcontext()
        self.capturable = not (self._split or turns_with_length(config))
        self.layers: int = config.num_hidden_layers
        self.context = context_of(config)
        self.vocab = outputs_of(model)
        self.hidden: int = config.hidden_size
        self.kv_heads = said(config, "num_key_value_heads") or said(config, "num_attention_heads") or 0
        self.head_dim = head_dim(config)
        # On a CPU, reading float32 keys is faster than converting bfloat16 ones.
        self.cache_dtype = model.dtype if is_accelerator(self.device) else torch.float32
        self.low_precision = model.dtype != torch.float32
        self._cache_keyword = cache_keyword(model)
        self._prepare(model)
        # A cache may grow by so many tokens at once.
        self.cost = model_cost(model, self.cache_bytes(1, 16) // 16)

    def _prepare(self, model: PreTrainedModel) -> None:
        self._shadow, self._dtype = shadow_of(model), model.dtype
        # On ZeroGPU there is no device yet, and weights that wait on disk are slow to fetch.
        config = model.config.get_text_config()
        known, untried = is_llama(model), has_waiting(model) or on_zero_gpu()
        probed = None if untried else probe.expect(self._shadow, self.name, self.context)
        # accelerate fetches the weights of the modules that it knows.
        if not is_accelerator(self.device) and not self._split and cpu_kernels.available():
            from .weights.compiled import compile_linears  # imports numba

            self.copies_weights = compile_linears(self._shadow)
        masked = config.model_type in _MASKED
        self.trees = config.model_type not in _BY_COLUMN
        # Falcon's ALiBi is among what only a trial shows.
        asks = model._supports_attention_backend or (masked and not said(config, "alibi"))
        if untried and not known and not asks:
            raise probe.passes_by(self.name)
        if untried:
            self._slides = probe.sliding(config)
        attention.switch(self._shadow, attention.MASKED if masked else attention.NAME)
        if masked:
            self.capturable, self.least_saved = False, None
        if probed is not None:
            self.layers, self.kv_heads, self.head_dim = probed.sizes
            if probe.check(self, probed, masked).expanded:
                self.least_saved = None

    def probe(self, batch: ForwardBatch, cache: RaggedCache) -> tuple[Tensor, attention.Seen]:
        """Logits [B, S, V] of a first step, and what its layers saw."""
        plan = cache.plan(batch.lengths, batch.tokens.shape[1])
        return self._compute(batch, plan, cache, "sdpa").logits, attention.seen(plan)

    def new_cache(self, max_batch: int, max_len: int, prefixes: int = 0, prefix_len: int = 0) -> RaggedCache:
        """An empty cache of `max_batch` rows x `max_len` tokens, and of so many prefixes of so many tokens."""
        prefix = self.new_cache(prefixes, prefix_len) if prefixes else None
        sizes = (self.layers, max_batch, max_len, self.kv_heads, self.head_dim)
        return RaggedCache(*sizes, self.cache_dtype, self.device, prefix)

    def cache_bytes(self, max_batch: int, max_len: int, prefixes: int = 0, prefix_len: int = 0) -> int:
        """Bytes that a cache of that size takes."""
        per_token: int = 2 * self.layers * self.kv_heads * self.head_dim * self.cache_dtype.itemsize
        return (max_batch * max_len + prefixes * prefix_len) * per_token

    def can_draft(self, fuse: Any) -> bool:
        """Whether `draft` makes chains of a head whose body this is, and whose inputs are made by `fuse`."""
        return False

    def draft(self, batch: ForwardBatch, cache: RaggedCache, chain: Chain) -> tuple[Tensor, Drafted]:
        """A forward over inputs [B, S, hidden], then a chain of drafts (kernels/cpu/chain.py), in one call.

        Returns the logits [levels, B, V'] after each row's newest token and its drafts but the last; the drafts.
        Only where `can_draft` says so.
        """
        raise NotImplementedError

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: RaggedCache, backend: str = "pad") -> ForwardOutput:
        """Feed the batch's tokens at its lengths.

        Afterwards the cache holds the tokens at lengths[b] .. lengths[b]+S-1. The lengths of the caller's next
        batch say which of them are valid. Raises ValueError if a row does not fit the cache.
        """
        with self._turn, on(self.device):
            tree = None if batch.tree is None else token_tree(batch.tree, self.device)
            plan = cache.plan(batch.lengths, batch.tokens.shape[1], batch.window, tree)
            return self._compute(batch, plan, cache, backend)

    @torch.inference_mode()
    def forward_captured(self, batch: CapturedBatch, cache: RaggedCache, backend: str = "pad") -> ForwardOutput:
        """`forward` for lengths that only the device knows: nothing is read on the host, so it can be captured."""
        with self._turn, on(self.device):
            width, tree = batch.tokens.shape[1], batch.tree
            plan = cache.plan_captured(batch.lengths, width, batch.extent, batch.shared, batch.window, tree)
            return self._compute(batch, plan, cache, backend)

    def _compute(
        self, batch: ForwardBatch | CapturedBatch, plan: AttentionPlan, cache: RaggedCache, backend: str
    ) -> ForwardOutput:
        tokens, take = batch.tokens, batch.take
        columns = None if take is None else sorted(set(take))
        kept: Any = 0 if columns is None else to_device(columns, tokens.device)
        if columns is not None and self._split:
            # An index would have to be where the head is, and accelerate moves tensors to where the model begins.
            kept = columns
        given = {"inputs_embeds": tokens.to(self._dtype)} if tokens.is_floating_point() else {"input_ids": tokens}
        with attention.planned(plan, backend):
            out = self._shadow(
                **given,
                position_ids=self._positions(plan),
                **{self._cache_keyword: attention.PlannedCache(cache, plan)},
                use_cache=True,
                output_hidden_states=batch.return_states,
                logits_to_keep=kept,
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
        """int64 [B, S]. Columns past the context are unused padding, but need valid positions."""
        positions = plan.positions
        return positions if plan.longest <= self.context else positions.clamp(max=self.context - 1)


def cache_keyword(model: nn.Module) -> str:
    """What the model's forward calls the cache: transformers 5.24 renamed it, and 5.40 will drop the old name.

    A forward that passes on whatever it is given has the name that transformers' own models have.
    """
    for function in (model.forward, GenerationMixin.prepare_inputs_for_generation):
        if "cache" in inspect.signature(function).parameters:
            return "cache"
        if "past_key_values" in inspect.signature(function).parameters:
            break
    return "past_key_values"


def shadow_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model's modules and config copied, its parameters and buffers shared.

    But for the angles of rotary embeddings, which some models write while they run. Hooks are shared as well: a
    copy of an object that hooks a model would not be the one that the user goes on to change.
    """
    shared: dict[int, Any] = {
        id(one): one for one in chain(model.parameters(), model.buffers(), waiting_weights(model))
    }
    shared |= {id(one): one.clone() for name, one in model.named_buffers() if "inv_freq" in name}
    for module in model.modules():
        shared |= {id(hooks): copy.copy(hooks) for hooks in hooks_of(module)}
        # What removes a hook can't be copied; some modules keep it, alone or in lists.
        lists = (value if isinstance(value, list) else [value] for value in vars(module).values())
        shared |= {id(one): one for one in chain(*lists) if isinstance(one, RemovableHandle)}
        if isinstance(module, QuantizedModule):
            shared[id(module.quantized)] = module.quantized
    copied: PreTrainedModel = copy.deepcopy(model, shared)
    copied.eval()
    return copied


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raises PairError, naming the class, for a model whose attention or cache we don't support."""
    config = model.config.get_text_config()
    reason = None
    kinds = set(said(config, "layer_types") or ())
    if said(config, "is_encoder_decoder"):
        reason = "it is an encoder-decoder model"
    elif getattr(model, "_is_stateful", False) or not _attends(config):
        reason = "it keeps a state that can't be rolled back"
    elif kinds - _LAYER_TYPES:
        reason = f"it has layers of type {', '.join(sorted(kinds - _LAYER_TYPES))}"
    elif said(config, "model_type") == "whisper":
        reason = "it is the decoder of a speech model"
    elif model.get_output_embeddings() is None:
        reason = "it has no language-model head"
    if reason:
        raise attention.unsupported(type(model).__name__, reason)


def _attends(config: Any) -> bool:
    """Whether the config knows attention heads, be it of each layer apart."""
    try:
        return hasattr(config, "num_attention_heads")
    except RuntimeError:
        return True
