"""One forward of a causal language model over rows of different lengths.

Contract: `CausalModel.forward` feeds S tokens a row at each row's own length and returns logits; it keeps no
state between calls, so several lanes may be inside it at once, each with its own cache. The model that was
handed in is never touched: we work on a shadow, a copy of its modules that shares its weights.
Non-goals: encoder-decoder models, state-space layers, training.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from kernels.support import is_accelerator, on

from ..attention import huggingface as attention
from ..attention.cache import RaggedCache
from ..errors import PairError
from ..machine.transfer import to_device
from .cost import ModelCost, model_cost
from .weights.cpu_linear import pack_all

_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class HiddenStateTap:
    """What `forward_states` returns of each token: the last hidden state alone, or earlier layers' before it.

    layers: how many layers the residual stream has passed where it is read, each time divided by its root mean
    square. project: from [..., (len(layers) + 1) x hidden], the last hidden state at the end, to what is returned.
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


class CausalModel:
    """Any transformers causal LM with an attention interface, run by its own code with ragged attention.

    `capturable` is False where its forward is known to read values on the host, and set to False once a CUDA
    graph of it could not be made. `low_precision`: sums are rounded to 16 bits between the products, so that the
    tokens beside a row may decide its near ties.
    """

    cost: ModelCost

    # Whether the padding of shorter rows is left out of the matrix products.
    skips_padding = False
    # Whether the forward is known not to wait for the device. Of models' own code it is tried (capturable.py).
    never_waits = False

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        self.readout = HiddenStateTap()
        self.name = type(model).__name__
        refuse_unsupported(model)
        self.device = model.device
        self.capturable = not _turns_with_length(config)
        self.layers: int = config.num_hidden_layers
        self.context: int = config.max_position_embeddings
        self.vocab: int = model.get_output_embeddings().weight.shape[0]
        self.hidden: int = config.hidden_size
        self.kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        # A CPU reads float32 keys faster than it converts bfloat16 ones.
        self.cache_dtype = model.dtype if is_accelerator(self.device) else torch.float32
        self.low_precision = model.dtype != torch.float32
        self._prepare(model)
        self.cost = model_cost(model, self.cache_bytes(1, 1))

    def _prepare(self, model: PreTrainedModel) -> None:
        self._shadow = shadow_of(model)
        self._shadow.set_attn_implementation(attention.NAME)
        if not is_accelerator(self.device):
            _pack_linears(self._shadow)

    def new_cache(self, max_batch: int, max_len: int) -> RaggedCache:
        return RaggedCache(
            self.layers, max_batch, max_len, self.kv_heads, self.head_dim, self.cache_dtype, self.device
        )

    def cache_bytes(self, max_batch: int, max_len: int) -> int:
        """What a cache of that size will take, in bytes."""
        per_token = 2 * self.layers * self.kv_heads * self.head_dim * self.cache_dtype.itemsize
        return max_batch * max_len * per_token

    @torch.inference_mode()
    def forward(
        self,
        ids: Tensor,
        cache: RaggedCache,
        lengths: list[int],
        *,
        take: list[int] | None = None,
        counts: list[int] | None = None,
        backend: str = "pad",
    ) -> Tensor:
        """Feed ids int64 [B, S] at `lengths`; logits [B, S, V], or [B, V] of column take[b] of each row.

        Embeddings [B, S, hidden] may be given in place of ids. `counts` says how many tokens of each row are
        real: what is returned for the padding behind them means nothing, and a model may leave it out.
        Afterwards the cache holds the tokens at lengths[b] .. lengths[b]+S-1; which of them count is the
        caller's to say, by the lengths of the next call.
        """
        return self._forward(ids, cache, lengths, take, counts, backend, False)[0]

    @torch.inference_mode()
    def forward_states(
        self,
        ids: Tensor,
        cache: RaggedCache,
        lengths: list[int],
        *,
        take: list[int] | None = None,
        counts: list[int] | None = None,
        backend: str = "pad",
    ) -> tuple[Tensor, Tensor]:
        """`forward`, and the states [B, S, ...] of all columns that `readout` makes: if unset, the last hidden."""
        logits, states = self._forward(ids, cache, lengths, take, counts, backend, True)
        assert states is not None
        return logits, states

    @torch.inference_mode()
    def forward_captured(
        self,
        ids: Tensor,
        cache: RaggedCache,
        lengths: Tensor,
        backend: str,
        want: bool,
        extent: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`forward` for lengths int64 [B] that only the device knows: logits [B, S, V], and states if wanted.

        It reads nothing on the host, so it can be captured and replayed. Attention may look at the first `extent`
        columns of the cache, which no row may outgrow (None: at all of them).
        """
        with on(self.device):
            step = cache.begin_anywhere(lengths, ids.shape[1], extent)
            places = cache.positions.clamp(max=self.context - 1)
            return self._run(ids, places, cache, step, None, backend, want)

    def _forward(
        self,
        ids: Tensor,
        cache: RaggedCache,
        lengths: list[int],
        take: list[int] | None,
        counts: list[int] | None,
        backend: str,
        want: bool,
    ) -> tuple[Tensor, Tensor | None]:
        with on(self.device):
            step = cache.begin(lengths, ids.shape[1], counts if self.skips_padding else None)
            # Columns past the context are padding: their logits are never used, but their position must exist.
            inside = max(lengths) + ids.shape[1] <= self.context
            positions = cache.positions if inside else cache.positions.clamp(max=self.context - 1)
            return self._run(ids, positions, cache, step, take, backend, want)

    def _run(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: RaggedCache,
        step: attention.AttentionPlan,
        take: list[int] | None,
        backend: str,
        want: bool,
    ) -> tuple[Tensor, Tensor | None]:
        columns = None if take is None else sorted(set(take))
        out = self._shadow(
            **({"inputs_embeds": ids} if ids.is_floating_point() else {"input_ids": ids}),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=want,
            logits_to_keep=0 if columns is None else to_device(columns, ids.device),
            ragged=step,
            ragged_backend=backend,
        )
        states = None
        if want:
            *streams, last = out.hidden_states
            states = self.readout([streams[layer] for layer in self.readout.layers], last)
        if take is None or columns is None:
            return out.logits, states
        picked = to_device([columns.index(column) for column in take], ids.device)
        return out.logits[torch.arange(len(take), device=ids.device), picked], states


def shadow_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model's modules and config copied, its parameters and buffers shared."""
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, shared).eval()


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raises PairError, naming the class, for a model whose attention or cache we can't drive."""
    config = model.config.get_text_config()
    reason = None
    if getattr(config, "is_encoder_decoder", False):
        reason = "it is an encoder-decoder model"
    elif getattr(model, "_is_stateful", False) or not hasattr(config, "num_attention_heads"):
        reason = "it keeps a state that can't be rolled back"
    elif set(getattr(config, "layer_types", None) or _LAYER_TYPES) - _LAYER_TYPES:
        reason = f"it has layers of type {', '.join(sorted(set(config.layer_types) - _LAYER_TYPES))}"
    elif not getattr(model, "_supports_attention_backend", True):
        reason = "its attention does not go through transformers' attention interface"
    elif model.get_output_embeddings() is None:
        reason = "it has no language-model head"
    if reason:
        raise PairError(f"{type(model).__name__} is not supported: {reason}. Choose another causal LM.")


def _turns_with_length(config: Any) -> bool:
    """Whether rotary embeddings change with the longest position, which transformers reads on the host."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    # One for all layers, or one for each type of layer.
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    types = [str(kind.get("rope_type", kind.get("type", ""))) for kind in kinds]
    return any("dynamic" in name or name == "longrope" for name in types)


def _pack_linears(module: nn.Module) -> None:
    found = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and type(child.weight.data) is Tensor
    ]
    for (parent, name, _), packed in zip(found, pack_all([(child,) for _, _, child in found]), strict=True):
        setattr(parent, name, packed)
