"""Attention over rows that share a prefix, by torch's fused kernel for CPUs.

Call `attend` for plans that `takes` accepts; the result is that of `attend_in_parts` (prefix.py) within rounding.
No matrix of scores is written: on a CPU, once it outgrows the caches, its memory traffic costs more than the
products. Torch's kernel returns each part's log-sum-exp, and the parts are merged with that (bifurcated
attention, arXiv 2403.08845).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..plan import AttentionPlan, Window
from .prefix import Pair, readers


def takes(query: Tensor, plan: AttentionPlan, window: Window | None) -> bool:
    """Return whether torch's kernel can serve this step.

    It can on a CPU if every row with a prefix sees the whole prefix, and neither a window nor a gap hides columns.
    """
    shared = plan.shared
    if shared is None or not plan.host or query.device.type != "cpu" or window is not None or plan.gap is not None:
        return False
    seen = {(group, start) for group, start in zip(shared.host_groups, shared.host_starts, strict=True) if start}
    return len({group for group, _ in seen}) == len(seen)


def attend(
    query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, prefix: Pair, bias: Tensor | None, scale: float
) -> Tensor:
    """Return attention [B, Hkv, M, D] of folded queries, M = group x S.

    Args:
        query: [B, Hkv, M, D].
        key, value: [B, Hkv, extent, D], own columns.
        prefix: keys and values [G, Hkv, P, D].
        bias: [B, 1, M, extent], added to the scores of own columns.
    """
    assert plan.shared is not None
    out, lse = _flash(query, key, value, bias, scale)
    for group, rows, columns in plan.once("readers", lambda: list(readers(plan, prefix[0].shape[0]))):
        # All rows and queries of a group form one matrix per key-value head.
        joined = query[rows].transpose(0, 1).flatten(1, 2)[None]
        keys, values = (stored[group : group + 1, :, :columns] for stored in prefix)
        part, weight = _flash(joined, keys, values, None, scale)
        part = part[0].unflatten(1, (-1, query.shape[2])).transpose(0, 1)
        weight = weight[0].unflatten(1, (-1, query.shape[2])).transpose(0, 1)
        # The prefix's share of the softmax: 1 / (1 + e^(own - prefix)).
        share = torch.sigmoid(weight - lse[rows])[..., None].to(out.dtype)
        out[rows] = torch.lerp(out[rows], part, share)
    return out


def _flash(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Return the result [B, H, M, D] and its log-sum-exp [B, H, M]."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(query, key, value, attn_mask=bias, scale=scale)
    return out, lse
