"""Everything that a verification can write, enumerated in float64 over a small vocabulary.

Contract: `Chances` holds p and q behind every text; `drafts(stop)` lists the chains that may be drafted, each with
its probability; `written` adds up what a rule writes behind each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor

Chain = tuple[int, ...]
# The probability that 0, 1, ... drafts of a chain are accepted, and what the next token is then drawn from.
Judged = tuple[list[float], list[Tensor]]


class Chances:
    """p and q behind every text of up to `longest` tokens of a vocabulary: float64, some of them 0."""

    def __init__(self, seed: int, vocab: int, longest: int, sharp: float = 1.5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocab, self.longest = vocab, longest
        self.p: dict[Chain, Tensor] = {}
        self.q: dict[Chain, Tensor] = {}
        for length in range(longest + 1):
            for chain in product(range(vocab), repeat=length):
                p, q = (torch.randn(2, vocab, generator=generator, dtype=torch.float64) * sharp).softmax(-1)
                # Now and then a token that one of the two never writes, as under top-k.
                if vocab > 2 and torch.rand(1, generator=generator) < 0.3:
                    for one in (p, q):
                        one[int(torch.randint(0, vocab, (1,), generator=generator))] = 0
                self.p[chain], self.q[chain] = p / p.sum(), q / q.sum()

    def drafts(self, length: int, stop: Stop) -> Iterator[tuple[Chain, float]]:
        """Each chain of up to `length` drafts that a drafter makes which stops by `stop`, and its probability."""
        whole = [((), 1.0)]
        while whole:
            chain, chance = whole.pop()
            if len(chain) == length or stop(self, chain):
                yield chain, chance
                continue
            for token, q in enumerate(self.q[chain].tolist()):
                if q > 0:
                    whole.append(((*chain, token), chance * q))

    def target(self, length: int) -> Tensor:
        """The probability of every text of `length` tokens: [vocab] * length."""
        return self.rest((), length)

    def rest(self, chain: Chain, length: int) -> Tensor:
        """The probability of every continuation of `length` tokens by the target alone."""
        if length == 0:
            return torch.ones((), dtype=torch.float64)
        each = [self.rest((*chain, token), length - 1) for token in range(self.vocab)]
        return torch.stack([p * one for p, one in zip(self.p[chain], each, strict=True)])


# Whether to draft no further behind a chain.
Stop = Callable[[Chances, Chain], bool]


def written(
    chances: Chances, drafted: list[tuple[Chain, float]], judge: Callable[[Chain], Judged], length: int
) -> tuple[Tensor, float]:
    """(the probability of every text of `length` tokens, the expected number of accepted drafts) of one round.

    Behind a round the target goes on alone.
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
    """The probability that 0, 1, ... is the largest i with u_i < h_i."""
    shares, behind = [], 1.0
    for chance in reversed(h):
        shares.append(behind * chance)
        behind *= 1 - chance
    return [behind, *reversed(shares)]


def prefix(h: list[float]) -> list[float]:
    """The probability that the first i with u_i >= h_i is 1, 2, ..., or none."""
    shares, before = [], 1.0
    for chance in h:
        shares.append(before * (1 - chance))
        before *= chance
    return [*shares, before]


def normalised(weights: Tensor) -> Tensor:
    """Weights that sum to 1; all 0 if there is nothing to draw."""
    return weights / weights.sum() if weights.sum() > 0 else weights
