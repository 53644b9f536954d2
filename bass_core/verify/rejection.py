"""Verification of chains: which drafts are accepted, and which token the target adds. Start with `verify`.

With p = target and q = draft (Leviathan's letters; Chen et al. 2302.01318 swap them), rejection sampling accepts
draft x_i while u_i < p_i(x_i) / q_i(x_i). After the first rejection at i, the target draws the next token from
norm(max(0, p_i - q_i)); without a rejection, from p_{l+1}. Block verification (block.py) judges a row's drafts
together; rules.py lists the other rules. Under each of them the text has the target's distribution, whatever the
draft is.

Each row has its own number of drafts and of acceptances. Results stay on the device until `Outcome.host`, the
round's one synchronisation. A row's first draft that can't be judged, and all drafts after it, are treated as not
drafted (acceptance.py). A draft with q = 0, which an honest drafter can't have drawn, is accepted if p is above 0.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from kernels.support import CompileFailed, available, is_accelerator

from ..sample.distribution import (
    ColumnProbs,
    Probs,
    argmax,
    compiled,
    dense,
    filters,
    largest,
    probabilities,
)
from ..sample.draw import draw
from ..sample.noise import NoiseKeys, Role, uniform
from ..sample.params import SamplingParams
from ..sample.rows import RaggedRows, pick, residual
from ..sample.rows import padded as rows_padded
from .acceptance import (
    UNSOUND,
    Outcome,
    Outcomes,
    accepted_prefix,
    judged_drafts,
    mark_unlikely,
    probability_at,
    sound_columns,
    unpack,
)
from .block import chances, last_passed
from .rules import AUTOMATIC, Rule, Verification


def first_tokens(logits: Tensor, keys: NoiseKeys, params: SamplingParams) -> Tensor:
    """Draw the target's own token for logits [B, V], without drafts: int64 [B]."""
    if params.greedy:
        return argmax(logits)
    return _draw_targets_own(logits, keys, params)[0]


def plain(logits: Tensor, keys: NoiseKeys, params: SamplingParams) -> Outcomes:
    """Draw the target's own tokens for logits [B, V] in a round without drafts; copies to the host once."""
    return unpack(plain_packed(logits, keys, params))


def plain_packed(logits: Tensor, keys: NoiseKeys, params: SamplingParams) -> Tensor:
    """Draw as `plain` does, without copying to the host: float32 [B, 4], for `unpack`."""
    if params.greedy:
        tokens, logit = largest(logits)
        # The maximum of logits with a NaN is NaN.
        chances = logit.isfinite().float()
        tokens = tokens.where(chances > 0, UNSOUND)
    else:
        tokens, chances = _draw_targets_own(logits, keys, params)
    none = torch.zeros_like(chances)
    return torch.stack((none, tokens.float(), chances, none), dim=1)


