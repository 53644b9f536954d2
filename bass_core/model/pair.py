"""A target model, its draft and their tokenizer.

Making a ModelPair checks that both models are supported and map the same tokens to the same ids. If the two
vocabularies differ only in padding rows, logits are cut to the ids that both have. The user's models are not
changed. If the user changes them, the change takes effect at the next call (`refresh`).
"""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kernels.shapes import Shape
from kernels.support import is_accelerator, on_zero_gpu

from ..errors import PairError
from ..machine import cpu_kernels, gpu_kernels
from ..machine.torch_state import torch_defaults
from .attention import choose_backend
from .base import CausalModel, refuse_unsupported
from .draft_head import DraftHead
from .flash import attention_words, measure_flash
from .select import select_model, shape_of
from .suggest_drafts import suggest_drafts
from .weights.modified import Watch, hash_of_code
from .weights.placement import has_offloaded, home_device, is_split, places
from .weights.quantized import outputs_of, weight_dtype
from .weights.shape import head_dim

HEAD_ON_SPLIT = (
    "A draft head can't follow a target that is split over several devices: give a draft model, or none."
)


class ModelPair:
    """A target, its draft and their tokenizer.

    Attributes:
        draft: a causal LM, a head on the target's states (draft_head.py), or None.
        tokenizer: None if prompts are token ids and texts are None.
        name: the name to show, or None.
        default_drafter: the meaning of drafter="auto": a name in draft/registry.py, or "auto" for the draft model
            if there is one, else prompt lookup.
        advice: a sentence that names a pair which suits this GPU better (loading/choose.py), or None.
        weight_dtype: the form of the target's weights: "int4", "int8" or the name of `dtype`, e.g. "bfloat16".
        code: the code that calling the target's modules runs, and the draft's, as two hashes.

    Raises:
        PairError: if the two models don't fit each other, or one is not supported.
    """

    advice: str | None = None

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | DraftHead | None = None,
        tokenizer: Any = None,
        *,
        name: str | None = None,
        default_drafter: str = "auto",
    ) -> None:
        _refuse_other_types(target, draft, tokenizer)
        if isinstance(draft, DraftHead) and is_split(target):
            raise PairError(HEAD_ON_SPLIT)
        self.target, self.draft, self.tokenizer, self.name = target, draft, tokenizer, name
        self.default_drafter = default_drafter
        # Prevents two concurrent calls from packing the same model.
        self._refreshing = threading.RLock()
        self._watches: list[Watch] = []
        self._prepared = target, draft
        self._prepare()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy only the models; packed weights and locks are made again."""
        make = partial(type(self), name=self.name, default_drafter=self.default_drafter)
        return make, (self.target, self.draft, self.tokenizer)

    @torch_defaults()
    def _prepare(self, target_tried: CausalModel | None = None, draft_tried: CausalModel | None = None) -> None:
        """Choose both models' forwards and pack their weights; the arguments are as `tried` of `select_model`."""
        target, draft = self.target, self.draft
        draft_body = draft.body if isinstance(draft, DraftHead) else draft
        for model in (target, draft_body):
            if model is not None:
                refuse_unsupported(model)
                _refuse_device(home_device(model))
        draft_model = None if isinstance(draft, DraftHead) else draft
        self.vocab = _common_vocabulary(target, draft_model, self.tokenizer)
        gpu_kernels.prepare(self.device, self._shapes)
        # The target's query heads, key-value heads and head size.
        config = target.config.get_text_config()
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self._heads = (config.num_attention_heads, kv_heads, head_dim(config))
        measure_flash(self.device, self.dtype, *self._heads)
        # Don't watch offloaded weights, because they come and go. Don't watch weights on ZeroGPU, because they
        # move with its device.
        watched = not (has_offloaded(target) or on_zero_gpu())
        models = [model for model in (target, draft) if watched and model is not None]
        # Start to watch before packing, so that a change during packing is noticed at the next call.
        watches = [Watch(model) for model in models]
        with cpu_kernels.compiling(self.device):
            target_step = select_model(target, target_tried)
            if isinstance(draft, DraftHead):
                draft.pack()
                target_step.readout = draft.readout()
            draft_step = None if draft is None else select_model(draft, draft_tried)
        self.target_step, self.draft_step = target_step, draft_step
        self.weight_dtype, self.code = weight_dtype(target), (hash_of_code(target), hash_of_code(draft))
        copies_rows = isinstance(draft, DraftHead)  # a head copies rows of the target's output layer
        steps = [target_step] if draft_step is None else [target_step, draft_step]
        for watch, step in zip(watches, steps, strict=False):
            watch.numbers = copies_rows or step.copies_weights
            if is_accelerator(self.device):
                watch.moved()
        self._watches = watches

    def refresh(self) -> None:
        """Prepare the models again if one has changed: its weights, modules or hooks.

        Every request starts with this call, so it also waits until all kernels are compiled.

        Raises:
            PairError: if the models no longer fit each other, are not supported, or are others.
        """
        if self._prepared[0] is not self.target or self._prepared[1] is not self.draft:
            raise PairError("The pair's target or draft was replaced: make a new ModelPair instead.")
        with self._refreshing:
            cpu_kernels.finish_compiling(self.device)
            changed = [watch.changed() for watch in self._watches]
            if not any(changed):
                return
            if changed[0] and isinstance(self.draft, DraftHead):
                self.draft.follow(self.target)
            self._prepare(self.target_step, self.draft_step)

    def _shapes(self) -> list[Shape]:
        """Return the shapes that decide which kernels the target and the draft launch."""
        shapes, draft = [shape_of(self.target, self.vocab, verifies=True)], self.draft
        if isinstance(draft, DraftHead):
            shapes.append(shape_of(draft.body, len(draft.vocabulary), verifies=False, named=True))
        elif draft is not None:
            shapes.append(shape_of(draft, self.vocab, verifies=False))
        return shapes

    def __repr__(self) -> str:
        draft = "no draft" if self.draft is None else f"draft {type(self.draft).__name__}"
        name = f"{self.name}: " if self.name else ""
        by = f", {self.computed_by}" if self.computed_by else ""
        return f"ModelPair({name}{type(self.target).__name__}, {draft}, {self.weight_dtype}, {self.device}{by})"

    @property
    def device(self) -> torch.device:
        """The device of the target's inputs and outputs; a split target uses others as well."""
        return home_device(self.target)

    @property
    def places(self) -> tuple[str, ...]:
        """The devices that hold the target's weights; a split target may also use "cpu" and "disk"."""
        return tuple(places(self.target)) if is_split(self.target) else (str(self.device),)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the target computes in, also if its weights are quantised."""
        return self.target.dtype

    @property
    def computed_by(self) -> str | None:
        """How the models are run, for the user; None if there is nothing to report.

        On a CPU it is "own kernels", "own kernels with AMX", or "transformers' own model" with the reason. On an
        accelerator and for a split target it is None, unless the target's modules were changed. If the draft runs
        transformers' own model for another reason, that reason is appended.
        """
        reason = self.target_step.reason
        on_cpu = not (is_accelerator(self.device) or is_split(self.target))
        tiles = on_cpu and self.dtype == torch.bfloat16 and cpu_kernels.has_tiles()
        own_kernels = ["own kernels with AMX" if tiles else "own kernels"] if on_cpu else []
        parts = [f"transformers' own model ({reason})"] if reason else own_kernels
        draft_reason = None if self.draft_step is None else self.draft_step.reason
        if draft_reason and draft_reason != reason:
            parts.append(f"for the draft transformers' own model ({draft_reason})")
        return ", ".join(parts) or None

    @property
    def attention(self) -> str | None:
        """The kernels that attend on an accelerator by default; None on other devices."""
        if not is_accelerator(self.device):
            return None
        backend = choose_backend("auto", self.device, self.dtype)
        return attention_words(backend, self.device, self.dtype, self._heads)

    @property
    def context_length(self) -> int:
        """The target's maximum number of tokens, prompt and answer together."""
        return self.target_step.context

    def default_eos(self) -> frozenset[int]:
        """Return the ids that end a text, according to the target's generation config.

        Raises:
            PairError: if the config's eos_token_id is not a token id or a list of them.
        """
        config = getattr(self.target, "generation_config", None)
        ids = config.eos_token_id if config is not None else self.target.config.eos_token_id
        if ids is None:
            return frozenset()
        ids_list = list(ids) if isinstance(ids, list | tuple | set) else [ids]
        if not all(type(eos) is int for eos in ids_list):
            raise PairError(
                f"The model's generation config has eos_token_id {ids!r}, which is not a token id or a list of "
                "them: correct it, or give eos_token_id."
            )
        return frozenset(ids_list)


