"""Which class runs a model on its device.

Contract: `select_model` chooses the fastest class that computes the model: one with a forward of our own if the
model's modules are those of its class and a trial agrees (weights/modified.py, probe.py), else CausalModel, which
runs the model's own code, as a model that is split over devices needs it. `shape_of` says what the launches of the
chosen class depend on (machine/gpu_kernels.py).
"""

from __future__ import annotations

import copy

from transformers import PreTrainedModel

from kernels.shapes import Shape
from kernels.support import is_accelerator, on_zero_gpu

from . import llama_cpu as llama_compiled
from . import llama_cuda, probe
from .base import CausalModel, shadow_of
from .capturable import mark_capturable
from .draft_head import DraftHead
from .weights.modified import why_modified
from .weights.placement import is_split
from .weights.quantized import outputs_of, quantise_model
from .weights.shape import context_of, head_dim

# Our own forward and the model's own code compute different logits, though its modules are those of its class.
_DIFFERS = "our kernels compute other logits than its own code"


def select_model(model: PreTrainedModel | DraftHead, tried: CausalModel | None = None) -> CausalModel:
    """A CausalModel that runs the model, or a head's body; the model itself is not changed.

    tried: what ran the model before it changed, or runs it on another device. It says whether the model can be
    captured, because trying that makes waits in other threads raise. If another class runs the model now, only a
    forward that is known never to wait is captured.
    """
    model = _body(model) if isinstance(model, DraftHead) else model
    selected = _fastest(model)
    if tried is None:
        mark_capturable(selected)
    elif type(selected) is type(tried):
        selected.capturable = tried.capturable
    else:
        selected.capturable = selected.capturable and selected.never_waits
    return selected


def _body(head: DraftHead) -> PreTrainedModel:
    """A head's body; a copy in int8 where our own kernels multiply on a CPU.

    Most of what a draft takes is reading the head's weights, and after rounding as many drafts are accepted
    (docs/figures.md, "Precisions").
    """
    body: PreTrainedModel = head.body
    if not is_accelerator(body.device) and _class_of(body)[0] is not CausalModel:
        body = copy.deepcopy(body)
        quantise_model(body, "int8")
    return body


def _fastest(model: PreTrainedModel) -> CausalModel:
    """A forward of our own if a trial agrees with the model's own code, else CausalModel."""
    kind, reason = _class_of(model)
    if kind is not CausalModel:
        selected = kind(model)
        if trial(model, selected):
            return selected
        reason = _DIFFERS
    selected = CausalModel(model)
    selected.reason = reason
    return selected


def trial(model: PreTrainedModel, selected: CausalModel) -> bool:
    """Whether a forward of ours computes what the model's own code does. Raises PairError if that code fails."""
    expected = probe.expect(shadow_of(model), type(model).__name__, context_of(model.config))
    return expected is None or probe.agrees(selected, expected)


def _class_of(model: PreTrainedModel) -> tuple[type[CausalModel], str | None]:
    """The class that a model's modules and device allow, and why it is CausalModel if a reader should know."""
    if is_split(model):
        return CausalModel, None
    if not is_accelerator(model.device):
        reason = llama_compiled.why_not(model) or why_modified(model)
        return (CausalModel, reason) if reason else (llama_compiled.LlamaCompiled, None)
    if on_zero_gpu():
        # There is no device yet on which weights could be joined (see on_zero_gpu).
        return CausalModel, None
    if llama_cuda.fits(model) and llama_cuda.has_room(model):
        reason = why_modified(model)
        return (CausalModel, reason) if reason else (llama_cuda.LlamaCuda, None)
    return CausalModel, None


def shape_of(model: PreTrainedModel, vocab: int, verifies: bool, named: bool = False) -> Shape:
    """What the model's launches depend on; see Shape. named: it is a draft head's body."""
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    caps = (getattr(config, name, None) for name in ("attn_logit_softcapping", "attn_logit_softcap"))
    own = _class_of(model)[0] is llama_cuda.LlamaCuda
    return Shape(
        dtype=str(model.dtype)[6:],
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim(config),
        outputs=outputs_of(model),
        vocab=vocab,
        hidden=config.hidden_size if own else 0,
        mlp=config.intermediate_size if own else 0,
        normed=type(model).__name__ == "Qwen3ForCausalLM",
        windows=tuple(sorted(layer == "sliding_attention" for layer in layers)),
        capped=any(caps),
        verifies=verifies,
        named=named,
    )
