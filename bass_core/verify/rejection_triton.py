"""`verify` on an accelerator, with kernels/triton/accept.py and block.py. Importing this imports triton.

Decisions and noise are those of rejection.py, which is the reference. PyTorch applies temperature, top-k and
top-p. Nothing waits for the device.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels.support import on
from kernels.triton import accept as kernel
from kernels.triton import block

from ..sample.distribution import probabilities
from ..sample.draw_triton import seed_on
from ..sample.noise import NoiseKeys, Role
from ..sample.params import SamplingParams
from .acceptance import Outcome, mark_unlikely, probability_at
from .rules import AUTOMATIC, Rule, Verification


def verify_on_device(
    logits: Tensor,
    drafts: Tensor,
    draft_probs: Tensor | None,
    num_drafted: Tensor,
    keys: NoiseKeys,
    params: SamplingParams,
    *,
    verification: Verification = AUTOMATIC,
    synthetic: float | None = None,
) -> Outcome:
    """Verify as `verify` does; all num_drafted[b] drafts of a row can be judged."""
    with on(logits.device):
        return _verify(logits, drafts, draft_probs, num_drafted, keys, params, verification, synthetic)


def _verify(
    logits: Tensor,
    drafts: Tensor,
    draft_probs: Tensor | None,
    num_drafted: Tensor,
    keys: NoiseKeys,
    params: SamplingParams,
    verification: Verification,
    synthetic: float | None,
) -> Outcome:
    seed = seed_on(keys.seed, logits.device)
    at = (keys.sequence_ids, keys.positions, seed)
    accept = partial(kernel.accept, begins=keys.begins)
    choose = partial(accept, None, None, drafts, num_drafted, verification=kernel.AcceptRule.CHOICES)
    p = None if params.greedy else probabilities(logits, params)
    if synthetic is not None:
        choices = logits.argmax(-1) if p is None else None
        accepted, next_token, *tests = accept(
            p, None, drafts, num_drafted, choices, *at, verification=kernel.AcceptRule.COIN, chance=synthetic
        )
        if p is not None:
            next_token = mark_unlikely(next_token, probability_at(p, accepted, next_token))
        unknown = torch.full_like(keys.positions, torch.nan, dtype=torch.float32)
        return Outcome(accepted, next_token, tests[0], tests[1], tests[2], unknown, drafts)
    if p is None:
        judged = choose(logits.argmax(-1), *at)
        return Outcome(*judged, next_p=torch.ones_like(keys.positions, dtype=torch.float32), drafts=drafts)
    rule = verification.chains
    if rule is not Rule.COUPLED:
        block_chances = block.chances(p, draft_probs, drafts, num_drafted) if rule is Rule.BLOCK else None
        kind = kernel.AcceptRule.REJECTION if block_chances is None else kernel.AcceptRule.BLOCK
        accepted, next_token, *tests = accept(
            p, draft_probs, drafts, num_drafted, None, *at, verification=kind, block=block_chances
        )
        next_p = probability_at(p, accepted, next_token)
        next_token, chance = mark_unlikely(next_token, next_p), None if block_chances is None else block_chances[0]
        return Outcome(accepted, next_token, tests[0], tests[1], tests[2], next_p, drafts, chance)
    ids, positions = keys.at(drafts.shape[1] + 1)
    own_choices = kernel.draw(p, ids, positions, keys.stream(Role.TARGET)[:, None], seed)
    accepted, next_token, *_ = choose(own_choices, *at)
    p_drafts = p[:, :-1].gather(2, drafts[..., None])[..., 0]
    q_drafts = torch.ones_like(p_drafts)
    if draft_probs is not None:
        q_drafts = draft_probs.gather(2, drafts[..., None])[..., 0]
    no_coin = torch.full_like(p_drafts, torch.nan)
    next_p = probability_at(p, accepted, next_token)
    return Outcome(accepted, mark_unlikely(next_token, next_p), p_drafts, q_drafts, no_coin, next_p, drafts)