def _refuse_other_types(target: Any, draft: Any, tokenizer: Any) -> None:
    """Raise PairError for values that are no models or no tokenizer, and for compiled models."""
    for role, model in (("target", target), ("draft", draft)):
        if role == "draft" and model is None:
            continue
        if hasattr(model, "_orig_mod"):
            raise PairError(f"The {role} is a result of torch.compile: give the model that was compiled.")
        if not (isinstance(model, nn.Module) and hasattr(model, "config")):
            raise PairError(
                f"The {role} must be a model of transformers; got {_shown(model)}: load_pair takes model names."
            )
    if tokenizer is not None and (isinstance(tokenizer, bytes) or not hasattr(tokenizer, "decode")):
        raise PairError(
            f"The tokenizer must be one of transformers; got {_shown(tokenizer)}: load it with "
            "AutoTokenizer.from_pretrained."
        )


def _shown(value: Any) -> str:
    plain = value is None or isinstance(value, str | bytes | os.PathLike | type)
    return f"{value!r:.80}" if plain else f"a {type(value).__name__}"


def _refuse_device(device: torch.device) -> None:
    """Raise PairError for a device without streams and events, such as mps, or without values."""
    if device.type == "meta" and not on_zero_gpu():
        raise PairError("The model's weights are on the device meta, so they have no values: load them first.")
    if device.type == "mps":
        raise PairError("Models on the device mps are not supported: move them to the CPU or to a CUDA device.")


def _common_vocabulary(target: PreTrainedModel, draft: PreTrainedModel | None, tokenizer: Any) -> int:
    """Return how many logits to keep, or raise PairError if the two models' ids differ."""
    size = outputs_of(target)
    if draft is None:
        return size
    draft_size = outputs_of(draft)
    tokenizer_size = None if tokenizer is None else len(tokenizer)
    if size != draft_size and (tokenizer_size is None or min(size, draft_size) < tokenizer_size):
        raise PairError(
            f"the draft's vocabulary has {draft_size} ids and the target's {size}: "
            f"{suggest_drafts(tokenizer_size or size)}"
        )
    return min(size, draft_size)


def check_same_tokens(target_tokenizer: Any, draft_tokenizer: Any) -> None:
    """Raise PairError unless both tokenizers map the same tokens to the same ids."""
    ours, theirs = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    if ours != theirs:
        differing = sum(theirs.get(token) != index for token, index in ours.items())
        raise PairError(
            f"the draft's tokenizer differs from the target's in {max(differing, 1)} tokens: "
            f"{suggest_drafts(len(ours))}"
        )
