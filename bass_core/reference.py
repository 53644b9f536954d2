"""Speculative decoding and BASS in plain torch: what the engine computes, as the papers write it.

`speculative` and `bass` write, token for token, what `generate` writes with the method of that name and
verification="rejection", or "block" if `together`, because they draw the same noise. They share nothing but this
noise with `generate`: no cache and no kernel. The page shows `step` and its judges running on a round. A model is
any causal callable: token ids [B, T] in, logits [B, T, V] out, or an object that has them as `.logits`.

The letters are those of Leviathan et al. (arXiv 2211.17192). M_p is the target and p its distributions, M_q the
draft and q its. x are a row's drafts, gamma is their number, n how many of them are accepted. r is uniform, t is
the target's token. "L4" is line 4 of their Algorithm 1, counted below its inputs with its comments; "B4" is line 4
of Algorithm 1 of BASS (arXiv 2404.15778).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .sample.noise import Role, exponentials, stream, uniform


class HasLogits(Protocol):
    """The output of a transformers model."""

    logits: Tensor


Model = Callable[[Tensor], "Tensor | HasLogits"]
Texts = list[list[int]]


@dataclass(frozen=True)
class Noise:
    """The random numbers of one row in one round: a pure function of seed, id, position and role."""

    seed: int
    id: int
    begins: int

    def r(self, i: int) -> float:
        """Uniform, for the test of draft i."""
        return float(uniform(*self._key(i, Role.ACCEPT)))

    def draw(self, weights: Tensor, i: int, role: Role) -> int:
        """Draw a token for position i in proportion to its weight [V] (Gumbel-max); the weights need no norm."""
        return int((weights / exponentials(*self._key(i, role), len(weights))).argmax())

    def _key(self, i: int, role: Role) -> tuple[int, Tensor, Tensor, Tensor]:
        ids, begins = torch.tensor([self.id]), torch.tensor([self.begins])
        return self.seed, ids, begins + i, stream(role, begins)


def ask(M: Model, texts: Texts, temperature: float) -> Tensor:
    """Return M's distributions after each token of each text, [B, T, V], from one forward."""
    T = max(len(text) for text in texts)
    # A causal model does not see the zeros after a shorter text.
    out = M(torch.tensor([text + [0] * (T - len(text)) for text in texts]))
    logits = out if isinstance(out, Tensor) else out.logits
    if temperature == 0:  # greedy: only the most likely token
        return torch.zeros_like(logits, dtype=torch.float32).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.softmax(logits.float() / temperature, dim=-1)


def step(
    M_p: Model, M_q: Model, texts: Texts, gammas: list[int], noise: list[Noise], temperature: float, together: bool
) -> Texts:
    """A round of BASS: Leviathan's step for each row b of a batch, which drafts gammas[b] tokens."""
    rows = range(len(texts))
    x: Texts = [[] for _ in rows]
    q: list[list[Tensor]] = [[] for _ in rows]
    for i in range(max(gammas)):  # L2
        distributions = ask(M_q, [texts[b] + x[b] for b in rows], temperature)  # L3
        for b in rows:
            if i < gammas[b]:
                q[b].append(distributions[b, len(texts[b]) + i - 1])
                x[b].append(noise[b].draw(q[b][i], i, Role.DRAFT))  # L4
    distributions = ask(M_p, [texts[b] + x[b] for b in rows], temperature)  # L7, once for all drafts of all rows
    verdict = judge_together if together else judge
    return [verdict(x[b], q[b], distributions[b, len(texts[b]) - 1 :], noise[b]) for b in rows]


