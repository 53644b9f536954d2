"""An EAGLE-3 head (arXiv 2503.01840), which others have trained for a target: `EagleHead`, run by `EagleStep`.

As in our own heads (draft_head.py), slot t reads the embedding of token t and the state of slot t - 1. `fc` makes
the state of an accepted token from the target's residual stream after several layers. The first decoder layer
reads the normalised embedding and the normalised state side by side. The head has its own norms and output layer
over a reduced vocabulary, and often its own embedding table. It has no pointer. loading/eagle.py reads its files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from kernels.plan import AttentionPlan
from kernels.reference.quantized import QuantizedWeight
from kernels.support import is_accelerator, on

from ..errors import PairError, WeightsError
from ..machine.transfer import to_device
from .base import HiddenStateTap
from .cache import RaggedCache
from .draft_head import DraftHead, HeadConfig
from .forward import CapturedBatch, ForwardBatch, ForwardOutput, token_tree
from .llama_cuda import LlamaCuda
from .weights.quantized import outputs_of, weight_or_none


@dataclass(frozen=True)
class EagleConfig:
    """The shape of an EAGLE-3 head.

    Attributes:
        name: its folder or Hub id, for messages.
        layers: the shape of its decoder layers; `vocab_size` is the number of outputs.
        reads_layers: ascending; after how many of the target's layers it reads the residual stream.
        head_norms: whether queries and keys are normalised per head, as in Qwen3.
        norm_before_residual: whether the first layer adds its attention to the normalised state.
        norm_before_fc: whether the concatenated streams are normalised before `fc`.
        fc_norm: whether each stream is normalised before `fc`.
        norm_output: whether a draft's state is the normalised output.
    """

    name: str
    layers: LlamaConfig
    reads_layers: tuple[int, ...]
    target_hidden: int
    head_norms: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


class EagleTap(HiddenStateTap):
    """Turns the plain streams into a state; the target's last hidden state is not used."""

    def __call__(self, streams: list[Tensor], last: Tensor) -> Tensor:
        states = torch.cat(streams, dim=-1)
        return states if self.project is None else self.project(states)


