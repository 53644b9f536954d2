"""Verification of chains, by every rule of rules.py: which drafts are accepted, and which token the target adds.

Contract (p = target, q = draft, Leviathan's letters; Chen et al. 2302.01318 write them the other way round): by
rejection sampling, draft x_i is accepted while u_i < p_i(x_i) / q_i(x_i); after the first rejection at i the next
token comes from norm(max(0, p_i - q_i)), after none from p_{l+1}. Block verification judges a row's drafts
together (block.py). So the text is distributed as the target's own, whatever the draft. Each row has its own
number of drafts and of acceptances. All results stay on the device; `Outcome.host` is the round's one
synchronisation. A row's drafts from the first that can't be judged on count as if they had not been drafted
(acceptance.py). A token with q = 0, which an honest drafter can't have drawn, is accepted where p is above 0.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from kernels.support import LeftOut, available, is_accelerator

from ..machine.transfer import to_host
from ..sample.distribution import argmax, compiled, filters, largest, probabilities
from ..sample.draw import draw
from ..sample.noise import NoiseKeys, Role, uniform
from ..sample.params import SamplingParams
from ..sample.rows import pick, residual
from .acceptance import (
    UNSOUND,
    Outcome,
    RowOutcome,
    accepted_prefix,
    judged_drafts,
    mark_unlikely,
    probability_at,
    sound_columns,
)
from .block import chances, last_passed
from .rules import AUTOMATIC, Rule, Verification


def first_tokens(logits: Tensor, keys: NoiseKeys, params: SamplingParams) -> Tensor:
    """The target's own draw for logits [B, V], where nothing was drafted: int64 [B]."""
    if params.greedy:
        return argmax(logits)
    return _drawn(logits, keys, params)[0]


def plain(logits: Tensor, keys: NoiseKeys, params: SamplingParams) -> list[RowOutcome]:
    """The outcomes of a round without drafts: the target's own draws for logits [B, V], in one copy."""
    if not params.greedy:
        drawn = to_host(torch.stack([column.float() for column in _drawn(logits, keys, params)], dim=1)).tolist()
        return [RowOutcome(0, int(token), chance, []) for token, chance in drawn]
    drawn = to_host(torch.stack([column.float() for column in largest(logits)], dim=1)).tolist()
    # A NaN counts as the largest.
    sound = [math.isfinite(logit) for _, logit in drawn]
    return [
        RowOutcome(0, int(token) if fit else UNSOUND, float(fit), [])
        for (token, _), fit in zip(drawn, sound, strict=True)
    ]


