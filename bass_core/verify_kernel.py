"""`verify` and `draw` on a GPU: the same decisions and the same noise, by kernels/accept.py.

Contract: the arguments and results of bass_core/verify.py and bass_core/sampling.py, which are the reference. What
comes before the test (temperature, top-k, top-p) stays torch's. Nothing synchronises with the host.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from kernels import accept as kernel
from kernels.support import on

from .noise import Role
from .sampling import SamplingParams, probabilities
from .transfer import to_device
from .verify import Keys, Verdict, probability_at


def verify_on_device(
    logits: Tensor,
    drafts: Tensor,
    draft_probs: Tensor | None,
    counts: Tensor,
    keys: Keys,
    params: SamplingParams,
    *,
    rule: str = "chen",
    synthetic: float | None = None,
) -> Verdict:
    """See `verify`."""
    with on(logits.device):
        return _verify(logits, drafts, draft_probs, counts, keys, params, rule, synthetic)


def _verify(
    logits: Tensor,
    drafts: Tensor,
    draft_probs: Tensor | None,
    counts: Tensor,
    keys: Keys,
    params: SamplingParams,
    rule: str,
    synthetic: float | None,
) -> Verdict:
    seed = _seed(keys.seed, logits.device)
    where = (keys.sequence_ids, keys.positions, seed)
    p = None if params.greedy else probabilities(logits, params)
    if synthetic is not None:
        choices = logits.argmax(-1) if p is None else None
        judged = kernel.accept(p, None, drafts, counts, choices, *where, rule=kernel.Rule.COIN, chance=synthetic)
        return Verdict(*judged, next_p=torch.full_like(keys.positions, torch.nan, dtype=torch.float32))
    if p is None:
        judged = kernel.accept(None, None, drafts, counts, logits.argmax(-1), *where, rule=kernel.Rule.CHOICES)
        return Verdict(*judged, next_p=torch.ones_like(keys.positions, dtype=torch.float32))
    if rule == "chen":
        judged = kernel.accept(p, draft_probs, drafts, counts, None, *where, rule=kernel.Rule.CHEN)
        return Verdict(*judged, next_p=probability_at(p, judged[0], judged[1]))
    ids, positions = keys.at(drafts.shape[1] + 1)
    own = kernel.draw(p, ids, positions, torch.full_like(positions, int(Role.TARGET)), seed)
    accepted, next_token, *_ = kernel.accept(None, None, drafts, counts, own, *where, rule=kernel.Rule.CHOICES)
    p_drafts = p[:, :-1].gather(2, drafts[..., None])[..., 0]
    q_drafts = torch.ones_like(p_drafts)
    if draft_probs is not None:
        q_drafts = draft_probs.gather(2, drafts[..., None])[..., 0]
    no_coin = torch.full_like(p_drafts, torch.nan)
    next_p = probability_at(p, accepted, next_token)
    return Verdict(accepted, next_token, p_drafts, q_drafts, no_coin, next_p)


def draw_on_device(
    weights: Tensor, seed: int, sequence_ids: Tensor, positions: Tensor, roles: Tensor, ids: Tensor | None
) -> Tensor:
    """See `draw`."""
    with on(weights.device):
        return kernel.draw(weights, sequence_ids, positions, roles, _seed(seed, weights.device), ids)


@lru_cache(maxsize=16)
def _seed(seed: int, device: torch.device) -> Tensor:
    return to_device([seed], device)
