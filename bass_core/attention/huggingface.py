"""Ragged attention inside transformers' models.

Contract: a model whose attention implementation is NAME attends by the row lengths of the step that travels
with the call (`model(..., ragged=step, ragged_backend="pad")`), never by a mask. A layer's sliding window and
logit soft-cap are honoured; what an architecture adds beyond that is refused, not ignored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from kernels.backends import BACKENDS
from kernels.plan import AttentionPlan

from ..errors import PairError

NAME = "bass_ragged"
_UNSUPPORTED = ("s_aux", "sinks", "position_bias", "head_mask", "alibi", "indices_topk")


def ragged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    ragged: AttentionPlan | None = None,
    ragged_backend: str = "pad",
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [B, Hq, S, D], key and value [B, Hkv, extent, D] from RaggedCache.

    Returns ([B, S, Hq, D], None). Raises PairError where the model asks for attention that is not built.
    """
    asked = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if ragged is None or asked:
        what = f"attention with {', '.join(asked)}" if asked else "an attention call without row lengths"
        raise PairError(f"{type(module).__name__} needs {what}, which is not supported; choose another model.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    backend = BACKENDS[ragged_backend]
    out = backend(query, key, value, ragged, scaling=scale, window=sliding_window, softcap=softcap)
    return out, None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The lengths say what a query may see: no mask is built."""
    return None


AttentionInterface.register(NAME, ragged_attention)
AttentionMaskInterface.register(NAME, _no_mask)
