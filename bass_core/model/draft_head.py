"""A draft head: one or more layers on top of the target's own embedding, hidden states and head.

Contract: slot t reads [embedding of token t, state of slot t-1] and predicts the target's last hidden state at t,
from which come logits over a reduced vocabulary (rows of the target's head; q is 0 elsewhere). Its pointer
(pointer.py) raises one of these logits; the drafter asks it, who has the whole text (draft/texts.py). States of
accepted tokens come from the target: its last one, or those of several layers projected into one (EAGLE-3, arXiv
2503.01840, section 3.1). States of drafted tokens come from the head itself (as in EAGLE, arXiv 2401.15077, and
Recurrent Drafter, arXiv 2403.09919). Only the head's own weights are stored; what it shares with the target is
read from the target. Non-goals: targets that are not Llama-shaped.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kernels.reference.quantized import QuantizedWeight
from kernels.support import is_accelerator

from ..errors import PairError, WeightsError
from ..machine import cpu_kernels
from ..machine.digest import sha256
from .base import HiddenStateTap
from .pointer import Pointer
from .weights.quantized import held, held_or_none, look_up, outputs_of
from .weights.shape import HALVES

CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True)
class HeadConfig:
    """layers: how many the head has; hidden: the target's hidden size; reads_states: whether it reads its states.

    reads_layers: layers of the target, ascending, whose states are read besides the last one (HiddenStateTap in
    model/base.py).
    """

    layers: int
    hidden: int
    reads_states: bool = True
    reads_layers: tuple[int, ...] = ()


class CompiledInputs(NamedTuple):
    """Makes the body's inputs in one compiled call.

    A running drafter keeps the one that it began with, since `DraftHead.pack` replaces the head's.

    Attributes:
        table: the target's embedding table.
        fuse: the packed layer `fuse` (a CompiledLinear).
        project: the packed layer `project`, or None if the head reads the last state only.
        embedded: float32 [V', hidden], the vocabulary's embeddings.
    """

    table: Tensor | QuantizedWeight
    fuse: Any
    project: Any
    embedded: Tensor

    def __call__(self, ids: Tensor, raw: Tensor) -> Tensor:
        """The inputs [N, hidden] of ids int64 [N] and unfinished states [N, raw_size]; overwrites the states."""
        from kernels.cpu.chain import inputs  # imports numba

        project = None if self.project is None else self.project.packed
        return inputs(raw.float().contiguous(), look_up(ids, self.table).float(), project, self.fuse.packed)


class DraftHead(nn.Module):
    """`body` is a small Llama that is fed embeddings and whose head has `len(vocabulary)` rows.

    `project` turns the target's states of several layers into one; the head's own states are not projected.
    """

    vocabulary: Tensor
    # The target's embedding table: one of the two, as the target holds it.
    embedding: Tensor | None
    quantized: QuantizedWeight | None
    fuse: Any
    project: Any
    # Of each of the target's ids: its place in the vocabulary, or -1.
    columns: Tensor

    def __init__(self, target: PreTrainedModel, config: HeadConfig, vocabulary: Tensor) -> None:
        """vocabulary int64 [V']: the target's ids that the head can propose, in any order."""
        super().__init__()
        own: Any = target.config.get_text_config()
        if own.model_type != "llama" or own.hidden_size != config.hidden:
            raise PairError(
                f"this draft head is for Llama-shaped targets of hidden size {config.hidden}; "
                f"{type(target).__name__} has {own.hidden_size}: choose another draft."
            )
        if any(layer >= own.num_hidden_layers for layer in HiddenStateTap(config.reads_layers).layers):
            raise PairError(
                f"this draft head reads layers {config.reads_layers} of its target; {type(target).__name__} has "
                f"{own.num_hidden_layers}: choose another draft."
            )
        self.config = config
        # Made by `pack`: `fuse` and `project` as our own kernels multiply them, and "inputs" (CompiledInputs).
        self._packed: dict[str, Any] = {}
        self.fuse = nn.Linear((2 if config.reads_states else 1) * config.hidden, config.hidden, bias=False)
        inputs = (len(config.reads_layers) + 1) * config.hidden
        self.project = nn.Linear(inputs, config.hidden) if config.reads_layers else nn.Identity()
        self.pointer = Pointer(config.hidden)
        # vocab_size 1 for now: the head is replaced below, and random weights for it would take 0.2 s.
        fields = {**own.to_dict(), "num_hidden_layers": config.layers, "vocab_size": 1}
        fields |= {"tie_word_embeddings": False, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
        for name in ("architectures", "layer_types", "quantization_config", "dtype", "torch_dtype"):
            fields.pop(name, None)
        self.body = LlamaForCausalLM(LlamaConfig(**fields))
        self.body.model.embed_tokens.requires_grad_(False)
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        self.register_buffer("columns", self._places(own.vocab_size), persistent=False)
        self.register_buffer("embedding", None, persistent=False)
        self.share_embedding(target)
        self.body.lm_head.weight = nn.Parameter(self._rows(target), requires_grad=False)
        self.body.lm_head.out_features = self.body.config.vocab_size = len(vocabulary)

    def share_embedding(self, target: PreTrainedModel) -> None:
        """Share the target's embedding table, on its current device and in its current form."""
        ends = target.get_input_embeddings(), target.get_output_embeddings()
        if any(held_or_none(one) is None for one in ends):
            raise PairError(
                f"this draft head reads the embedding and the output layer of its target, and "
                f"{type(target).__name__} has other modules in their place: choose another draft."
            )
        table = held(ends[0])
        self.quantized = table if isinstance(table, QuantizedWeight) else None
        self.embedding = table.detach() if isinstance(table, Tensor) else None

    def _places(self, size: int) -> Tensor:
        """`columns` for a target of `size` ids."""
        columns = torch.full((size,), -1, device=self.vocabulary.device)
        columns[self.vocabulary] = torch.arange(len(self.vocabulary), device=columns.device)
        return columns

    def _rows(self, target: PreTrainedModel) -> Tensor:
        """Rows [V', hidden] of the target's output layer."""
        head: Any = target.get_output_embeddings()
        rows: Tensor = head.weight.detach()[self.vocabulary].to(self.body.dtype)
        return rows

    def follow(self, target: PreTrainedModel) -> None:
        """Read the target's embedding and output rows again after its weights have changed.

        Lanes that are running keep the rows that they began with.

        Raises:
            PairError: if the target no longer has all of the head's ids.
        """
        size, last = outputs_of(target), int(self.vocabulary.max())
        if last >= size:
            raise PairError(
                f"this draft head proposes ids up to {last}, and {type(target).__name__} now has {size} ids: "
                "choose another draft."
            )
        self.share_embedding(target)
        if len(self.columns) != size:
            self.columns = self._places(size)
        if isinstance(held(target.get_output_embeddings()), Tensor):
            self.body.lm_head.weight = nn.Parameter(self._rows(target), requires_grad=False)

    def inputs(self, ids: Tensor, states: Tensor) -> Tensor:
        """The body's inputs [B, S, hidden], from ids int64 [B, S] and the states [B, S, hidden] before them."""
        x = self._embed(ids).to(states.dtype)
        if self.config.reads_states:
            x = torch.cat((x, states), dim=-1)
        fuse = self.layer("fuse")
        if isinstance(fuse, nn.Linear):
            x = x.to(fuse.weight.dtype)
        out: Tensor = fuse(x)
        return out

    def _embed(self, ids: Tensor) -> Tensor:
        return look_up(ids, self._table())

    def _table(self) -> Tensor | QuantizedWeight:
        table = self.quantized if self.embedding is None else self.embedding
        assert table is not None
        return table

    def readout(self) -> HiddenStateTap:
        """Which states the target's forward must return for `inputs`."""
        return HiddenStateTap(tuple(self.config.reads_layers), self._read)

    def _read(self, states: Tensor) -> Tensor:
        project = self.layer("project")
        if isinstance(project, nn.Linear):
            states = states.to(project.weight.dtype)
        out: Tensor = project(states)
        return out

    def column_of(self, ids: Tensor) -> Tensor:
        """Places in the vocabulary int64 [...] of ids int64 [...]; -1 for one that is not there, and for -1."""
        return torch.where(ids >= 0, self.columns[ids.clamp(min=0)], -1)

    @property
    def raw_size(self) -> int:
        """Numbers of a token's states that are not finished."""
        return (len(self.config.reads_layers) + 1) * self.config.hidden

    def layer(self, name: str) -> Any:
        """`fuse` or `project`, in the form that our own kernels multiply if `pack` has packed it."""
        return self._packed.get(name, getattr(self, name))

    @property
    def compiled_inputs(self) -> CompiledInputs | None:
        """Makes the body's inputs by our own kernels; None if they can't."""
        return self._packed.get("inputs")

    def pack(self) -> None:
        """Pack the layers outside the body where our own kernels multiply; a layer with hooks stays as it is."""
        # Assigned in one piece: a running lane may ask for a layer meanwhile.
        self._packed = self._pack()

    def _pack(self) -> dict[str, Any]:
        here = not is_accelerator(self.vocabulary.device) and self.body.dtype in HALVES
        if not here or not cpu_kernels.available():
            return {}
        from kernels.cpu.kinds import PANEL  # imports numba

        from .weights.compiled import compiled, is_plain

        layers = {name: getattr(self, name) for name in ("fuse", "project")}
        packed: dict[str, Any] = {name: compiled(layer) for name, layer in layers.items() if is_plain(layer)}
        wanted = {"fuse", "project"} if self.config.reads_layers else {"fuse"}
        # The compiled call writes whole panels.
        if self.config.reads_states and wanted <= packed.keys() and self.config.hidden % PANEL == 0:
            project = packed["project"] if self.config.reads_layers else None
            embedded = self._embed(self.vocabulary).float()
            packed["inputs"] = CompiledInputs(self._table(), packed["fuse"], project, embedded)
            # Compiles it, or loads its code from disk, before a clock runs.
            packed["inputs"](self.vocabulary[:1], torch.zeros(1, self.raw_size))
        return packed

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: without what `pack` made, which can't be pickled."""
        return {**self.__dict__, "_packed": {}}

    def own_weights(self) -> dict[str, Tensor]:
        """The weights that are stored: all but the target's embedding and head."""
        shared = ("body.lm_head", "body.model.embed_tokens")
        return {name: value for name, value in self.state_dict().items() if not name.startswith(shared)}

    def save(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write config and weights."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.detach() for name, value in self.own_weights().items()}
        if dtype != torch.float32:
            # Rounded to float16 first, so that either 16-bit dtype holds the same weights.
            tensors = {name: value.half() for name, value in tensors.items()}
        tensors = {name: value.to(dtype).contiguous() for name, value in tensors.items()}
        tensors["vocabulary"] = self.vocabulary.to(torch.int32)
        part = folder / (WEIGHTS + ".part")
        save_file(tensors, part)
        config = {"draft_head": asdict(self.config), "sha256": sha256(part)}
        os.replace(part, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(config, indent=4) + "\n", encoding="utf-8")


def is_draft_head(folder: Path) -> bool:
    """Whether a folder holds a draft head (and no model of its own)."""
    try:
        return "draft_head" in json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def load_draft_head(folder: Path, target: PreTrainedModel) -> DraftHead:
    """The head stored in a folder, on the target's device, in its dtype.

    Raises PairError if it is for another target, WeightsError if its files can't be read, or if the weights are
    not those that its config names.
    """
    try:
        read = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        fields, digest = read["draft_head"], sha256(folder / WEIGHTS)
        # Heads of earlier versions have no digest, and may have positions after the first, which are not read.
        if read.get("sha256", digest) != digest:
            raise ValueError(f"{WEIGHTS} has another sha256 than {CONFIG} says")
        known = {name: value for name, value in fields.items() if name not in ("positions", "link_rank")}
        config = HeadConfig(**{**known, "reads_layers": tuple(fields.get("reads_layers", ()))})
        tensors = load_file(folder / WEIGHTS)
        vocabulary = tensors.pop("vocabulary").long()
    except Exception as error:
        raise WeightsError(
            f"The draft in {folder} can't be read ({error}): fetch it again, or train one with "
            "`python -m distill train`."
        ) from error
    head = DraftHead(target, config, vocabulary)
    if not any(name.startswith("pointer.") for name in tensors):
        # One of an earlier version, whose logits stay as they are.
        tensors |= {f"pointer.{name}": torch.zeros_like(one) for name, one in head.pointer.named_parameters()}
    missing = set(head.own_weights()) - set(tensors)
    if missing:
        raise WeightsError(f"The draft in {folder} lacks {sorted(missing)[0]}: fetch it again or train one.")
    head.load_state_dict(tensors, strict=False)
    return head.to(target.device, target.dtype).eval().requires_grad_(False)
