"""A draft head: one or more layers that draft from the target's own embeddings, hidden states and output layer.

At slot t the head reads the embedding of token t and the state of slot t - 1. It predicts the target's last hidden
state at t. The logits over a reduced vocabulary (some rows of the target's output layer) follow from that state;
ids outside this vocabulary are never drafted (q = 0). The pointer (pointer.py) may raise one of these logits; the
drafter calls it, because only the drafter has the whole text (draft/head/texts.py).

The state of an accepted token comes from the target: its last hidden state, or the states of several layers
projected to one (EAGLE-3, arXiv 2503.01840, section 3.1). States of drafted tokens come from the head itself, as
in EAGLE (arXiv 2401.15077) and Recurrent Drafter (arXiv 2403.09919). Only the head's own weights are stored. The
target must be Llama-shaped. Call `load_draft_head` first.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from kernels.reference.quantized import QuantizedWeight
from kernels.support import is_accelerator

from ..errors import BassError, PairError, WeightsError
from ..machine import cpu_kernels
from ..machine.digest import sha256
from .base import HiddenStateTap
from .pointer import Pointer
from .weights.quantized import look_up, outputs_of, weight_of, weight_or_none
from .weights.shape import SIXTEEN_BIT

CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True)
class HeadConfig:
    """The shape of a draft head.

    Attributes:
        reads_states: whether the head reads the target's hidden states.
        reads_layers: layers of the target, ascending, whose states it reads besides the last state (HiddenStateTap
            in base.py).
        qk_norm: whether queries and keys are normalised per head, as in Qwen3.
    """

    layers: int
    hidden: int
    reads_states: bool = True
    reads_layers: tuple[int, ...] = ()
    qk_norm: bool = False


class CompiledInputs(NamedTuple):
    """Make the body's inputs in one compiled call.

    A running drafter keeps the CompiledInputs that it began with, because `DraftHead.pack` replaces the head's.

    Attributes:
        table: the target's embedding table.
        fuse: the packed layer `fuse` (a CompiledLinear).
        project: the packed layer `project`, or None if the head reads only the last state.
        embedded: float32 [V', hidden], the vocabulary's embeddings.
    """

    table: Tensor | QuantizedWeight
    fuse: Any
    project: Any
    embedded: Tensor

    def __call__(self, ids: Tensor, raw: Tensor) -> Tensor:
        """Return the inputs [N, hidden]; overwrites the states.

        Args:
            ids: int64 [N].
            raw: float32 [N, raw_size], contiguous, states before `HiddenStateTap.finish`.
        """
        from kernels.cpu.chain import inputs  # imports numba

        project = None if self.project is None else self.project.packed
        embedded = look_up(ids, self.table).float()
        return torch.from_numpy(inputs(raw.numpy(), embedded.numpy(), project, self.fuse.packed))


class DraftHead(nn.Module):
    """A small Llama or Qwen3 (`body`) on embeddings and states, whose output layer has `len(vocabulary)` rows.

    `project` maps the target's states of several layers to one state. The head's own states are not projected.
    """

    vocabulary: Tensor
    # The target's embedding table: `quantized` if the target stores it quantised, else `embedding`. The other is
    # None.
    embedding: Tensor | None
    quantized: QuantizedWeight | None
    fuse: Any
    project: Any
    # For each of the target's ids, its index in the vocabulary or -1.
    columns: Tensor

    def __init__(self, target: PreTrainedModel, config: HeadConfig, vocabulary: Tensor) -> None:
        """Make a head with random weights.

        Args:
            vocabulary: int64 [V'], the target's ids that the head can propose, in any order.

        Raises:
            PairError: if the head does not fit the target.
        """
        super().__init__()
        target_config: Any = target.config.get_text_config()
        if target_config.model_type != "llama" or target_config.hidden_size != config.hidden:
            raise PairError(
                f"this draft head is for Llama-shaped targets of hidden size {config.hidden}; "
                f"{type(target).__name__} has {target_config.hidden_size}: choose another draft."
            )
        if any(layer >= target_config.num_hidden_layers for layer in HiddenStateTap(config.reads_layers).layers):
            raise PairError(
                f"this draft head reads layers {config.reads_layers} of its target; {type(target).__name__} has "
                f"{target_config.num_hidden_layers}: choose another draft."
            )
        self.config = config
        # Set by `pack`: "fuse" and "project" in the form of our own kernels, and "inputs" (CompiledInputs).
        self._packed: dict[str, Any] = {}
        self.fuse = nn.Linear((2 if config.reads_states else 1) * config.hidden, config.hidden, bias=False)
        inputs = (len(config.reads_layers) + 1) * config.hidden
        self.project = nn.Linear(inputs, config.hidden) if config.reads_layers else nn.Identity()
        self.pointer = Pointer(config.hidden)
        # vocab_size 1 for now: the output layer is replaced below, and random weights would take 0.2 s.
        fields = {**target_config.to_dict(), "num_hidden_layers": config.layers, "vocab_size": 1}
        fields |= {"tie_word_embeddings": False, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
        names = ("architectures", "model_type", "layer_types", "quantization_config", "dtype", "torch_dtype")
        for name in names:
            fields.pop(name, None)
        # Except for the norms of queries and keys, Qwen3 is a Llama.
        self.body: Any = (
            Qwen3ForCausalLM(Qwen3Config(**fields)) if config.qk_norm else LlamaForCausalLM(LlamaConfig(**fields))
        )
        self.body.model.embed_tokens.requires_grad_(False)
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        self.register_buffer("columns", self._column_table(target_config.vocab_size), persistent=False)
        self.register_buffer("embedding", None, persistent=False)
        self.share_embedding(target)
        self.body.lm_head.weight = nn.Parameter(self._output_rows(target), requires_grad=False)
        self.body.lm_head.out_features = self.body.config.vocab_size = len(vocabulary)

    def share_embedding(self, target: PreTrainedModel) -> None:
        """Share the target's embedding table, on its current device and in its current form.

        Raises:
            PairError: if the target has no plain embedding or output layer.
        """
        ends = target.get_input_embeddings(), target.get_output_embeddings()
        if any(weight_or_none(module) is None for module in ends):
            raise PairError(
                f"this draft head reads the embedding and the output layer of its target, and "
                f"{type(target).__name__} has other modules in their place: choose another draft."
            )
        table = weight_of(ends[0])
        self.quantized = table if isinstance(table, QuantizedWeight) else None
        self.embedding = table.detach() if isinstance(table, Tensor) else None

    def _column_table(self, size: int) -> Tensor:
        """Return the attribute `columns` for a target with `size` ids."""
        columns = torch.full((size,), -1, device=self.vocabulary.device)
        columns[self.vocabulary] = torch.arange(len(self.vocabulary), device=columns.device)
        return columns

    def _output_rows(self, target: PreTrainedModel) -> Tensor:
        """Return the vocabulary's rows [V', hidden] of the target's output layer."""
        head: Any = target.get_output_embeddings()
        rows: Tensor = head.weight.detach()[self.vocabulary].to(self.body.dtype)
        return rows

    def follow(self, target: PreTrainedModel) -> None:
        """Read the target's embedding and output rows again, after its weights have changed.

        Running lanes keep the rows that they began with.

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
            self.columns = self._column_table(size)
        if isinstance(weight_of(target.get_output_embeddings()), Tensor):
            self.body.lm_head.weight = nn.Parameter(self._output_rows(target), requires_grad=False)

    def inputs(self, ids: Tensor, states: Tensor) -> Tensor:
        """Return the body's inputs [B, S, hidden] for ids int64 [B, S] and the preceding states [B, S, hidden]."""
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
        """Return the tap for the states that `inputs` needs from the target's forward."""
        return HiddenStateTap(tuple(self.config.reads_layers), self._read)

    def _read(self, states: Tensor) -> Tensor:
        project = self.layer("project")
        if isinstance(project, nn.Linear):
            states = states.to(project.weight.dtype)
        out: Tensor = project(states)
        return out

    def column_of(self, ids: Tensor) -> Tensor:
        """Map ids int64 [...] to indices in the vocabulary int64 [...]; -1 for ids outside it, and for -1."""
        return torch.where(ids >= 0, self.columns[ids.clamp(min=0)], -1)

    def columns_for(self, size: int) -> Tensor:
        """Return int64 [size], for each id of a target with `size` ids its index in the vocabulary, or -1."""
        missing = size - len(self.columns)
        return F.pad(self.columns, (0, missing), value=-1) if missing else self.columns

    @property
    def raw_size(self) -> int:
        """The number of values in a token's state before `HiddenStateTap.finish`."""
        return (len(self.config.reads_layers) + 1) * self.config.hidden

    def layer(self, name: str) -> Any:
        """Return `fuse` or `project`, packed for our own kernels if `pack` has done so."""
        return self._packed.get(name, getattr(self, name))

    @property
    def compiled_inputs(self) -> CompiledInputs | None:
        """The compiled call that makes the body's inputs; None if our kernels can't make them."""
        return self._packed.get("inputs")

    def pack(self) -> None:
        """Pack the layers outside the body if our CPU kernels can multiply them, except layers with hooks."""
        # Replace all layers in one assignment, because a running lane may ask for a layer at any time.
        self._packed = self._pack()

    def _pack(self) -> dict[str, Any]:
        compiles = not is_accelerator(self.vocabulary.device) and self.body.dtype in SIXTEEN_BIT
        if not compiles or not cpu_kernels.available():
            return {}
        from kernels.cpu.kinds import PANEL  # imports numba

        from .weights.compiled import compiled, is_plain

        layers = {name: getattr(self, name) for name in ("fuse", "project")}
        packed: dict[str, Any] = {name: compiled(layer) for name, layer in layers.items() if is_plain(layer)}
        required = {"fuse", "project"} if self.config.reads_layers else {"fuse"}
        # The compiled call writes whole panels, so the hidden size must be a multiple of PANEL.
        if self.config.reads_states and required <= packed.keys() and self.config.hidden % PANEL == 0:
            project = packed["project"] if self.config.reads_layers else None
            embedded = self._embed(self.vocabulary).float()
            packed["inputs"] = CompiledInputs(self._table(), packed["fuse"], project, embedded)
            # Compile the call, or load its code from disk, before any clock runs.
            packed["inputs"](self.vocabulary[:1], torch.zeros(1, self.raw_size))
        return packed

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the packed layers, which can't be pickled."""
        return {**self.__dict__, "_packed": {}}

    def own_weights(self) -> dict[str, Tensor]:
        """Return the weights to store: all except the target's embedding and output layer."""
        shared = ("body.lm_head", "body.model.embed_tokens")
        return {name: value for name, value in self.state_dict().items() if not name.startswith(shared)}

    def save(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write config and weights to a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.detach() for name, value in self.own_weights().items()}
        if dtype != torch.float32:
            # Round to float16 first, so that bfloat16 and float16 files hold the same weights.
            tensors = {name: value.half() for name, value in tensors.items()}
        tensors = {name: value.to(dtype).contiguous() for name, value in tensors.items()}
        tensors["vocabulary"] = self.vocabulary.to(torch.int32)
        part = folder / (WEIGHTS + ".part")
        save_file(tensors, part)
        config = {"draft_head": asdict(self.config), "sha256": sha256(part)}
        os.replace(part, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(config, indent=4) + "\n", encoding="utf-8")


def is_draft_head(folder: Path) -> bool:
    """Return whether the folder holds a draft head."""
    try:
        return "draft_head" in json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def load_draft_head(folder: Path, target: PreTrainedModel) -> DraftHead:
    """Load the head in a folder, on the target's device and in its dtype.

    Raises:
        PairError: if the head is for another target, or does not fit into the device's memory.
        WeightsError: if its files can't be read, or if the weights don't match the digest in its config.
    """
    try:
        stored_config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        fields, digest = stored_config["draft_head"], sha256(folder / WEIGHTS)
        # Heads of earlier versions have no digest, and may have fields that we no longer read.
        if stored_config.get("sha256", digest) != digest:
            raise ValueError(f"{WEIGHTS} has another sha256 than {CONFIG} says")
        fields_read = {name: value for name, value in fields.items() if name not in ("positions", "link_rank")}
        config = HeadConfig(**{**fields_read, "reads_layers": tuple(fields.get("reads_layers", ()))})
        tensors = load_file(folder / WEIGHTS)
        vocabulary = tensors.pop("vocabulary").long()
        head = DraftHead(target, config, vocabulary)
        if not any(name.startswith("pointer.") for name in tensors):
            # Heads of earlier versions have no pointer: zeros leave their logits unchanged.
            tensors |= {
                f"pointer.{name}": torch.zeros_like(part) for name, part in head.pointer.named_parameters()
            }
        missing = set(head.own_weights()) - set(tensors)
        if missing:
            raise WeightsError(f"The draft in {folder} lacks {sorted(missing)[0]}: fetch it again or train one.")
        head.load_state_dict(tensors, strict=False)
        head.to(target.device, target.dtype)
    except BassError:
        raise
    except torch.OutOfMemoryError as error:
        raise PairError(f"{folder} does not fit into the device's memory: choose a smaller draft.") from error
    except Exception as error:
        raise WeightsError(
            f"The draft in {folder} can't be read ({' '.join(str(error).split()):.300}): fetch it again, or train "
            "one with `python -m distill train`."
        ) from error
    return head.eval().requires_grad_(False)