class EagleBody(LlamaForCausalLM):
    """The decoder layers and the output layer. Only EagleStep runs them; `forward` is not for use."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config.layers)
        self.norm_before_residual, self.norm_output = config.norm_before_residual, config.norm_output
        self.has_head_norms = config.head_norms
        hidden, eps = config.layers.hidden_size, config.layers.rms_norm_eps
        first: Any = self.model.layers[0]
        for name in ("q_proj", "k_proj", "v_proj"):
            outputs = getattr(first.self_attn, name).out_features
            setattr(first.self_attn, name, nn.Linear(2 * hidden, outputs, bias=False))
        first.hidden_norm = LlamaRMSNorm(hidden, eps)
        for layer in self.model.layers if config.head_norms else ():
            attention: Any = layer.self_attn
            attention.q_norm, attention.k_norm = (LlamaRMSNorm(attention.head_dim, eps) for _ in range(2))


class EagleHead(DraftHead):
    """An EAGLE-3 head with its weights, on the target's device and in its dtype."""

    pointer: Any = None

    def __init__(
        self, target: PreTrainedModel, config: EagleConfig, vocabulary: Tensor, weights: dict[str, Tensor]
    ) -> None:
        """Make a head.

        Args:
            vocabulary: int64 [V'], the target's id of each of the head's outputs.
            weights: all weights, by the names that speculators uses. Without "embed_tokens.weight", the head
                reads the target's embedding table.

        Raises:
            PairError: if there are weights that don't belong to such a head.
            WeightsError: if weights are missing or have other shapes.
        """
        nn.Module.__init__(self)
        hidden, streams = config.layers.hidden_size, len(config.reads_layers)
        eps = config.layers.rms_norm_eps
        self.config = HeadConfig(config.layers.num_hidden_layers, hidden, True, config.reads_layers)
        self.shape, self._packed = config, {}
        with torch.device("meta"):
            self.fc = nn.Linear(streams * config.target_hidden, hidden, bias=False)
            self.input_norm: Any = (
                LlamaRMSNorm(streams * config.target_hidden, eps) if config.norm_before_fc else None
            )
            norms = (LlamaRMSNorm(config.target_hidden, eps) for _ in range(streams if config.fc_norm else 0))
            self.fc_norm = nn.ModuleList(norms)
            self.body: Any = EagleBody(config)
        # These have no weights in the files.
        self.body.model.embed_tokens = nn.Embedding(1, hidden)
        self.body.model.rotary_emb = LlamaRotaryEmbedding(config.layers)
        own_table = weights.get("embed_tokens.weight")
        placed = {_module_name(name): weight for name, weight in weights.items() if weight is not own_table}
        self._check(placed)
        self.load_state_dict(placed, strict=False, assign=True)
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        self.register_buffer("embedding", own_table, persistent=False)
        self.to(target.device, target.dtype).eval().requires_grad_(False)
        table = weight_or_none(target.get_input_embeddings())
        # Most heads come with a copy of the target's table.
        copied = isinstance(table, Tensor) and self.embedding is not None and torch.equal(self.embedding, table)
        self._own_table = own_table is not None and not copied
        self.quantized = None
        self.share_embedding(target)

    def _check(self, weights: dict[str, Tensor]) -> None:
        """Raise PairError or WeightsError unless these are the weights of this head, by their names here."""
        name = self.shape.name
        expected = {key: weight.shape for key, weight in self.named_parameters() if "embed_tokens" not in key}
        if missing := sorted(expected.keys() - weights.keys()):
            raise WeightsError(f"The head in {name} lacks {_file_name(missing[0])}: fetch it again.")
        if unknown := sorted(weights.keys() - expected.keys()):
            raise PairError(
                f"{name} has weights that we don't know ({_file_name(unknown[0])}): choose another draft."
            )
        for key, shape in expected.items():
            if weights[key].shape != shape:
                raise WeightsError(
                    f"{_file_name(key)} of the head in {name} has the shape {list(weights[key].shape)}, and its "
                    f"config asks for {list(shape)}: fetch it again."
                )

    def share_embedding(self, target: PreTrainedModel) -> None:
        if self._own_table:
            return
        table = weight_or_none(target.get_input_embeddings())
        if table is None:
            raise PairError(
                f"{self.shape.name} reads the embedding of its target, and {type(target).__name__} has another "
                "module in its place: choose another draft."
            )
        self.quantized = table if isinstance(table, QuantizedWeight) else None
        self.embedding = table.detach() if isinstance(table, Tensor) else None

    def follow(self, target: PreTrainedModel) -> None:
        size, last = outputs_of(target), int(self.vocabulary.max())
        table = self.embedding if self._own_table else None
        if last >= size or (table is not None and len(table) < size):
            raise PairError(
                f"{self.shape.name} does not know all ids of {type(target).__name__}, which now has {size}: "
                "choose another draft."
            )
        self.share_embedding(target)

    def inputs(self, ids: Tensor, states: Tensor) -> Tensor:
        """Return the body's inputs [B, S, 2 hidden] for ids int64 [B, S] and the states before them."""
        dtype = self.body.dtype
        return torch.cat((self._embed(ids).to(dtype), states.to(dtype)), dim=-1)

    def readout(self) -> HiddenStateTap:
        return EagleTap(self.shape.reads_layers, self._read)

    def _read(self, states: Tensor) -> Tensor:
        states = states.to(self.fc.weight.dtype)
        if self.input_norm is not None:
            states = self.input_norm(states)
        if len(self.fc_norm):
            streams = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([norm(stream) for norm, stream in zip(self.fc_norm, streams, strict=True)], dim=-1)
        read: Tensor = self.fc(states)
        return read

    def pack(self) -> None:
        """Do nothing: our CPU kernels don't know these layers."""


