"""A target model, its draft and their tokenizer.

Contract: both models use the same token-to-id map; this is checked when the pair is made, as is that each model
can be run at all. The models handed in stay as they were. Where only padding rows of the output differ, logits
are cut to the ids both have.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from kernels.support import is_accelerator, on_zero_gpu

from ..engine.capture import mark_capturable
from ..errors import PairError
from . import llama_cuda as gpu_model
from .base import CausalModel, refuse_unsupported
from .draft_head import DraftHead
from .llama_cpu import LlamaCpu, fits
from .ngram import NgramTable
from .weights import llama_int8 as int8_model
from .weights.quantize import is_quantized


class ModelPair:
    """target, draft (or None) and tokenizer (or None: then prompts are token ids and texts are None).

    A draft may be a causal LM of its own or a head on the target's states (models/draft_head.py).
    `default_drafter` is what drafter="auto" means: a name of drafting/registry.py, or "auto" (the draft model
    where there is one, else prompt lookup). `ngrams` is what the n-gram drafters read. Raises PairError where the
    two don't fit or one is not supported.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | DraftHead | None = None,
        tokenizer: Any = None,
        *,
        name: str | None = None,
        default_drafter: str = "auto",
        ngrams: NgramTable | None = None,
    ) -> None:
        own_model = draft.body if isinstance(draft, DraftHead) else draft
        for model in (target, own_model):
            if model is not None:
                refuse_unsupported(model)
                _refuse_device(model.device)
        self.target, self.draft, self.tokenizer, self.name = target, draft, tokenizer, name
        self.default_drafter, self.ngrams = default_drafter, ngrams
        whole = None if isinstance(draft, DraftHead) else draft
        self.vocab = _common_vocabulary(target, whole, tokenizer)
        self.target_step = _step_model(target)
        if isinstance(draft, DraftHead):
            draft.pack()
            self.target_step.readout = draft.readout()
        self.draft_step = None if own_model is None else _step_model(own_model)

    def __repr__(self) -> str:
        draft = "no draft" if self.draft is None else f"draft {type(self.draft).__name__}"
        name = f"{self.name}: " if self.name else ""
        return f"ModelPair({name}{type(self.target).__name__}, {draft}, {self.dtype}, {self.device})"

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def dtype(self) -> torch.dtype:
        return self.target.dtype

    @property
    def context_length(self) -> int:
        """Tokens of prompt and answer together that the target can hold."""
        return self.target_step.context

    def default_eos(self) -> frozenset[int]:
        """The ids that end a text by the target's generation config."""
        config = getattr(self.target, "generation_config", None)
        ids = config.eos_token_id if config is not None else self.target.config.eos_token_id
        if ids is None:
            return frozenset()
        return frozenset([ids] if isinstance(ids, int) else ids)


def _step_model(model: PreTrainedModel) -> CausalModel:
    step = _choose_step(model)
    mark_capturable(step)
    return step


def _choose_step(model: PreTrainedModel) -> CausalModel:
    if is_quantized(model):
        chosen = is_accelerator(model.device) and not on_zero_gpu() and int8_model.enabled()
        return int8_model.LlamaInt8(model) if chosen and int8_model.fits(model) else CausalModel(model)
    if not is_accelerator(model.device):
        return LlamaCpu(model) if fits(model) else CausalModel(model)
    # On ZeroGPU no device is there yet to join weights on (see on_zero_gpu).
    joined = not on_zero_gpu() and gpu_model.fits(model) and gpu_model.has_room(model)
    return gpu_model.LlamaCuda(model) if joined else CausalModel(model)


def _refuse_device(device: torch.device) -> None:
    """Raises PairError for a device that is neither the CPU nor driven by streams and events."""
    if device.type == "mps":
        raise PairError("Models on the device mps are not supported: move them to the CPU or to a CUDA device.")


def _outputs(model: PreTrainedModel) -> int:
    return int(model.get_output_embeddings().weight.shape[0])


def _common_vocabulary(target: PreTrainedModel, draft: PreTrainedModel | None, tokenizer: Any) -> int:
    """How many logits to keep. Raises PairError where the two models can't mean the same ids."""
    size = _outputs(target)
    if draft is None:
        return size
    other = _outputs(draft)
    known = None if tokenizer is None else len(tokenizer)
    if size != other and (known is None or min(size, other) < known):
        raise PairError(
            f"the draft's vocabulary has {other} ids and the target's {size}: choose a draft that was trained "
            "with the target's tokenizer."
        )
    return min(size, other)


def check_same_tokens(target_tokenizer: Any, draft_tokenizer: Any) -> None:
    """Raises PairError unless both tokenizers map the same tokens to the same ids."""
    ours, theirs = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    if ours != theirs:
        differing = sum(theirs.get(token) != index for token, index in ours.items())
        raise PairError(
            f"the draft's tokenizer differs from the target's in {max(differing, 1)} tokens: choose a draft "
            "that uses the same token-to-id map."
        )
