"""Which attention backend a request uses.

Contract: `choose_backend` checks a name, or chooses for "auto"; nothing is run.
"""

from __future__ import annotations

import torch

from kernels.backends import BACKENDS, why_backend_unavailable
from kernels.support import has_tensor_cores, is_accelerator

from ..errors import RequestError


def choose_backend(attention: str, device: torch.device, dtype: torch.dtype | None = None) -> str:
    """The name of the backend for "auto" or a given name; dtype: the model's, if known.

    Raises RequestError for a backend that can't run here or can't take that dtype.
    """
    if attention == "auto":
        return _fastest(device, dtype)
    if not isinstance(attention, str) or attention not in BACKENDS:
        known = ", ".join(sorted(BACKENDS))
        raise RequestError(f"attention must be auto or one of {known}; got {attention!r}.")
    reason = why_backend_unavailable(attention, device, dtype)
    if reason:
        raise RequestError(f'attention="{attention}" can\'t run here: {reason}. Choose attention="auto".')
    return attention


def _fastest(device: torch.device, dtype: torch.dtype | None) -> str:
    """Our kernel; flash-attn where Triton is missing; torch's elsewhere.

    A T4 (compute capability 7.5) also uses torch's: its half-precision kernels use the tensor cores there, ours
    would not (read from the code that Triton emits; not measured).
    """
    if not is_accelerator(device):
        return "sdpa"
    if why_backend_unavailable("fused", device) is None and has_tensor_cores(device):
        return "fused"
    return "flash" if dtype is not None and why_backend_unavailable("flash", device, dtype) is None else "sdpa"
