"""Attention of a few new tokens per row over a cache in which every row has its own length.

Row b has `lengths[b]` cached tokens and S new ones, whose keys and values are already in the cache at
`lengths[b] .. lengths[b]+S-1`. Query s of row b sees column c if `c <= lengths[b] + s` and, with a sliding window
w, `c > lengths[b] + s - w`. plan.py defines shared prefixes, gaps and trees.
Invariant: other contents of the cache (rejected drafts, padding) never affect a result.

All backends have one signature and differ only in how they divide the work, as in BASS (arXiv 2404.15778):

- `pad` pads every row to the longest; `split` launches once per row at its exact length;
- `sdpa` passes the padded problem and a mask to torch;
- `fused` is our Triton kernel, `flash` is flash-attn's (flash.py); both read the lengths on the device only;
- `mixed` is `flash` for shapes in which it was measured faster (FLASH_FASTER), otherwise `fused`.

`flash` supports neither prefixes nor gaps nor trees. Ask `why_backend_unavailable` before choosing a backend.
Dropout and training are not supported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .flash import version_for
from .plan import MAX_SPLIT_ROWS, AttentionPlan, Rotation
from .reference.attention import pad, sdpa, split
from .support import capability, why_unavailable


def fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    prefix: tuple[Tensor, Tensor] | None = None,
    rotation: Rotation | None = None,
) -> Tensor:
    """Compute attention with our Triton kernel. Same arguments and result as `pad`.

    `rotation`, for steps that `rotates_inside` accepts, is as in triton/attention.py.
    """
    from .triton.attention import fused as kernel  # imports triton

    options: Any = {"scaling": scaling, "window": window, "softcap": softcap, "prefix": prefix}
    return kernel(query, key, value, plan, **options, rotation=rotation)


def rotates_inside(backend: str, query: Tensor, key: Tensor, plan: AttentionPlan) -> bool:
    """Return whether `fused` computes this step, and rotates its queries and keys itself."""
    few = query.shape[1] // key.shape[1] * query.shape[2] <= MAX_SPLIT_ROWS
    return few and (backend == "fused" or (backend == "mixed" and _mixed(query, key, plan) is fused))


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    prefix: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute attention with the flash-attn that is installed (flash.py); fp16 and bf16 only.

    Same arguments and result as `pad`.

    Raises:
        ValueError: if the step has shared prefixes, a gap or trees, which flash-attn does not support, or if no
            flash-attn runs on the device.
    """
    if prefix is not None or plan.shared is not None or plan.gap is not None or plan.tree is not None:
        raise ValueError("flash-attn computes no shared prefixes, gaps or trees: choose another backend.")
    version = version_for(key.device)
    if version is None:
        raise ValueError("no flash-attn runs on this device: choose another backend.")
    states = query.transpose(1, 2).to(key.dtype), key.transpose(1, 2), value.transpose(1, 2)
    return version.attend(*states, plan.new_lengths, scaling, window, softcap).to(query.dtype)


# Keys of the shapes (`shape_key`) for which flash-attn was measured faster than our kernel; filled by
# bass_core/model/attention.py.
FLASH_FASTER: set[tuple[Any, ...]] = set()
# A step with more new tokens per row than this is a prompt; no round has that many.
_MAX_ROUND_TOKENS = 64
# A prompt step that reads more columns than this is long.
LONG_COLUMNS = 2048


def shape_key(query: Tensor, key: Tensor) -> tuple[Any, ...]:
    """Return the key of FLASH_FASTER: device, dtype, numbers of heads, head size, and the kind of step.

    The kind is "rounds", "prompts" or "long prompts". Rounds have one kind, because the host doesn't know the
    lengths of a captured step.
    """
    kind = "rounds"
    if query.shape[2] > _MAX_ROUND_TOKENS:
        kind = "long prompts" if key.shape[2] > LONG_COLUMNS else "prompts"
    return key.device, key.dtype, query.shape[1], *key.shape[1::2], kind


def mixed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    prefix: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Use flash-attn for plain steps of a shape in FLASH_FASTER, and our kernel otherwise.

    Same arguments and result as `pad`.
    """
    kernel = _mixed(query, key, plan)
    return kernel(query, key, value, plan, scaling=scaling, window=window, softcap=softcap, prefix=prefix)


def _mixed(query: Tensor, key: Tensor, plan: AttentionPlan) -> Callable[..., Tensor]:
    is_plain = plan.shared is None and plan.gap is None and plan.tree is None
    return flash if is_plain and shape_key(query, key) in FLASH_FASTER else fused


BACKENDS: dict[str, Callable[..., Tensor]] = {
    "pad": pad,
    "split": split,
    "sdpa": sdpa,
    "fused": fused,
    "flash": flash,
    "mixed": mixed,
}
# Backends whose launches can be captured once and replayed for any lengths. `split` is not one of them, because it
# needs the lengths on the host.
CAPTURABLE = ("fused", "flash", "mixed", "pad", "sdpa")
_MIN_EXTENT = 256


def captured_extent(backend: str, columns: int, max_columns: int) -> int:
    """Return how many columns a captured step reads.

    `fused`, `flash` and `mixed` stop at each row's own end, so one capture serves all lengths. The others compute
    every column and are captured once per power of two. For example, `pad` reads 512 columns if the longest row
    fills 300.

    Args:
        columns: columns that the longest row fills.
        max_columns: columns of the cache.
    """
    if backend in ("fused", "flash", "mixed"):
        return max_columns
    return min(max_columns, max(_MIN_EXTENT, 1 << (columns - 1).bit_length()))


def why_backend_unavailable(backend: str, device: torch.device, dtype: torch.dtype | None = None) -> str | None:
    """Return why a backend can't run on a device or with a dtype, or None if it can.

    The reason is a clause that ends a sentence.
    """
    if backend == "fused":
        return why_unavailable(device)
    if backend == "flash":
        return _why_no_flash(device, dtype)
    if backend == "mixed":
        return why_unavailable(device) or _why_no_flash(device, dtype)
    return None


def _why_no_flash(device: torch.device, dtype: torch.dtype | None) -> str | None:
    if device.type != "cuda":
        return "flash-attn needs a CUDA device"
    if capability(device) < 80:
        return "flash-attn needs a GPU of compute capability 8.0 or newer"
    if version_for(device) is None:
        return "no flash-attn that runs on this GPU can be imported (see requirements-gpu.txt)"
    if dtype not in (None, torch.float16, torch.bfloat16):
        return f"flash-attn takes float16 and bfloat16, and this model's numbers are {str(dtype)[6:]}"
    return None
