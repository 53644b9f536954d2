"""Attention of a few new tokens per row over a cache in which every row has its own length.

Contract: row b has `lengths[b]` tokens cached before this step and S new ones, whose keys and values already
stand in the cache at `lengths[b] .. lengths[b]+S-1`. Query s of row b sees column c when
`c <= lengths[b] + s` and, with a sliding window w, `c > lengths[b] + s - w`. Whatever else the cache holds
(rejected drafts, padding) never reaches a result.

The backends share one signature and differ only in how they cut the work, as BASS does (arXiv 2404.15778):
`pad` pads every row to the longest, `split` launches once a row at its exact length, `sdpa` hands the padded
problem and a mask to torch, `fused` is our Triton kernel and `flash` flash-attn's; these two read the lengths on
the device alone. `unavailable` says why a backend can't run here. Non-goals: dropout, training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .support import why_unavailable


@dataclass
class AttentionPlan:
    """Where the rows of one step stand: `lengths` int64 [B] on the device, `host` the same numbers on the host.

    `extent`: columns that any row of this step may see. A captured step is replayed for lengths that the host
    does not know yet, which reach up to `anywhere`. What layers share (masks, `ends`) is made once a step.
    """

    lengths: Tensor
    host: list[int]
    queries: int
    anywhere: int | None = None
    _masks: dict[int | None, Tensor] = field(default_factory=dict)
    _biases: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)
    _ends: Tensor | None = None

    @property
    def extent(self) -> int:
        return max(self.host) + self.queries if self.anywhere is None else self.anywhere

    @property
    def needs_mask(self) -> bool:
        """False when every query sees every column of the extent (one new token, all rows equally long)."""
        return self.anywhere is not None or self.queries > 1 or min(self.host) != max(self.host)

    @property
    def ends(self) -> Tensor:
        """int32 [B]: how long each row is with its new tokens."""
        if self._ends is None:
            self._ends = (self.lengths + self.queries).to(torch.int32)
        return self._ends

    def hidden(self, window: int | None) -> Tensor:
        """Bool [B, S, extent], true where a query must not look."""
        if window not in self._masks:
            columns = torch.arange(self.extent, device=self.lengths.device)
            last = self.lengths[:, None] + torch.arange(self.queries, device=self.lengths.device)
            last = last[:, :, None]
            hidden = columns > last
            self._masks[window] = hidden if window is None else hidden | (columns <= last - window)
        return self._masks[window]

    def bias(self, window: int | None, group: int, dtype: torch.dtype, kv_heads: int = 1) -> Tensor:
        """[B x kv_heads, group x S, extent], -inf where a query must not look and 0 elsewhere."""
        key = (window, group, dtype, kv_heads)
        if key not in self._biases:
            hidden = self.hidden(window)[:, None, None].expand(-1, kv_heads, group, -1, -1)
            bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._biases[key] = bias.masked_fill_(hidden, float("-inf")).flatten(2, 3).flatten(0, 1)
        return self._biases[key]


def pad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: AttentionPlan,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """One batched QK, one softmax and one batched PV over the padded maximum (BASS-PAD).

    query [B, Hq, S, D]; key, value [B, Hkv, extent, D]; returns [B, S, Hq, D] in the query's dtype.
    Grouped heads are folded into the query axis, so keys and values are never repeated.
    """
    bias = None
    if step.needs_mask or window is not None:
        bias = step.bias(window, query.shape[1] // key.shape[1], key.dtype, key.shape[1])
    return _attend(query, key, value, bias, scaling, softcap)


def split(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: AttentionPlan,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """One launch a sequence at its exact length (BASS-SPLIT). Same arguments and result as `pad`."""
    kv_heads, bias = key.shape[1], None
    if step.queries > 1 or window is not None:
        bias = step.bias(window, query.shape[1] // kv_heads, key.dtype, kv_heads)
    rows = []
    for row, cached in enumerate(step.host):
        one, extent = slice(row, row + 1), cached + step.queries
        mask = None if bias is None else bias[row * kv_heads : (row + 1) * kv_heads, :, :extent]
        rows.append(_attend(query[one], key[one, :, :extent], value[one, :, :extent], mask, scaling, softcap))
    return torch.cat(rows)


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: AttentionPlan,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """torch's scaled_dot_product_attention with an explicit mask. Same arguments and result as `pad`.

    Grouped heads are folded into the query axis here as well. A logit soft-cap is not part of that function's
    contract, so capped layers take `pad`'s way.
    """
    if softcap is not None:
        return pad(query, key, value, step, scaling=scaling, window=window, softcap=softcap)
    batch, heads, queries, dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    folded = query.to(key.dtype).reshape(batch, kv_heads, group * queries, dim)
    bias = None
    if step.needs_mask or window is not None:
        bias = step.bias(window, group, key.dtype)[:, None]
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=bias, scale=scaling)
    return out.reshape(batch, heads, queries, dim).transpose(1, 2).to(query.dtype)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scaling: float, softcap: float | None
) -> Tensor:
    """`bias` [B x Hkv, group x S, extent] is added to the scores."""
    batch, heads, queries, dim = query.shape
    _, kv_heads, extent, _ = key.shape
    # As few launches and views as it takes: for a few tokens they are much of what a CPU does here.
    folded = query.reshape(batch * kv_heads, -1, dim)
    folded = folded if query.dtype == key.dtype else folded.to(key.dtype)
    keys, values = key.view(-1, extent, dim).mT, value.view(-1, extent, dim)
    if softcap is not None:
        scores = torch.tanh(torch.bmm(folded, keys).float() * (scaling / softcap)) * softcap
        scores = scores if bias is None else scores + bias
    elif bias is not None:
        scores = torch.baddbmm(bias, folded, keys, alpha=scaling)
    else:
        scores = torch.bmm(folded if scaling == 1 else folded * scaling, keys)
    weights = torch.softmax(scores, -1, dtype=torch.float32)
    out = torch.bmm(weights if value.dtype == torch.float32 else weights.to(value.dtype), values)
    out = out.view(batch, heads, queries, dim).transpose(1, 2)
    return out if query.dtype == key.dtype else out.to(query.dtype)


def fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: AttentionPlan,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Our Triton kernel (triton/attention.py). Same arguments and result as `pad`."""
    from .triton.attention import fused as kernel  # imports triton

    return kernel(query, key, value, step, scaling=scaling, window=window, softcap=softcap)


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: AttentionPlan,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """flash-attn's kernel for caches with row lengths; fp16 and bf16 alone. Arguments and result as `pad`'s."""
    out: Tensor = _flash_attn()(
        query.transpose(1, 2).to(key.dtype),
        key.transpose(1, 2),
        value.transpose(1, 2),
        cache_seqlens=step.ends,
        softmax_scale=scaling,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        softcap=softcap or 0.0,
    )
    return out.to(query.dtype)


