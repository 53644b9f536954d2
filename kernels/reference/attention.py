"""Ragged attention in plain torch, in three versions; the reference of kernels/triton/attention.py.

Contract: the three functions take the same arguments and return the same values within rounding; see
kernels/backends.py for what they compute.
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
    """One batched QK, one softmax and one batched PV over the padded maximum (BASS-PAD).

    query [B, Hq, S, D]; key, value [B, Hkv, extent, D]; prefix: keys and values [G, Hkv, P, D] of the prefixes
    that rows share, given if and only if the plan has a shared part (ValueError if not). Returns [B, S, Hq, D] in
    the query's dtype. Grouped heads are folded into the query axis, so keys and values are never repeated.
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
    """One launch per sequence at its exact length (BASS-SPLIT). Same arguments and result as `pad`."""
    if in_parts(plan, prefix):
        options: Any = {"scaling": scaling, "window": window, "softcap": softcap}
        return attend_in_parts(query, key, value, plan, prefix, **options, padded=False)
    kv_heads, bias = key.shape[1], None
    if plan.queries > 1 or window is not None or plan.tree is not None:
        bias = plan.bias(window, query.shape[1] // kv_heads, key.dtype, kv_heads)
    rows = []
    for row, cached in enumerate(plan.host):
        one, extent = slice(row, row + 1), cached + plan.queries
        mask = None if bias is None else bias[row * kv_heads : (row + 1) * kv_heads, :, :extent]
        rows.append(_attend(query[one], key[one, :, :extent], value[one, :, :extent], mask, scaling, softcap))
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
    """torch's scaled_dot_product_attention with an explicit mask. Same arguments and result as `pad`.

    Grouped heads are folded into the query axis here as well. torch's function has no logit soft-cap, so layers
    with one use `pad`, and so do steps over prefixes of which something is hidden (prefix_sdpa.py).
    """
    whole = softcap is None and prefix is not None and prefix_sdpa.takes(query, plan, window)
    if softcap is not None or (in_parts(plan, prefix) and not whole):
        return pad(query, key, value, plan, scaling=scaling, window=window, softcap=softcap, prefix=prefix)
    batch, heads, queries, dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    folded = query.to(key.dtype).reshape(batch, kv_heads, group * queries, dim)
    bias = None
    if plan.needs_mask or window is not None:
        bias = plan.bias(window, group, key.dtype)[:, None]
    if whole and prefix is not None:
        out = prefix_sdpa.attend(folded, key, value, plan, prefix, bias, scaling)
    else:
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=bias, scale=scaling)
    return out.reshape(batch, heads, queries, dim).transpose(1, 2).to(query.dtype)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scaling: float, softcap: float | None
) -> Tensor:
    """Attention as `pad` returns it; `bias` [B x Hkv, group x S, extent] is added to the scores."""
    batch, heads, queries, dim = query.shape
    _, kv_heads, extent, _ = key.shape
    # As few launches and views as possible: for a few tokens they take much of the time on a CPU.
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
