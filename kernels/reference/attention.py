"""Ragged attention in plain torch, in three versions; the reference of kernels/triton/attention.py.

All three take the same arguments and return the same values within rounding (kernels/backends.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..plan import AttentionPlan, Window
from . import prefix_sdpa
from .prefix import Pair, attend_in_parts, in_parts


def pad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan,
    *,
    scaling: float,
    window: Window | None = None,
    softcap: float | None = None,
    prefix: Pair | None = None,
) -> Tensor:
    """Compute one batched QK, one softmax and one batched PV over the longest row's columns (BASS-PAD).

    Grouped heads are folded into the query axis, so keys and values are never repeated.

    Args:
        query: [B, Hq, S, D].
        key, value: [B, Hkv, extent, D].
        window: the layer's sliding window or chunks.
        softcap: soft cap of the scores.
        prefix: keys and values [G, Hkv, P, D] of the shared prefixes; None if and only if the plan has no shared
            part.

    Returns:
        [B, S, Hq, D] in the query's dtype.

    Raises:
        ValueError: if only one of `prefix` and the plan's shared part is there.
    """
    if in_parts(plan, prefix):
        return attend_in_parts(query, key, value, plan, prefix, scaling=scaling, window=window, softcap=softcap)
    bias = None
    if plan.needs_mask or window is not None:
        bias = plan.bias(window, query.shape[1] // key.shape[1], key.dtype, key.shape[1])
    return _attend(query, key, value, bias, scaling, softcap)


def split(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan,
    *,
    scaling: float,
    window: Window | None = None,
    softcap: float | None = None,
    prefix: Pair | None = None,
) -> Tensor:
    """Launch once per row at its exact length (BASS-SPLIT). Same arguments and result as `pad`."""
    if in_parts(plan, prefix):
        options: Any = {"scaling": scaling, "window": window, "softcap": softcap}
        return attend_in_parts(query, key, value, plan, prefix, **options, padded=False)
    kv_heads, bias = key.shape[1], None
    if plan.queries > 1 or window is not None or plan.tree is not None or plan.gap is not None:
        bias = plan.bias(window, query.shape[1] // kv_heads, key.dtype, kv_heads)
    rows = []
    for row, cached in enumerate(plan.host):
        at, extent = slice(row, row + 1), cached + plan.queries
        mask = None if bias is None else bias[row * kv_heads : (row + 1) * kv_heads, :, :extent]
        rows.append(_attend(query[at], key[at, :, :extent], value[at, :, :extent], mask, scaling, softcap))
    return torch.cat(rows)


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan,
    *,
    scaling: float,
    window: Window | None = None,
    softcap: float | None = None,
    prefix: Pair | None = None,
) -> Tensor:
    """Call torch's scaled_dot_product_attention with an explicit mask. Same arguments and result as `pad`.

    Grouped heads are folded into the query axis here too. torch's function has no soft cap, so layers with a soft
    cap use `pad`. Steps over prefixes that some queries do not see whole also use `pad` (prefix_sdpa.py).
    """
    fused_prefix = softcap is None and prefix is not None and prefix_sdpa.takes(query, plan, window)
    if softcap is not None or (in_parts(plan, prefix) and not fused_prefix):
        return pad(query, key, value, plan, scaling=scaling, window=window, softcap=softcap, prefix=prefix)
    batch, heads, queries, dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    folded = query.to(key.dtype).reshape(batch, kv_heads, group * queries, dim)
    bias = None
    if plan.needs_mask or window is not None:
        bias = plan.bias(window, group, key.dtype)[:, None]
    if fused_prefix and prefix is not None:
        out = prefix_sdpa.attend(folded, key, value, plan, prefix, bias, scaling)
    else:
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=bias, scale=scaling)
    return out.reshape(batch, heads, queries, dim).transpose(1, 2).to(query.dtype)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scaling: float, softcap: float | None
) -> Tensor:
    """Return attention as `pad` does; `bias` [B x Hkv, group x S, extent] is added to the scores."""
    batch, heads, queries, dim = query.shape
    _, kv_heads, extent, _ = key.shape
    # Use few launches and views: in a step of a few tokens, they take much of the time on a CPU.
    folded = query.reshape(batch * kv_heads, -1, dim)
    folded = folded if query.dtype == key.dtype else folded.to(key.dtype)
    keys, values = key.reshape(-1, extent, dim).mT, value.reshape(-1, extent, dim)
    if softcap is not None:
        scores = torch.tanh(torch.bmm(folded, keys).float() * (scaling / softcap)) * softcap
        scores = scores if bias is None else scores + bias
    elif bias is not None:
        scores = torch.baddbmm(bias, folded, keys, alpha=scaling)
    else:
        scores = torch.bmm(folded * scaling, keys)
    weights = torch.softmax(scores, -1, dtype=torch.float32)
    out = torch.bmm(weights if value.dtype == torch.float32 else weights.to(value.dtype), values)
    out = out.view(batch, heads, queries, dim).transpose(1, 2)
    return out if query.dtype == key.dtype else out.to(query.dtype)
