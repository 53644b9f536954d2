"""Which class runs a model on its device.

Contract: `select_model` chooses the fastest class that computes the model: one with a forward of our own if it
fits, else CausalModel, which runs the model's own code, as a model that is split over devices needs it.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from kernels.support import is_accelerator, on_zero_gpu

from . import llama_cpu as llama_compiled
from . import llama_cuda
from .base import CausalModel
from .capturable import mark_capturable
from .weights.placement import is_split


def select_model(model: PreTrainedModel, tried: CausalModel | None = None) -> CausalModel:
    """A CausalModel that runs the model; the model itself is not changed.

    tried: the same model on another device, which says whether it can be captured: trying makes waits in other
    threads raise.
    """
    selected = _class_of(model)(model)
    if tried is None:
        mark_capturable(selected)
    else:
        selected.capturable = tried.capturable
    return selected


def _class_of(model: PreTrainedModel) -> type[CausalModel]:
    if is_split(model):
        return CausalModel
    if not is_accelerator(model.device):
        return CausalModel if llama_compiled.why_not(model) else llama_compiled.LlamaCompiled
    if on_zero_gpu():
        # There is no device yet on which weights could be joined (see on_zero_gpu).
        return CausalModel
    return llama_cuda.LlamaCuda if llama_cuda.fits(model) and llama_cuda.has_room(model) else CausalModel
