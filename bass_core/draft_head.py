"""A draft head: one or more layers on top of the target's own embedding, last hidden state and head.

Contract: slot t reads [embedding of token t, state of slot t-1] and gives a state that stands for the target's
last hidden state at t, and logits over a reduced vocabulary (rows of the target's head; q is 0 elsewhere). States
of settled tokens come from the target, those of drafted ones from the head itself (as in EAGLE, arXiv 2401.15077,
and Recurrent Drafter, arXiv 2403.09919). Only the head's own weights are stored; what it shares with the target
is read from the target. Non-goals: targets that are not Llama-shaped.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from .errors import PairError, WeightsError
from .packed import PackedLinear

CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True)
class HeadConfig:
    """How many layers, and whether the target's states are read; `hidden` must be the target's."""

    layers: int
    hidden: int
    reads_states: bool = True


class DraftHead(nn.Module):
    """`body` is a small Llama that is fed embeddings and whose head has `len(vocabulary)` rows."""

    vocabulary: Tensor
    embedding: Tensor
    fuse: Any

    def __init__(self, target: PreTrainedModel, config: HeadConfig, vocabulary: Tensor) -> None:
        """vocabulary int64 [V']: the target's ids that the head can propose, in any order."""
        super().__init__()
        own: Any = target.config.get_text_config()
        if own.model_type != "llama" or own.hidden_size != config.hidden:
            raise PairError(
                f"this draft head is for Llama-shaped targets of hidden size {config.hidden}; "
                f"{type(target).__name__} has {own.hidden_size}: choose another draft."
            )
        self.config = config
        self.fuse = nn.Linear((2 if config.reads_states else 1) * config.hidden, config.hidden, bias=False)
        fields = {**own.to_dict(), "num_hidden_layers": config.layers, "vocab_size": len(vocabulary)}
        fields |= {"tie_word_embeddings": False, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
        for name in ("architectures", "layer_types", "quantization_config", "dtype", "torch_dtype"):
            fields.pop(name, None)
        self.body = LlamaForCausalLM(LlamaConfig(**fields))
        self.body.model.embed_tokens = nn.Embedding(1, config.hidden)
        self.body.lm_head.requires_grad_(False)
        self.body.model.embed_tokens.requires_grad_(False)
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        table: Any = target.get_input_embeddings()
        self.register_buffer("embedding", table.weight.detach(), persistent=False)
        head: Any = target.get_output_embeddings()
        self.body.lm_head.weight.data = head.weight.detach()[vocabulary].to(self.body.dtype)

    def inputs(self, ids: Tensor, states: Tensor) -> Tensor:
        """What the body is fed [B, S, hidden] for ids int64 [B, S] and the states [B, S, hidden] before them."""
        x = F.embedding(ids, self.embedding).to(states.dtype)
        if self.config.reads_states:
            x = torch.cat((x, states), dim=-1)
        if isinstance(self.fuse, nn.Linear):
            x = x.to(self.fuse.weight.dtype)
        out: Tensor = self.fuse(x)
        return out

    def pack(self) -> None:
        """Lay the fusing layer out for this CPU; what was packed is not trained any more."""
        if isinstance(self.fuse, nn.Linear) and self.fuse.weight.device.type == "cpu":
            self._unpacked = (self.fuse,)
            self.fuse = PackedLinear(self.fuse)

    def __getstate__(self) -> dict[str, Any]:
        """For another process: with the layer as it was before `pack`, whose layout can't be sent."""
        state = dict(self.__dict__)
        if unpacked := state.pop("_unpacked", None):
            state["_modules"] = {**state["_modules"], "fuse": unpacked[0]}
        return state

    def own_weights(self) -> dict[str, Tensor]:
        """What is stored: all but the target's embedding and head."""
        shared = ("body.lm_head", "body.model.embed_tokens")
        return {name: value for name, value in self.state_dict().items() if not name.startswith(shared)}

    def save(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write config and weights, each replaced whole."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.detach().to(dtype).contiguous() for name, value in self.own_weights().items()}
        tensors["vocabulary"] = self.vocabulary.to(torch.int32)
        part = folder / (WEIGHTS + ".part")
        save_file(tensors, part)
        (folder / CONFIG).write_text(json.dumps({"draft_head": asdict(self.config)}, indent=4) + "\n")
        os.replace(part, folder / WEIGHTS)


def is_draft_head(folder: Path) -> bool:
    """Whether a folder holds a draft head (and no model of its own)."""
    try:
        return "draft_head" in json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError):
        return False


def load_draft_head(folder: Path, target: PreTrainedModel) -> DraftHead:
    """The head stored in a folder, on the target's device, in its dtype.

    Raises PairError where it is for another target, WeightsError where its files can't be read.
    """
    try:
        config = HeadConfig(**json.loads((folder / CONFIG).read_text())["draft_head"])
        tensors = load_file(folder / WEIGHTS)
        vocabulary = tensors.pop("vocabulary").long()
    except Exception as error:
        raise WeightsError(
            f"The draft in {folder} can't be read ({error}): fetch it again, or train one with "
            "`python -m distill train`."
        ) from error
    head = DraftHead(target, config, vocabulary)
    missing = set(head.own_weights()) - set(tensors)
    if missing:
        raise WeightsError(f"The draft in {folder} lacks {sorted(missing)[0]}: fetch it again or train one.")
    head.load_state_dict(tensors, strict=False)
    return head.to(target.device, target.dtype).eval().requires_grad_(False)
