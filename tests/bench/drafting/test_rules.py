"""`python -m bench rules`: each rule's chance against an enumeration of all draws and coins.

Contract: on vocabularies of four tokens, in float64.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from bench.drafting.rules import drawn_anew, likeliest_and_one, without_replacement


def pair(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.rand(2, 4, dtype=torch.float64, generator=generator) ** 3
    return p / p.sum(), q / q.sum()


def judged(p: Tensor, drafts: list[tuple[int, Tensor]]) -> float:
    """The chance that one of these drafts, each with the q that it was drawn from, passes min(1, p / q)."""
    rejected = 1.0
    for token, q in drafts:
        rejected *= 1 - min(1.0, float(p[token] / q[token]))
        left = (p - q).clamp(min=0)
        if left.sum() <= 0:
            break
        p = left / left.sum()
    return 1 - rejected


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("children", [1, 2, 3])
def test_drawn_anew(children: int, seed: int) -> None:
    p, q = pair(seed)
    total = 0.0
    for tokens in itertools.product(range(4), repeat=children):
        weight = float(torch.stack([q[token] for token in tokens]).prod())
        total += weight * judged(p, [(token, q) for token in tokens])
    assert drawn_anew(p, q, children) == pytest.approx(total, abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("children", [1, 2, 3])
def test_without_replacement(children: int, seed: int) -> None:
    """Of each order of draws; over all orders one is accepted at least as often as of those drawn anew."""
    p, q = pair(seed)
    total = 0.0
    for tokens in itertools.permutations(range(4), children):
        rest, weight, drafts = q.clone(), 1.0, []
        for token in tokens:
            weight *= float(rest[token])
            drafts.append((token, rest.clone()))
            rest[token] = 0
            rest = rest / rest.sum()
        assert without_replacement(p, q, torch.tensor([tokens])) == pytest.approx(judged(p, drafts), abs=1e-12)
        total += weight * judged(p, drafts)
    assert total > drawn_anew(p, q, children) - 1e-12


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("children", [1, 2, 3, 4])
def test_likeliest_and_one(children: int, seed: int) -> None:
    """The drawn one by its coin; what is left of p lands on a sibling as often as it holds that sibling."""
    p, q = pair(seed)
    top = q.topk(children - 1).indices
    rest = q.clone()
    rest[top] = 0
    rest = rest / rest.sum()
    left = (p - rest).clamp(min=0)
    total = 0.0
    for token in range(4):
        if rest[token] > 0:
            passed = min(1.0, float(p[token] / rest[token]))
            total += float(rest[token]) * (passed + (1 - passed) * float(left[top].sum() / left.sum()))
    assert likeliest_and_one(p, q, children) == pytest.approx(total, abs=1e-12)
