"""The rejection rule: which drafted tokens stand, and which token the target adds.

Contract (p = target, q = draft, Leviathan's letters; Chen et al. 2302.01318 write them the other way round):
draft x_i is accepted while u_i < p_i(x_i) / q_i(x_i); after the first rejection at i the next token comes from
norm(max(0, p_i - q_i)), after none from p_{l+1}. So the text is distributed as the target's own, whatever the
draft. Each row has its own number of drafts and of acceptances. Everything stays on the device; `Outcome.host`
is the round's one synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.support import available, is_accelerator

from ..errors import ModelError
from ..machine.transfer import to_host
from ..sampling.distribution import SamplingParams, argmax, draw, probabilities
from ..sampling.noise import Role, stream, uniform


@dataclass
class NoiseKeys:
    """What the noise of a round is a function of, beside role and token.

    `sequence_ids` int64 [B]; `positions` int64 [B]: where in the text the first token of this round will stand;
    `epochs` int64 [B]: where each row's epoch began, under AMUSD, else None: there the round itself is the epoch.
    """

    seed: int
    sequence_ids: Tensor
    positions: Tensor
    epochs: Tensor | None = None

    @property
    def begins(self) -> Tensor:
        """Where what is drafted and judged began in each row's text: int64 [B]."""
        return self.positions if self.epochs is None else self.epochs

    def stream(self, role: Role) -> Tensor:
        """The stream of a role in this round (noise.py): int64 [B]."""
        return stream(role, self.begins)

    def at(self, width: int) -> tuple[Tensor, Tensor]:
        """Ids [B, 1] and positions [B, width] of the next `width` tokens."""
        steps = torch.arange(width, device=self.positions.device)
        return self.sequence_ids[:, None], self.positions[:, None] + steps


@dataclass
class Outcome:
    """accepted, next_token int64 [B]; of the drafted tokens p, q, u float32 [B, l] and drafts int64 [B, l].

    next_p float32 [B]: what the target gives next_token. NaN where a number does not exist under the rule.
    """

    accepted: Tensor
    next_token: Tensor
    p: Tensor
    q: Tensor
    u: Tensor
    next_p: Tensor
    drafts: Tensor | None = None

    def host(self) -> tuple[list[int], list[int], list[list[list[float]]], list[float]]:
        """accepted, next tokens, [p, q, u, draft] a row and position, and next_p, in one copy to the host."""
        width = self.p.shape[1]
        drafts = torch.zeros_like(self.p) if self.drafts is None else self.drafts
        # One float32 tensor: counts and token ids are below 2**24, so all of them are exact in it.
        singles = [column[:, None] for column in (self.accepted, self.next_token, self.next_p)]
        rows = to_host(torch.cat((*singles, self.p, self.q, self.u, drafts), dim=1)).tolist()
        parts = [[row[3 + i * width : 3 + (i + 1) * width] for i in range(4)] for row in rows]
        tests = [[list(test) for test in zip(*part, strict=True)] for part in parts]
        return [int(row[0]) for row in rows], [int(row[1]) for row in rows], tests, [row[2] for row in rows]


def first_tokens(logits: Tensor, keys: NoiseKeys, params: SamplingParams) -> Tensor:
    """The target's own draw for logits [B, V], where nothing was drafted: int64 [B]."""
    if params.greedy:
        return argmax(logits)
    p = probabilities(logits, params)
    tokens = draw(p, keys.seed, keys.sequence_ids, keys.positions, keys.stream(Role.TARGET))
    return mark_unlikely(tokens, p.gather(-1, tokens[:, None])[:, 0])


