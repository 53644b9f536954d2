"""A target model, its draft and their tokenizer.

Contract: both models use the same token-to-id map. This, and whether each model is supported, is checked when
the pair is made. The user's models are not changed, and later changes by the user take effect at the next call
(`refresh`). If the two vocabularies differ only in padding rows, logits are cut to the ids that both have.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from transformers import PreTrainedModel

from kernels.shapes import Shape
from kernels.support import is_accelerator, on_zero_gpu

from ..errors import PairError
from ..machine import cpu_kernels, gpu_kernels
from ..machine.torch_state import ours
from .attention import attention_words, choose_backend, measure_flash
from .base import CausalModel, refuse_unsupported
from .draft_head import DraftHead
from .fitting import fitting
from .select import select_model, shape_of
from .weights.modified import Watch
from .weights.placement import has_waiting, home_device, is_split, places
from .weights.quantized import outputs_of, weight_dtype
from .weights.shape import head_dim

HEAD_ON_SPLIT = (
    "A draft head can't follow a target that is split over several devices: give a draft model, or none."
)


class ModelPair:
    """target, draft (or None) and tokenizer (or None: then prompts are token ids and texts are None).

    A draft may be a causal LM of its own or a head on the target's states (model/draft_head.py).
    `default_drafter` is what drafter="auto" means: a name of draft/registry.py, or "auto" (the draft model
    if there is one, else prompt lookup). Raises PairError if the two don't fit or one is not supported.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | DraftHead | None = None,
        tokenizer: Any = None,
        *,
        name: str | None = None,
        default_drafter: str = "auto",
    ) -> None:
        if isinstance(draft, DraftHead) and is_split(target):
            raise PairError(HEAD_ON_SPLIT)
        self.target, self.draft, self.tokenizer, self.name = target, draft, tokenizer, name
        self.default_drafter = default_drafter
        # Held during a refresh, so that two concurrent calls don't both pack a model.
        self._refreshing = threading.RLock()
        self._watches: list[Watch] = []
        self._prepare()

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: without the lock."""
        return {name: value for name, value in vars(self).items() if name != "_refreshing"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _refreshing=threading.RLock())

    @ours()
    def _prepare(self, target_tried: CausalModel | None = None, draft_tried: CausalModel | None = None) -> None:
        """Choose what runs the models, and pack their weights.

        Args:
            target_tried, draft_tried: what ran them before they changed (select_model's `tried`).
        """
        target, draft = self.target, self.draft
        own_model = draft.body if isinstance(draft, DraftHead) else draft
        for model in (target, own_model):
            if model is not None:
                refuse_unsupported(model)
                _refuse_device(home_device(model))
        whole = None if isinstance(draft, DraftHead) else draft
        self.vocab = _common_vocabulary(target, whole, self.tokenizer)
        gpu_kernels.prepare(self.device, self._shapes)
        # Its heads, as shape_key tells them apart.
        config = target.config.get_text_config()
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self._heads = (config.num_attention_heads, kv_heads, head_dim(config))
        measure_flash(self.device, self.dtype, *self._heads)
        # Weights that wait on the host or on disk come and go, as a ZeroGPU's do with its device.
        watched = not (has_waiting(target) or on_zero_gpu())
        models = [model for model in (target, draft) if watched and model is not None]
        # Made before packing, so that a change meanwhile is seen at the next call.
        watches = [{numbers: Watch(model, numbers) for numbers in (False, True)} for model in models]
        with cpu_kernels.compiling(self.device):
            target_step = select_model(target, target_tried)
            if isinstance(draft, DraftHead):
                draft.pack()
                target_step.readout = draft.readout()
            draft_step = None if draft is None else select_model(draft, draft_tried)
        self.target_step, self.draft_step = target_step, draft_step
        head = isinstance(draft, DraftHead)  # which copies rows of the target's output layer
        steps = [target_step] if draft_step is None else [target_step, draft_step]
        if is_accelerator(self.device):
            for watch in (watch for each in watches for watch in each.values()):
                watch.moved()
        self._watches = [watch[head or step.copies_weights] for watch, step in zip(watches, steps, strict=False)]

    def refresh(self) -> None:
        """Prepare the models again if one of them has changed since: its weights, modules or hooks.

        Every call asks this before it runs. Raises PairError if the models no longer fit or are not supported.
        """
        with self._refreshing:
            changed = [watch.changed() for watch in self._watches]
            if not any(changed):
                return
            if changed[0] and isinstance(self.draft, DraftHead):
                self.draft.follow(self.target)
            self._prepare(self.target_step, self.draft_step)

    def _shapes(self) -> list[Shape]:
        """What the launches of target and draft depend on."""
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
        """Where the target's inputs and outputs are; a target that is split over devices has more."""
        return home_device(self.target)

    @property
    def places(self) -> tuple[str, ...]:
        """Where the target's weights are: `device`, or the devices, "cpu" and "disk" of a target that is split."""
        return tuple(places(self.target)) if is_split(self.target) else (str(self.device),)

    @property
    def dtype(self) -> torch.dtype:
        """What the target computes in, whatever its weights are held in."""
        return self.target.dtype

    @property
    def weight_dtype(self) -> str:
        """What the target's weights are held in: "int4", "int8" or the name of `dtype`, such as "bfloat16"."""
        return weight_dtype(self.target)

    @property
    def computed_by(self) -> str | None:
        """What runs the target: "own kernels" on a CPU, "with AMX" if they use it, or "transformers' own model"
        and why.

        None on an accelerator, and for a target that is split, unless its modules were changed. What runs the
        draft is added if it is transformers' own model for another reason.
        """
        reason = self.target_step.reason
        here = not (is_accelerator(self.device) or is_split(self.target))
        tiles = here and self.dtype == torch.bfloat16 and cpu_kernels.has_tiles()
        own = ["own kernels with AMX" if tiles else "own kernels"] if here else []
        parts = [f"transformers' own model ({reason})"] if reason else own
        drafts = None if self.draft_step is None else self.draft_step.reason
        if drafts and drafts != reason:
            parts.append(f"for the draft transformers' own model ({drafts})")
        return ", ".join(parts) or None

    @property
    def attention(self) -> str | None:
        """Which kernels attend on an accelerator if nothing else is asked for; None elsewhere."""
        if not is_accelerator(self.device):
            return None
        backend = choose_backend("auto", self.device, self.dtype)
        return attention_words(backend, (self.device, self.dtype, *self._heads, False))

    @property
    def context_length(self) -> int:
        """The most tokens, prompt and answer together, that the target can hold."""
        return self.target_step.context

    def default_eos(self) -> frozenset[int]:
        """The ids that end a text, from the target's generation config."""
        config = getattr(self.target, "generation_config", None)
        ids = config.eos_token_id if config is not None else self.target.config.eos_token_id
        if ids is None:
            return frozenset()
        several = list(ids) if isinstance(ids, list | tuple | set) else [ids]
        if not all(type(one) is int for one in several):
            raise PairError(
                f"The model's generation config has eos_token_id {ids!r}, which is no token id or list of them: "
                "correct it, or give eos_token_id."
            )
        return frozenset(several)


def _refuse_device(device: torch.device) -> None:
    """Raises PairError for a device that has no streams and events, such as mps."""
    if device.type == "mps":
        raise PairError("Models on the device mps are not supported: move them to the CPU or to a CUDA device.")


def _common_vocabulary(target: PreTrainedModel, draft: PreTrainedModel | None, tokenizer: Any) -> int:
    """How many logits to keep. Raises PairError if the two models' ids can't be the same."""
    size = outputs_of(target)
    if draft is None:
        return size
    other = outputs_of(draft)
    known = None if tokenizer is None else len(tokenizer)
    if size != other and (known is None or min(size, other) < known):
        raise PairError(
            f"the draft's vocabulary has {other} ids and the target's {size}: {fitting(known or size)}"
        )
    return min(size, other)


def check_same_tokens(target_tokenizer: Any, draft_tokenizer: Any) -> None:
    """Raises PairError unless both tokenizers map the same tokens to the same ids."""
    ours, theirs = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    if ours != theirs:
        differing = sum(theirs.get(token) != index for token, index in ours.items())
        raise PairError(
            f"the draft's tokenizer differs from the target's in {max(differing, 1)} tokens: {fitting(len(ours))}"
        )
