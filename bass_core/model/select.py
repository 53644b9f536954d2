"""Which class runs a model on its device.

Contract: `select_model` chooses the fastest class that computes the model: one with a forward of our own if it
fits, else CausalModel, which runs the model's own code, as a model that is split over devices needs it. `shape_of`
says what the launches of the chosen class depend on (machine/gpu_kernels.py).
"""

from __future__ import annotations

import copy

from transformers import PreTrainedModel

from kernels.shapes import Shape
from kernels.support import is_accelerator, on_zero_gpu

from . import llama_cpu as llama_compiled
from . import llama_cuda
from .base import CausalModel
from .capturable import mark_capturable
from .draft_head import DraftHead
from .weights.placement import is_split
from .weights.quantized import held, quantise_model
from .weights.shape import head_dim


def select_model(model: PreTrainedModel | DraftHead, tried: CausalModel | None = None) -> CausalModel:
    """A CausalModel that runs the model, or a head's body; the model itself is not changed.

    tried: the same model on another device, which says whether it can be captured: trying makes waits in other
    threads raise.
    """
    model = _body(model) if isinstance(model, DraftHead) else model
    selected = _class_of(model)(model)
    if tried is None:
        mark_capturable(selected)
    else:
        selected.capturable = tried.capturable
    return selected


def _body(head: DraftHead) -> PreTrainedModel:
    """A head's body; a copy in int8 where our own kernels multiply on a CPU.

    Most of what a draft takes is reading the head's weights, and after rounding as many drafts are accepted
    (docs/figures.md, "Precisions").
    """
    body: PreTrainedModel = head.body
    if not is_accelerator(body.device) and not llama_compiled.why_not(body):
        body = copy.deepcopy(body)
        quantise_model(body, "int8")
    return body


def _class_of(model: PreTrainedModel) -> type[CausalModel]:
    if is_split(model):
        return CausalModel
    if not is_accelerator(model.device):
        return CausalModel if llama_compiled.why_not(model) else llama_compiled.LlamaCompiled
    if on_zero_gpu():
        # There is no device yet on which weights could be joined (see on_zero_gpu).
        return CausalModel
    return llama_cuda.LlamaCuda if llama_cuda.fits(model) and llama_cuda.has_room(model) else CausalModel


def shape_of(model: PreTrainedModel, vocab: int, verifies: bool, named: bool = False) -> Shape:
    """What the model's launches depend on; see Shape. named: it is a draft head's body."""
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    caps = (getattr(config, name, None) for name in ("attn_logit_softcapping", "attn_logit_softcap"))
    own = _class_of(model) is llama_cuda.LlamaCuda
    return Shape(
        dtype=str(model.dtype)[6:],
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim(config),
        outputs=held(model.get_output_embeddings()).shape[0],
        vocab=vocab,
        hidden=config.hidden_size if own else 0,
        mlp=config.intermediate_size if own else 0,
        normed=type(model).__name__ == "Qwen3ForCausalLM",
        windows=tuple(sorted(layer == "sliding_attention" for layer in layers)),
        capped=any(caps),
        verifies=verifies,
        named=named,
    )
