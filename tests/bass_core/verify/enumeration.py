"""Enumerates everything that a verification can write, in float64 over a small vocabulary.

`Chances` has p and q after every text. `Chances.drafts` lists the chains that may be drafted, with their
probabilities. `written` returns the distribution of the texts that a rule writes if these chains are drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor

Chain = tuple[int, ...]
# For i = 0, 1, ...: the probability that i drafts of a chain are accepted, and the next token's weights then.
Judged = tuple[list[float], list[Tensor]]


class Chances:
    """p and q after every text of up to `longest` tokens, each float64 [vocab] with some entries 0."""

    def __init__(self, seed: int, vocab: int, longest: int, sharp: float = 1.5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocab, self.longest = vocab, longest
        self.p: dict[Chain, Tensor] = {}
        self.q: dict[Chain, Tensor] = {}
        for length in range(longest + 1):
            for chain in product(range(vocab), repeat=length):
                p, q = (torch.randn(2, vocab, generator=generator, dtype=torch.float64) * sharp).softmax(-1)
                # Sometimes p or q gives a token no probability, as top-k does.
                if vocab > 2 and torch.rand(1, generator=generator) < 0.3:
                    for probs in (p, q):
                        probs[int(torch.randint(0, vocab, (1,), generator=generator))] = 0
                self.p[chain], self.q[chain] = p / p.sum(), q / q.sum()

    def drafts(self, length: int, stop: Stop) -> Iterator[tuple[Chain, float]]:
        """Yield each chain of up to `length` drafts, for a drafter that stops by `stop`, and its probability."""
        chains = [((), 1.0)]
        while chains:
            chain, chance = chains.pop()
            if len(chain) == length or stop(self, chain):
                yield chain, chance
                continue
            for token, q in enumerate(self.q[chain].tolist()):
                if q > 0:
                    chains.append(((*chain, token), chance * q))

    def target(self, length: int) -> Tensor:
        """Return the probability of every text of `length` tokens: [vocab] * length."""
        return self.rest((), length)

    def rest(self, chain: Chain, length: int) -> Tensor:
        """Return the probability of every continuation of `chain` by `length` tokens of the target."""
        if length == 0:
            return torch.ones((), dtype=torch.float64)
        continuations = [self.rest((*chain, token), length - 1) for token in range(self.vocab)]
        return torch.stack([p * rest for p, rest in zip(self.p[chain], continuations, strict=True)])


# A function that returns whether the drafter stops after a chain.
Stop = Callable[[Chances, Chain], bool]


def written(
    chances: Chances, drafted: list[tuple[Chain, float]], judge: Callable[[Chain], Judged], length: int
) -> tuple[Tensor, float]:
    """Return the probability of every text of `length` tokens, and the expected number of accepted drafts.

    One round verifies the drafts by `judge`; then the target alone writes the rest of the text.
    """
    total = torch.zeros([chances.vocab] * length, dtype=torch.float64)
    expected = 0.0
    for chain, chance in drafted:
        tau, following = judge(chain)
        for accepted, (share, weights) in enumerate(zip(tau, following, strict=True)):
            if share == 0:
                continue
            expected += chance * share * accepted
            for token, weight in enumerate(weights.tolist()):
                text = (*chain[:accepted], token)
                if weight > 0:
                    total[text] += chance * share * weight * chances.rest(text, length - len(text))
    return total, expected


def largest(h: list[float]) -> list[float]:
    """Return the probability that 0, 1, ... is the largest i with u_i < h_i."""
    shares, later_fail = [], 1.0
    for chance in reversed(h):
        shares.append(later_fail * chance)
        later_fail *= 1 - chance
    return [later_fail, *reversed(shares)]


def prefix(h: list[float]) -> list[float]:
    """Return the probability that the first i with u_i >= h_i is 1, 2, ..., or none."""
    shares, earlier_pass = [], 1.0
    for chance in h:
        shares.append(earlier_pass * (1 - chance))
        earlier_pass *= chance
    return [*shares, earlier_pass]


def normalised(weights: Tensor) -> Tensor:
    """Scale the weights to sum to 1, unless all are 0."""
    return weights / weights.sum() if weights.sum() > 0 else weights