def judge(x: list[int], q: list[Tensor], p: Tensor, noise: Noise) -> list[int]:
    """The drafts x of one row that are accepted, and a token of the target: distributed as p, whatever q is."""
    n, gamma = 0, len(x)
    while n < gamma and noise.r(n) * q[n][x[n]] < p[n][x[n]]:  # L9
        n += 1  # L10
    adjusted, role = p[n], Role.TARGET  # L12
    if n < gamma:  # L13
        adjusted, role = (p[n] - q[n]).clamp(min=0), Role.RESIDUAL  # L14; a draw needs no norm
    t = noise.draw(adjusted, n, role)  # L17
    return [*x[:n], t]  # L18


def judge_together(x: list[int], q: list[Tensor], p: Tensor, noise: Noise) -> list[int]:
    """The same by block verification (Sun et al., arXiv 2403.10444), which judges a row's drafts together."""
    n, gamma, reach = 0, len(x), [torch.tensor(1.0)]
    for i in range(gamma):
        reach.append((reach[i] * p[i][x[i]] / q[i][x[i]]).clamp(max=1))
        h = reach[i + 1]
        if i + 1 < gamma and h < 1:
            excess = (h * p[i + 1] - q[i + 1]).clamp(min=0).sum()
            h = excess / (excess + 1 - h)
        if noise.r(i) < h:  # the last draft that passes is accepted, with all drafts before it
            n = i + 1
    adjusted, role = p[n], Role.TARGET
    if n < gamma:
        adjusted, role = (reach[n] * p[n] - q[n]).clamp(min=0), Role.RESIDUAL
    t = noise.draw(adjusted, n, role)
    return [*x[:n], t]


def bass(
    M_p: Model,
    M_q: Model,
    prompts: Seq[Seq[int]],
    new_tokens: int,
    temperature: float = 0.0,
    *,
    length: int | None = None,
    seed: int = 0,
    ids: Seq[int] | None = None,
    together: bool = False,
) -> list[list[int]]:
    """Write `new_tokens` tokens after each prompt, all rows at once.

    `length` is the number of drafts per row and round; None uses BASS's Algorithm 1. `ids` are the keys of the
    rows' noise; None means 0, 1, 2 and so on. `together` judges by block verification.
    """
    texts = [list(prompt) for prompt in prompts]
    ends = [len(text) + new_tokens for text in texts]
    gamma, s = 0, 0  # B2; the first round reads the prompts, and drafts nothing
    while going := [b for b, text in enumerate(texts) if len(text) < ends[b]]:  # B3
        gammas = [min(gamma, ends[b] - len(texts[b]) - 1) for b in going]
        noises = [Noise(seed, b if ids is None else ids[b], len(texts[b])) for b in going]
        new = step(M_p, M_q, [texts[b] for b in going], gammas, noises, temperature, together)
        for b, tokens in zip(going, new, strict=True):
            texts[b] += tokens
        if length is not None:
            gamma = length
        elif gamma == 0:
            gamma = 7  # B1
        elif gamma in gammas:  # else each row was cut short by its end
            gamma, s = next_gamma(gamma, s, [len(tokens) - 1 for tokens in new])  # B4
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def next_gamma(gamma: int, s: int, accepted: list[int]) -> tuple[int, int]:
    """Return the next draft length and s by BASS's Algorithm 1, given the accepted drafts of each row."""
    if max(accepted) == gamma:  # B5
        return min(gamma + 2, 32), 0  # B6, B7
    return max(1, *accepted, gamma - math.ceil(gamma / 10) - s), 1  # B9, B10, B11


def speculative(
    M_p: Model,
    M_q: Model,
    prompts: Seq[Seq[int]],
    new_tokens: int,
    temperature: float = 0.0,
    *,
    length: int | None = None,
    seed: int = 0,
    together: bool = False,
) -> list[list[int]]:
    """Write the same for one prompt after another, in batches of one."""
    batches = [([b], [prompt]) for b, prompt in enumerate(prompts)]
    options: dict[str, Any] = {"length": length, "seed": seed, "together": together}
    return [bass(M_p, M_q, row, new_tokens, temperature, ids=ids, **options)[0] for ids, row in batches]