def _drawn(logits: Tensor, keys: NoiseKeys, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """The target's own draw int64 [B], UNSOUND where there is none, and its probability."""
    if compiled(logits):
        none = torch.zeros(len(logits), 0, dtype=torch.long)
        count = torch.zeros(len(logits), dtype=torch.long)
        one = _in_one_call(Rule.REJECTION, logits[:, None], none, None, count, keys, params)
        return one.next_token, one.next_p
    p = probabilities(logits, params)
    tokens = draw(p, keys.seed, keys.sequence_ids, keys.positions, keys.stream(Role.TARGET))
    chances = p.gather(-1, tokens[:, None])[:, 0]
    return mark_unlikely(tokens, chances), chances


def verify(
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
    """Verify drafts int64 [B, l], of which the first num_drafted[b] of row b are real, by logits [B, l+1, V].

    The logits are the target's. draft_probs float32 [B, l, V]: what each draft was drawn from; None: point masses.
    `synthetic` replaces the test by a coin of that probability. A row's next token is UNSOUND where the logits
    after its accepted drafts are, or where it had no probability.
    """
    accelerator = is_accelerator(logits.device)
    if not accelerator and compiled(logits) and synthetic is None:
        if not params.greedy:
            return _in_one_call(verification.chains, logits, drafts, draft_probs, num_drafted, keys, params)
        choices, values = largest(logits)
        sound = values.isfinite()
        judged = judged_drafts(sound, None, num_drafted)
        return _marked(_agreed(choices, drafts, judged), sound, judged)
    sound, drawn_from = sound_columns(logits), draft_probs
    if params.greedy or synthetic is not None or verification.coupled:
        drawn_from = None  # no test reads q
    judged, outcome = judged_drafts(sound, drawn_from, num_drafted), None
    given: Any = (logits, drafts, draft_probs, judged, keys, params)
    ways: Any = {"verification": verification, "synthetic": synthetic}
    if accelerator and available(logits.device):
        from .rejection_triton import verify_on_device  # imports triton

        with suppress(LeftOut):
            outcome = verify_on_device(*given, **ways)
    if outcome is None:
        outcome = verify_here(*given, **ways)
    return _marked(outcome, sound, judged)


def verify_here(
    logits: Tensor,
    drafts: Tensor,
    draft_probs: Tensor | None,
    num_drafted: Tensor,
    keys: NoiseKeys,
    params: SamplingParams,
    *,
    verification: Verification,
    synthetic: float | None,
) -> Outcome:
    """`verify` in torch, where all num_drafted[b] drafts of a row can be judged."""
    width = drafts.shape[1]
    drafted = torch.arange(width, device=drafts.device) < num_drafted[:, None]
    ids, positions = keys.at(width)
    if synthetic is not None:
        u = uniform(keys.seed, ids, positions, keys.stream(Role.SYNTHETIC)[:, None])
        chance = torch.full_like(u, synthetic)
        accepted = accepted_prefix((u < chance) & drafted)
        next_token = _own_choice(logits, keys, params, accepted)
        unknown = torch.full_like(accepted, torch.nan, dtype=torch.float32)
        return Outcome(accepted, next_token, chance, torch.ones_like(u), u, unknown, drafts)
    if params.greedy:
        return _agreed(argmax(logits), drafts, num_drafted)
    return _verify_sampled(
        verification.chains, probabilities(logits, params), drafts, draft_probs, num_drafted, keys
    )


def _agreed(choices: Tensor, drafts: Tensor, num_drafted: Tensor) -> Outcome:
    """Greedy: drafts int64 [B, l] are accepted while they equal the target's choices int64 [B, l + 1]."""
    width = drafts.shape[1]
    drafted = torch.arange(width, device=drafts.device) < num_drafted[:, None]
    agrees = (choices[:, :width] == drafts).float()
    accepted = accepted_prefix((agrees > 0) & drafted)
    next_token = choices.gather(1, accepted[:, None])[:, 0]
    ones, half = torch.ones_like(agrees), torch.full_like(agrees, 0.5)
    certain = torch.ones_like(accepted, dtype=torch.float32)
    return Outcome(accepted, next_token, agrees, ones, half, certain, drafts)


def _marked(outcome: Outcome, sound: Tensor, judged: Tensor) -> Outcome:
    """The outcome of `judged` drafts; its next token is UNSOUND where the logits after the accepted ones are."""
    used = sound.gather(1, outcome.accepted[:, None])[:, 0]
    outcome.next_token, outcome.judged = outcome.next_token.where(used, UNSOUND), judged
    return outcome


def _in_one_call(
    rule: Rule,
    logits: Tensor,
    drafts: Tensor,
    draft_probs: Tensor | None,
    num_drafted: Tensor,
    keys: NoiseKeys,
    params: SamplingParams,
) -> Outcome:
    """`verify` of sampled text on a CPU, by a compiled kernel."""
    from kernels.cpu.sampling import calls, verification  # imports numba

    numbers = {
        Rule.REJECTION: verification.REJECTION,
        Rule.BLOCK: verification.BLOCK_RULE,
        Rule.COUPLED: verification.COUPLED,
    }
    streams = keys.stream(Role.ACCEPT), keys.stream(Role.RESIDUAL), keys.stream(Role.TARGET)
    made = calls.verify(
        logits, drafts, draft_probs, num_drafted, keys.seed, keys.sequence_ids, keys.positions, streams,
        calls.Filters(*filters(params)), numbers[rule],
    )  # fmt: skip
    chance = made.chance if rule is Rule.BLOCK else None
    return Outcome(
        made.accepted, made.next_token, made.p, made.q, made.u, made.next_p, drafts, chance, made.judged
    )


def _verify_sampled(
    rule: Rule, p: Tensor, drafts: Tensor, draft_probs: Tensor | None, num_drafted: Tensor, keys: NoiseKeys
) -> Outcome:
    width = drafts.shape[1]
    drafted = torch.arange(width, device=drafts.device) < num_drafted[:, None]
    p_drafts = p[:, :width].gather(2, drafts[..., None])[..., 0]
    q_drafts = torch.ones_like(p_drafts)
    if draft_probs is not None:
        q_drafts = draft_probs.gather(2, drafts[..., None])[..., 0]
    chance = None
    if rule is Rule.COUPLED:
        ids, positions = keys.at(width + 1)
        choices = draw(p, keys.seed, ids, positions, keys.stream(Role.TARGET)[:, None])
        accepted = accepted_prefix((choices[:, :width] == drafts) & drafted)
        next_token = choices.gather(1, accepted[:, None])[:, 0]
        u = torch.full_like(p_drafts, torch.nan)
    else:
        # u is spaced 2**-32 near 0 and 2**-24 near 1: as fine as p and q are in float32.
        u = uniform(keys.seed, *keys.at(width), keys.stream(Role.ACCEPT)[:, None])
        reach = torch.ones_like(p[:, :, 0])
        if rule is Rule.BLOCK:
            chance, reach = chances(p, p_drafts, q_drafts, draft_probs, num_drafted)
            accepted = last_passed((u < chance) & drafted)
        else:
            accepted = accepted_prefix((u * q_drafts < p_drafts) & drafted)
        next_token = _recover(p, drafts, draft_probs, accepted, num_drafted, keys, reach)
    next_p = probability_at(p, accepted, next_token)
    return Outcome(accepted, mark_unlikely(next_token, next_p), p_drafts, q_drafts, u, next_p, drafts, chance)


def _own_choice(logits: Tensor, keys: NoiseKeys, params: SamplingParams, accepted: Tensor) -> Tensor:
    moved = NoiseKeys(keys.seed, keys.sequence_ids, keys.positions + accepted)
    return first_tokens(pick(logits, torch.arange(len(accepted), device=accepted.device), accepted), moved, params)


def _recover(
    p: Tensor,
    drafts: Tensor,
    draft_probs: Tensor | None,
    accepted: Tensor,
    num_drafted: Tensor,
    keys: NoiseKeys,
    reach: Tensor,
) -> Tensor:
    """The token after the accepted drafts, int64 [B]: recovered after a rejection, else the target's own.

    reach [B, l+1]: what a recovered one's p is multiplied with, by the number of accepted drafts (block.py).
    """
    rows = torch.arange(len(accepted), device=accepted.device)
    at_end = p[rows, accepted]
    rejected = accepted < num_drafted
    streams = torch.where(rejected, keys.stream(Role.RESIDUAL), keys.stream(Role.TARGET))
    weights = at_end
    if drafts.shape[1]:
        index = accepted.clamp(max=drafts.shape[1] - 1)
        if draft_probs is None:
            left = at_end.scatter(1, drafts[rows, index][:, None], 0.0)
        else:
            left = residual(at_end, draft_probs[rows, index], reach[rows, accepted])
        # Where p and q agree, rounding can leave nothing of p - q; its limit is p itself.
        usable = rejected & (left.sum(-1) > 0)
        weights = torch.where(usable[:, None], left, at_end)
    return draw(weights, keys.seed, keys.sequence_ids, keys.positions + accepted, streams)
