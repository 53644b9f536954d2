"""Attention over rows that share a prefix, by torch's fused kernel for CPUs.

Contract: `attend_in_parts` of prefix.py for the plans that `takes` accepts: the same values within rounding. No
matrix of scores is written, whose memory costs a CPU more than its products once it outgrows the caches. Torch's
kernel returns each part's log-sum-exp, with which the parts are merged (bifurcated attention, arXiv 2403.08845).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..plan import AttentionPlan, Window
from .prefix import Pair, readers


def takes(query: Tensor, plan: AttentionPlan, window: Window | None) -> bool:
    """Whether torch's kernel serves this step: on a CPU, and every row sees all of its prefix and nothing else."""
    shared = plan.shared
    if shared is None or not plan.host or query.device.type != "cpu" or window is not None or plan.gap is not None:
        return False
    read = {(group, start) for group, start in zip(shared.host_groups, shared.host_starts, strict=True) if start}
    return len({group for group, _ in read}) == len(read)


def attend(
    query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, prefix: Pair, bias: Tensor | None, scale: float
) -> Tensor:
    """query [B, Hkv, M, D], folded (M = group x S); key, value [B, Hkv, extent, D], prefix [G, Hkv, P, D].

    bias [B, 1, M, extent] is added to the scores of own columns. Returns [B, Hkv, M, D].
    """
    assert plan.shared is not None
    out, lse = _flash(query, key, value, bias, scale)
    for group, rows, columns in plan.once("readers", lambda: list(readers(plan, prefix[0].shape[0]))):
        # All rows and queries of the group are one matrix for each key-value head.
        joined = query[rows].transpose(0, 1).flatten(1, 2)[None]
        keys, values = (one[group : group + 1, :, :columns] for one in prefix)
        part, weight = _flash(joined, keys, values, None, scale)
        part = part[0].unflatten(1, (-1, query.shape[2])).transpose(0, 1)
        weight = weight[0].unflatten(1, (-1, query.shape[2])).transpose(0, 1)
        # The prefix's share of the softmax's sum: 1 / (1 + e^(own - prefix)).
        share = torch.sigmoid(weight - lse[rows])[..., None].to(out.dtype)
        out[rows] = torch.lerp(out[rows], part, share)
    return out


def _flash(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """[B, H, M, D] and its log-sum-exp [B, H, M]."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(query, key, value, attn_mask=bias, scale=scale)
    return out, lse