def verify(
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
    """Judge drafts int64 [B, l] (the first counts[b] of a row) by the target's logits [B, l+1, V].

    draft_probs float32 [B, l, V] is what each draft was drawn from; None says that drafts are point masses.
    rule "chen" is the rejection rule above; "coupled" accepts a draft that is the target's own Gumbel-max
    choice, so that the text is regular decoding's. `synthetic` replaces the test by a coin of that probability.
    """
    if is_accelerator(logits.device) and available(logits.device):
        from .rejection_triton import verify_on_device  # imports triton

        return verify_on_device(logits, drafts, draft_probs, counts, keys, params, rule=rule, synthetic=synthetic)
    width = drafts.shape[1]
    drafted = torch.arange(width, device=drafts.device) < counts[:, None]
    ids, positions = keys.at(width)
    if synthetic is not None:
        u = uniform(keys.seed, ids, positions, keys.stream(Role.SYNTHETIC)[:, None])
        chance = torch.full_like(u, synthetic)
        accepted = _prefix((u < chance) & drafted)
        next_token = _own_choice(logits, keys, params, accepted)
        unknown = torch.full_like(accepted, torch.nan, dtype=torch.float32)
        return Outcome(accepted, next_token, chance, torch.ones_like(u), u, unknown)
    if params.greedy:
        choices = argmax(logits)
        agrees = (choices[:, :width] == drafts).float()
        accepted = _prefix((agrees > 0) & drafted)
        next_token = choices.gather(1, accepted[:, None])[:, 0]
        sure = torch.ones_like(accepted, dtype=torch.float32)
        return Outcome(accepted, next_token, agrees, torch.ones_like(agrees), torch.full_like(agrees, 0.5), sure)
    p = probabilities(logits, params)
    p_drafts = p[:, :width].gather(2, drafts[..., None])[..., 0]
    q_drafts = torch.ones_like(p_drafts)
    if draft_probs is not None:
        q_drafts = draft_probs.gather(2, drafts[..., None])[..., 0]
    if rule == "coupled":
        ids, positions = keys.at(width + 1)
        choices = draw(p, keys.seed, ids, positions, keys.stream(Role.TARGET)[:, None])
        accepted = _prefix((choices[:, :width] == drafts) & drafted)
        next_token = choices.gather(1, accepted[:, None])[:, 0]
        u = torch.full_like(p_drafts, torch.nan)
    else:
        # u is spaced 2**-32 near 0 and 2**-24 near 1: as fine as p and q are in float32.
        u = uniform(keys.seed, ids, positions, keys.stream(Role.ACCEPT)[:, None])
        accepted = _prefix((u * q_drafts < p_drafts) & drafted)
        next_token = _recover(p, drafts, draft_probs, accepted, counts, keys)
    next_p = probability_at(p, accepted, next_token)
    return Outcome(accepted, mark_unlikely(next_token, next_p), p_drafts, q_drafts, u, next_p)


def probability_at(p: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """p [B, l+1, V] of one token [B] at one position [B] a row: [B]."""
    return p[torch.arange(len(token), device=token.device), position, token]


def _prefix(passed: Tensor) -> Tensor:
    """How many leading entries of each row are true: int64 [B]."""
    return passed.long().cumprod(dim=1).sum(dim=1)


def _own_choice(logits: Tensor, keys: NoiseKeys, params: SamplingParams, accepted: Tensor) -> Tensor:
    rows = torch.arange(len(accepted), device=accepted.device)
    moved = NoiseKeys(keys.seed, keys.sequence_ids, keys.positions + accepted)
    return first_tokens(logits[rows, accepted], moved, params)


def _recover(
    p: Tensor, drafts: Tensor, draft_probs: Tensor | None, accepted: Tensor, counts: Tensor, keys: NoiseKeys
) -> Tensor:
    """The token after the accepted prefix: recovered where a draft was rejected, else the target's own."""
    rows = torch.arange(len(accepted), device=accepted.device)
    at_end = p[rows, accepted]
    rejected = accepted < counts
    streams = torch.where(rejected, keys.stream(Role.RESIDUAL), keys.stream(Role.TARGET))
    weights = at_end
    if drafts.shape[1]:
        index = accepted.clamp(max=drafts.shape[1] - 1)
        if draft_probs is None:
            residual = at_end.scatter(1, drafts[rows, index][:, None], 0.0)
        else:
            residual = (at_end - draft_probs[rows, index]).clamp_(min=0)
        # Rounding can leave nothing of p - q where the two agree; p itself is the limit then.
        usable = rejected & (residual.sum(-1) > 0)
        weights = torch.where(usable[:, None], residual, at_end)
    return draw(weights, keys.seed, keys.sequence_ids, keys.positions + accepted, streams)


UNSOUND = -1


def mark_unsound(tokens: Tensor, logits: Tensor) -> Tensor:
    """int64 [B]: `tokens`, and UNSOUND where a row's logits [B, V] or [B, l+1, V] hold a NaN or nothing finite."""
    sound = logits.amax(-1).isfinite()
    return tokens.where(sound if sound.dim() == 1 else sound.all(-1), UNSOUND)


def mark_unlikely(tokens: Tensor, chances: Tensor) -> Tensor:
    """int64 [B]: `tokens`, and UNSOUND where a token's probability [B] is NaN or 0, so that it was not drawn."""
    return tokens.where(chances > 0, UNSOUND)


def refuse_unsound(tokens: list[int]) -> None:
    """Raises ModelError where a row was marked: whatever was drawn there means nothing."""
    if UNSOUND in tokens:
        raise ModelError(
            "The model produced NaN or infinite numbers, so its text ends here: use other weights, or load it "
            "with dtype float32."
        )