def _module_name(name: str) -> str:
    """Return a weight's name in EagleHead: "layers.0..." is "body.model.layers.0..."."""
    if name.startswith(("layers.", "norm.")):
        return f"body.model.{name}"
    return f"body.{name}" if name.startswith("lm_head.") else name


def _file_name(name: str) -> str:
    return name.removeprefix("body.").removeprefix("model.")


class EagleStep(LlamaCuda):
    """The forward of an EagleBody on any device, over inputs [B, S, 2 hidden] of EagleHead.

    These heads are trained without a slot 0, which has no state before it. So slot t is at position and column
    t - 1, and in a batch that begins at length 0, the tokens move one place to the left. Prefixes are not shared,
    because their slots would not fill whole units of columns.
    """

    min_shared_tokens = None

    def _prepare(self, model: PreTrainedModel) -> None:
        super()._prepare(model)
        # On a CPU, kernels could only run in Triton's interpreter.
        self.has_kernels = self.has_kernels and is_accelerator(self.device)
        body: Any = model
        self._hidden_norm = body.model.layers[0].hidden_norm.weight.detach()
        self._norm_before_residual, self._norm_output = body.norm_before_residual, body.norm_output

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: RaggedCache, backend: str = "pad") -> ForwardOutput:
        with on(self.device):
            tree = None if batch.tree is None else token_tree(batch.tree, self.device)
            lengths = [max(length - 1, 0) for length in batch.lengths]
            plan = cache.plan(lengths, batch.tokens.shape[1], None, tree)
            return self._compute(batch, plan, cache, backend)

    @torch.inference_mode()
    def forward_captured(self, batch: CapturedBatch, cache: RaggedCache, backend: str = "pad") -> ForwardOutput:
        with on(self.device):
            lengths = (batch.lengths - 1).clamp(min=0)
            plan = cache.plan_captured(lengths, batch.tokens.shape[1], batch.extent, tree=batch.tree)
            return self._compute(batch, plan, cache, backend)

    def _compute(
        self, batch: ForwardBatch | CapturedBatch, plan: AttentionPlan, cache: RaggedCache, backend: str
    ) -> ForwardOutput:
        begins, first = _begins(batch, self.device), self.blocks[0]
        embedded, x = _shifted(batch.tokens, begins, 1).to(self.head.dtype).chunk(2, dim=-1)
        normed = self._norm(x, self._hidden_norm)
        sides = torch.cat((self._norm(embedded, first.input_norm), normed), dim=-1)
        residual = normed if self._norm_before_residual else x.contiguous()
        x = self._attend(residual, self.product(sides, first.qkv), 0, first, cache, plan, backend)
        for index, layer in enumerate(self.blocks[1:], start=1):
            x = self._block(x, index, layer, cache, plan, backend)
        x = _shifted(x, begins, -1)
        states = None
        if batch.return_states:
            states = self._norm(x, self.final_norm) if self._norm_output else x
        if batch.wanted_columns is not None:
            columns = to_device(batch.wanted_columns, x.device)
            x = x[torch.arange(len(columns), device=x.device), columns]
        return ForwardOutput(self.product(x, self.head, norm=self.final_norm), states)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)


def _begins(batch: ForwardBatch | CapturedBatch, device: torch.device) -> Tensor | None:
    """Return which rows begin in this batch, int64 [B, 1] of 0 and 1, or None if no row does."""
    if isinstance(batch, CapturedBatch):
        return (batch.lengths == 0).long()[:, None]
    if 0 not in batch.lengths:
        return None
    return to_device([[int(length == 0)] for length in batch.lengths], device)


def _shifted(x: Tensor, begins: Tensor | None, by: int) -> Tensor:
    """Return x [B, S, D] with the beginning rows moved to the left (1) or back (-1); the ends are repeated."""
    if begins is None:
        return x
    rows, last = torch.arange(x.shape[0], device=x.device)[:, None], x.shape[1] - 1
    columns = torch.arange(x.shape[1], device=x.device) + by * begins
    return x[rows, columns.clamp(0, last)]
