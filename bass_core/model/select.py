"""Choose the class that runs a model on its device.

`select_model` prefers a forward of our own. It takes one if the model's modules are what their class makes
(weights/modified.py) and if a trial gives the same logits (probe.py). Otherwise, and for models split over
devices, CausalModel runs the model's own code. `shape_of` describes the launches of the chosen class for
machine/gpu_kernels.py.
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
from .eagle import EagleBody, EagleHead, EagleStep
from .weights.modified import why_modified
from .weights.placement import is_split
from .weights.quantized import outputs_of, quantise_model
from .weights.shape import config_value, context_of, head_dim

# The reason that is reported if the modules are those of the class but our own forward computes other logits.
_DIFFERS = "our kernels compute other logits than its own code"


def select_model(model: PreTrainedModel | DraftHead, tried: CausalModel | None = None) -> CausalModel:
    """Make a CausalModel that runs the model, or a draft head's body, without changing the model.

    `tried` is the model's forward before the model changed, or on another device. If `tried` is given, the model
    is not tested for capture again, because that test makes waits in other threads raise. The new forward takes
    over the earlier result if its class is the same; otherwise it is captured only if its class is known never to
    wait.
    """
    if isinstance(model, EagleHead):
        return EagleStep(model.body)
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
    """Return a head's body: a copy in int8 if our CPU kernels run it, else the body itself.

    A draft spends most of its time on reading the head's weights, and int8 doesn't reduce acceptance
    (docs/figures.md, "Precisions").
    """
    body: PreTrainedModel = head.body
    if not is_accelerator(body.device) and _class_of(body)[0] is not CausalModel:
        body = copy.deepcopy(body)
        quantise_model(body, "int8")
    return body


def _fastest(model: PreTrainedModel) -> CausalModel:
    """Return a forward of our own if a trial confirms it, else a CausalModel."""
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
    """Return whether our forward gives the same logits as the model's own code.

    Raises:
        PairError: if the model's own code fails.
    """
    expected = probe.expect(shadow_of(model), type(model).__name__, context_of(model.config))
    # Our forwards know no windows, so they would not drop the tokens that transformers' cache drops.
    return expected is None or (not expected.slides and probe.agrees(selected, expected))


def _class_of(model: PreTrainedModel) -> tuple[type[CausalModel], str | None]:
    """Return the class that the model's modules and device allow.

    The second value is the reason for CausalModel, or None if there is nothing to report.
    """
    if is_split(model):
        return CausalModel, None
    if not is_accelerator(model.device):
        reason = llama_compiled.why_not(model) or why_modified(model)
        return (CausalModel, reason) if reason else (llama_compiled.LlamaCompiled, None)
    if on_zero_gpu():
        # On ZeroGPU there is no device yet on which weights could be joined.
        return CausalModel, None
    if llama_cuda.fits(model) and llama_cuda.has_room(model):
        reason = why_modified(model)
        return (CausalModel, reason) if reason else (llama_cuda.LlamaCuda, None)
    return CausalModel, None


def shape_of(model: PreTrainedModel, vocab: int, verifies: bool, named: bool = False) -> Shape:
    """Return what the model's kernel launches depend on.

    `vocab` is the number of logits kept. `verifies` is true for the target, and `named` for a draft head's body.
    """
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    heads = config_value(config, "num_attention_heads") or 0
    caps = (getattr(config, name, None) for name in ("attn_logit_softcapping", "attn_logit_softcap"))
    eagle = isinstance(model, EagleBody)
    uses_own_forward = eagle or _class_of(model)[0] is llama_cuda.LlamaCuda
    return Shape(
        dtype=str(model.dtype)[6:],
        heads=heads,
        kv_heads=config_value(config, "num_key_value_heads") or heads,
        head_dim=head_dim(config),
        outputs=outputs_of(model),
        vocab=vocab,
        hidden=config.hidden_size if uses_own_forward else 0,
        mlp=config.intermediate_size if uses_own_forward else 0,
        normed=type(model).__name__ == "Qwen3ForCausalLM" or getattr(model, "has_head_norms", False),
        windows=tuple(sorted(layer == "sliding_attention" for layer in layers)),
        capped=any(caps),
        verifies=verifies,
        named=named,
        doubled=eagle,
    )
