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

from .support import obstacle


@dataclass
class RaggedStep:
    """Where the rows of one step stand: `lengths` int64 [B] on the device, `host` the same numbers on the host.

    `extent`: columns that any row of this step may see. A captured step is replayed for lengths that the host
    does not know yet (`anywhere`): its extent is all there is. Masks are made once and shared by all layers.
    """

    lengths: Tensor
    host: list[int]
    queries: int
    anywhere: int | None = None
    _masks: dict[int | None, Tensor] = field(default_factory=dict)
    _biases: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    @property
    def extent(self) -> int:
        return max(self.host) + self.queries if self.anywhere is None else self.anywhere

    @property
    def needs_mask(self) -> bool:
        """False when every query sees every column of the extent (one new token, all rows equally long)."""
        return self.anywhere is not None or self.queries > 1 or min(self.host) != max(self.host)

    def hidden(self, window: int | None) -> Tensor:
        """Bool [B, S, extent], true where a query must not look."""
        if window not in self._masks:
            columns = torch.arange(self.extent, device=self.lengths.device)
            last = self.lengths[:, None] + torch.arange(self.queries, device=self.lengths.device)
            last = last[:, :, None]
            hidden = columns > last
            self._masks[window] = hidden if window is None else hidden | (columns <= last - window)
        return self._masks[window]

    def bias(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor:
        """[B, 1, group x S, extent], -inf where a query must not look and 0 elsewhere."""
        key = (window, group, dtype)
        if key not in self._biases:
            hidden = self.hidden(window)
            bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._biases[key] = bias.masked_fill_(hidden, float("-inf")).repeat(1, group, 1)[:, None]
        return self._biases[key]


def pad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: RaggedStep,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """One batched QK, one softmax and one batched PV over the padded maximum (BASS-PAD).

    query [B, Hq, S, D]; key, value [B, Hkv, extent, D]; returns [B, S, Hq, D] in the query's dtype.
    Grouped heads are folded into the query axis, so keys and values are never repeated.
    """
    hidden = step.hidden(window) if step.needs_mask or window is not None else None
    return _attend(query, key, value, hidden, scaling, softcap)


def split(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: RaggedStep,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """One launch a sequence at its exact length (BASS-SPLIT). Same arguments and result as `pad`."""
    rows = []
    for row, cached in enumerate(step.host):
        one = slice(row, row + 1)
        extent = cached + step.queries
        hidden = step.hidden(window)[one, :, :extent] if step.queries > 1 or window is not None else None
        rows.append(_attend(query[one], key[one, :, :extent], value[one, :, :extent], hidden, scaling, softcap))
    return torch.cat(rows)


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: RaggedStep,
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
    bias = step.bias(window, group, key.dtype) if step.needs_mask or window is not None else None
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=bias, scale=scaling)
    return out.reshape(batch, heads, queries, dim).transpose(1, 2).to(query.dtype)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, scaling: float, softcap: float | None
) -> Tensor:
    batch, heads, queries, dim = query.shape
    kv_heads, extent = key.shape[1], key.shape[2]
    group = heads // kv_heads
    scaled = query.to(key.dtype) if scaling == 1 else query.to(key.dtype).mul(scaling)
    folded = scaled.reshape(batch * kv_heads, group * queries, dim)
    scores = torch.bmm(folded, key.flatten(0, 1).transpose(1, 2)).float()
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if hidden is not None:
        scores = scores.view(batch, kv_heads, group, queries, extent)
        scores = scores.masked_fill_(hidden[:, None, None], float("-inf"))
    weights = torch.softmax(scores.view(batch * kv_heads, group * queries, extent), dim=-1)
    out = torch.bmm(weights.to(value.dtype), value.flatten(0, 1))
    return out.view(batch, heads, queries, dim).transpose(1, 2).to(query.dtype)


def fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: RaggedStep,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Our Triton kernel (fused_attention.py). Same arguments and result as `pad`."""
    from .fused_attention import fused as kernel  # imports triton

    return kernel(query, key, value, step, scaling=scaling, window=window, softcap=softcap)


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: RaggedStep,
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
        cache_seqlens=(step.lengths + step.queries).to(torch.int32),
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


def unavailable(backend: str, device: torch.device) -> str | None:
    """Why a backend can't run on a device, in words that end a sentence, or None where it can."""
    if backend == "fused":
        return obstacle(device)
    if backend == "flash":
        if device.type != "cuda":
            return "flash-attn needs a CUDA device"
        return None if _flash_attn() is not None else "flash_attn_with_kvcache can't be imported"
    return None