@cache
def _flash_attn() -> Any:
    """The symbol, not the package, is what counts: other distributions install a namespace of that name."""
    try:
        from flash_attn import flash_attn_with_kvcache
    except (ImportError, OSError, AttributeError):
        return None
    return flash_attn_with_kvcache


BACKENDS: dict[str, Callable[..., Tensor]] = {
    "pad": pad,
    "split": split,
    "sdpa": sdpa,
    "fused": fused,
    "flash": flash,
}
# `split` cuts its launches by the host's lengths; all others can be captured once and replayed for any lengths.
CAPTURABLE = ("fused", "flash", "pad", "sdpa")
_LEAST_EXTENT = 256


def captured_extent(backend: str, columns: int, most: int) -> int:
    """Columns that a captured step looks at when its longest row fills `columns`, of `most` in the cache.

    `fused` and `flash` stop at each row's own end, so one capture serves all lengths; the others compute every
    column, and are captured for each power of two.
    """
    if backend in ("fused", "flash"):
        return most
    return min(most, max(_LEAST_EXTENT, 1 << (columns - 1).bit_length()))


def unavailable(backend: str, device: torch.device, dtype: torch.dtype | None = None) -> str | None:
    """Why a backend can't run on a device, or not with a model of that dtype, in words that end a sentence.

    None where it can.
    """
    if backend == "fused":
        return why_unavailable(device)
    if backend == "flash":
        return _no_flash(device, dtype)
    return None


def _no_flash(device: torch.device, dtype: torch.dtype | None) -> str | None:
    if device.type != "cuda":
        return "flash-attn needs a CUDA device"
    if _flash_attn() is None:
        return "flash_attn_with_kvcache can't be imported"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "flash-attn needs a GPU of compute capability 8.0 or newer"
    if dtype not in (None, torch.float16, torch.bfloat16):
        return f"flash-attn takes float16 and bfloat16, and this model's numbers are {str(dtype)[6:]}"
    return None
