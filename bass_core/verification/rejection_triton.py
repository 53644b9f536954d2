"""`verify`, `draw` and top-p on a GPU: the same decisions and the same noise, by kernels/triton/accept.py and
triton/nucleus.py.

Contract: the arguments and results of bass_core/verification/rejection.py and bass_core/sampling/distribution.py,
which are the reference. What else comes before the test (temperature, top-k) stays torch's. Nothing synchronises
with the host.
"""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch import Tensor

from kernels.support import is_accelerator, on, runtime
from kernels.triton import accept as kernel
from kernels.triton import nucleus

from ..machine.transfer import to_device
from ..sampling.distribution import SamplingParams, probabilities
from ..sampling.noise import Role
from .rejection import NoiseKeys, Outcome, mark_unlikely, probability_at


def verify_on_device(
    logits: Tensor,
    drafts: Tensor,
    draft_probs: Tensor | None,
    counts: Tensor,
    keys: NoiseKeys,
    params: SamplingParams,
    *,
    rule: str = "chen",
    synthetic: float | None = None,
) -> Outcome:
    """See `verify`."""
    with on(logits.device):
        return _verify(logits, drafts, draft_probs, counts, keys, params, rule, synthetic)


def _verify(
    logits: Tensor,
    drafts: Tensor,
    draft_probs: Tensor | None,
    counts: Tensor,
    keys: NoiseKeys,
    params: SamplingParams,
    rule: str,
    synthetic: float | None,
) -> Outcome:
    seed = _seed(keys.seed, logits.device)
    where = (keys.sequence_ids, keys.positions, seed)
    accept = partial(kernel.accept, begins=keys.begins)
    p = None if params.greedy else probabilities(logits, params)
    if synthetic is not None:
        choices = logits.argmax(-1) if p is None else None
        accepted, next_token, *tests = accept(
            p, None, drafts, counts, choices, *where, rule=kernel.Rule.COIN, chance=synthetic
        )
        if p is not None:
            next_token = mark_unlikely(next_token, probability_at(p, accepted, next_token))
        unknown = torch.full_like(keys.positions, torch.nan, dtype=torch.float32)
        return Outcome(accepted, next_token, tests[0], tests[1], tests[2], unknown)
    if p is None:
        judged = accept(None, None, drafts, counts, logits.argmax(-1), *where, rule=kernel.Rule.CHOICES)
        return Outcome(*judged, next_p=torch.ones_like(keys.positions, dtype=torch.float32))
    if rule == "chen":
        accepted, next_token, *tests = accept(p, draft_probs, drafts, counts, None, *where, rule=kernel.Rule.CHEN)
        next_p = probability_at(p, accepted, next_token)
        return Outcome(accepted, mark_unlikely(next_token, next_p), tests[0], tests[1], tests[2], next_p)
    ids, positions = keys.at(drafts.shape[1] + 1)
    own = kernel.draw(p, ids, positions, keys.stream(Role.TARGET)[:, None], seed)
    accepted, next_token, *_ = accept(None, None, drafts, counts, own, *where, rule=kernel.Rule.CHOICES)
    p_drafts = p[:, :-1].gather(2, drafts[..., None])[..., 0]
    q_drafts = torch.ones_like(p_drafts)
    if draft_probs is not None:
        q_drafts = draft_probs.gather(2, drafts[..., None])[..., 0]
    no_coin = torch.full_like(p_drafts, torch.nan)
    next_p = probability_at(p, accepted, next_token)
    return Outcome(accepted, mark_unlikely(next_token, next_p), p_drafts, q_drafts, no_coin, next_p)


def draw_on_device(
    weights: Tensor, seed: int, sequence_ids: Tensor, positions: Tensor, streams: Tensor, ids: Tensor | None
) -> Tensor:
    """See `draw`."""
    with on(weights.device):
        return kernel.draw(weights, sequence_ids, positions, streams, _seed(seed, weights.device), ids)


def threshold_on_device(probs: Tensor, top_p: float) -> Tensor:
    """The least probability [..., 1] that top-p keeps of probs [..., V]."""
    with on(probs.device):
        return nucleus.threshold(probs, top_p)


@lru_cache(maxsize=16)
def _seed(seed: int, device: torch.device) -> Tensor:
    """The seed on the device, kept for lanes on any stream: so this waits, once a seed, until it is there."""
    made = to_device([seed], device)
    if is_accelerator(device):
        runtime(device).current_stream(device).synchronize()
    return made