def _draw_targets_own(logits: Tensor, keys: NoiseKeys, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Return the target's own token int64 [B], or UNSOUND if there is none, and its probability [B]."""
    if compiled(logits):
        none = torch.zeros(len(logits), 0, dtype=torch.long)
        count = torch.zeros(len(logits), dtype=torch.long)
        outcome = _verify_compiled(Rule.REJECTION, logits[:, None], None, none, None, count, keys, params)
        return outcome.next_token, outcome.next_p
    p = probabilities(logits, params)
    tokens = draw(p, keys.seed, keys.sequence_ids, keys.positions, keys.stream(Role.TARGET))
    chances = p.gather(-1, tokens[:, None])[:, 0]
    return mark_unlikely(tokens, chances), chances


def verify(
    logits: Tensor | RaggedRows,
    drafts: Tensor,
    draft_probs: Probs | None,
    num_drafted: Tensor,
    keys: NoiseKeys,
    params: SamplingParams,
    *,
    verification: Verification = AUTOMATIC,
    synthetic: float | None = None,
) -> Outcome:
    """Verify the drafts of each row.

    Args:
        logits: [B, l+1, V], the target's, after the newest token and after each draft. RaggedRows have no rows for
            padding.
        drafts: int64 [B, l].
        draft_probs: float32 [B, l, V], the distributions that the drafts were drawn from, or the same as
            ColumnProbs; None for point masses.
        num_drafted: int64 [B], the number of drafts of each row; the rest of `drafts` is padding.
        keys: keys of the round's random numbers.
        params: how tokens are sampled.
        verification: the rule.
        synthetic: accept each draft with this probability instead of testing it.

    Returns:
        The outcome on the device. A row's next token is UNSOUND if it had no probability, or if the logits after
        the accepted drafts are unsound.
    """
    rows, places = (logits.rows, logits.places) if isinstance(logits, RaggedRows) else (logits, None)
    accelerator = is_accelerator(rows.device)
    if not accelerator and compiled(rows) and synthetic is None:
        if not params.greedy:
            return _verify_compiled(
                verification.chains, rows, places, drafts, draft_probs, num_drafted, keys, params
            )
        from kernels.cpu.sampling import calls  # imports numba

        greedy = calls.verify_greedy(rows, drafts, num_drafted, places)
        tests = greedy.p, greedy.q, greedy.u
        return Outcome(greedy.accepted, greedy.next_token, *tests, greedy.next_p, drafts, judged=greedy.judged)
    logits, draft_probs = rows_padded(logits), dense(draft_probs)
    sound, drawn_from = sound_columns(logits), draft_probs
    if params.greedy or synthetic is not None or verification.coupled:
        drawn_from = None  # no test reads q
    judged, outcome = judged_drafts(sound, drawn_from, num_drafted), None
    arguments: Any = (logits, drafts, draft_probs, judged, keys, params)
    rule: Any = {"verification": verification, "synthetic": synthetic}
    if accelerator and available(logits.device):
        from .rejection_triton import verify_on_device  # imports triton

        with suppress(CompileFailed):
            outcome = verify_on_device(*arguments, **rule)
    if outcome is None:
        outcome = verify_here(*arguments, **rule)
    return _mark_outcome(outcome, sound, judged)


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
    """Verify in torch, with the arguments of `verify`; all num_drafted[b] drafts of a row can be judged."""
    width = drafts.shape[1]
    drafted = torch.arange(width, device=drafts.device) < num_drafted[:, None]
    ids, positions = keys.at(width)
    if synthetic is not None:
        u = uniform(keys.seed, ids, positions, keys.stream(Role.SYNTHETIC)[:, None])
        chance = torch.full_like(u, synthetic)
        accepted = accepted_prefix((u < chance) & drafted)
        next_token = _choose_next(logits, keys, params, accepted)
        unknown = torch.full_like(accepted, torch.nan, dtype=torch.float32)
        return Outcome(accepted, next_token, chance, torch.ones_like(u), u, unknown, drafts)
    if params.greedy:
        return _accept_greedy(argmax(logits), drafts, num_drafted)
    return _verify_sampled(
        verification.chains, probabilities(logits, params), drafts, draft_probs, num_drafted, keys
    )


def _accept_greedy(choices: Tensor, drafts: Tensor, num_drafted: Tensor) -> Outcome:
    """Accept drafts int64 [B, l] while they equal the target's greedy choices int64 [B, l + 1]."""
    width = drafts.shape[1]
    drafted = torch.arange(width, device=drafts.device) < num_drafted[:, None]
    agrees = (choices[:, :width] == drafts).float()
    accepted = accepted_prefix((agrees > 0) & drafted)
    next_token = choices.gather(1, accepted[:, None])[:, 0]
    ones, half = torch.ones_like(agrees), torch.full_like(agrees, 0.5)
    certain = torch.ones_like(accepted, dtype=torch.float32)
    return Outcome(accepted, next_token, agrees, ones, half, certain, drafts)


def _mark_outcome(outcome: Outcome, sound: Tensor, judged: Tensor) -> Outcome:
    """Set `judged`, and UNSOUND as the next token if the logits after the accepted drafts are unsound."""
    used = sound.gather(1, outcome.accepted[:, None])[:, 0]
    outcome.next_token, outcome.judged = outcome.next_token.where(used, UNSOUND), judged
    return outcome


def _verify_compiled(
    rule: Rule,
    logits: Tensor,
    places: Tensor | None,
    drafts: Tensor,
    draft_probs: Probs | None,
    num_drafted: Tensor,
    keys: NoiseKeys,
    params: SamplingParams,
) -> Outcome:
    """Verify sampled text in one compiled kernel; `places` are those of RaggedRows, or None for dense logits."""
    from kernels.cpu.sampling import calls, verification  # imports numba

    numbers = {
        Rule.REJECTION: verification.REJECTION,
        Rule.BLOCK: verification.BLOCK_RULE,
        Rule.COUPLED: verification.COUPLED,
    }
    streams = keys.stream(Role.ACCEPT), keys.stream(Role.RESIDUAL), keys.stream(Role.TARGET)
    if isinstance(draft_probs, ColumnProbs):
        parts = draft_probs.values, draft_probs.ids, draft_probs.columns, draft_probs.points
        q: Tensor | calls.Columns | None = calls.Columns(*parts)
    else:
        q = draft_probs
    result = calls.verify(
        logits, drafts, q, num_drafted, keys.seed, keys.sequence_ids, keys.positions, streams,
        calls.Filters(*filters(params)), numbers[rule], places,
    )  # fmt: skip
    chance = result.chance if rule is Rule.BLOCK else None
    return Outcome(
        result.accepted,
        result.next_token,
        result.p,
        result.q,
        result.u,
        result.next_p,
        drafts,
        chance,
        result.judged,
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
        # Values of u are 2**-32 apart near 0 and 2**-24 near 1, as fine as p and q in float32.
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


def _choose_next(logits: Tensor, keys: NoiseKeys, params: SamplingParams, accepted: Tensor) -> Tensor:
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
    """Draw the token after the accepted drafts, int64 [B]; `reach` [B, l+1] is p's factor (block.py)."""
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
        # If p and q are almost equal, p - q can round to 0 everywhere. Then draw from p instead.
        usable = rejected & (left.sum(-1) > 0)
        weights = torch.where(usable[:, None], left, at_end)
    return draw(weights, keys.seed, keys.sequence_ids, keys.positions + accepted, streams)
