"""The top-p kernel keeps the same tokens as a sort."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from bass_core.sample import distribution as sampling
from bass_core.sample.distribution import probabilities
from bass_core.sample.params import SamplingParams
from kernels.triton import nucleus

from ..models import slow_but


@pytest.mark.parametrize(("spread", "vocab"), slow_but([(2.0, 2500)], product([0.1, 2.0, 30.0], [3, 2500])))
def test_the_threshold_is_the_sorts(spread: float, vocab: int) -> None:
    torch.manual_seed(0)
    probs = probabilities(torch.randn(2, 3, vocab) * spread, SamplingParams(1.0))
    for top_p in (1e-3, 0.3, 0.9, 0.999):
        found = nucleus.threshold(probs, top_p)
        expected = sampling._threshold(probs, top_p)
        # Where the sum of the likelier tokens equals top_p within rounding, either neighbour is a right threshold.
        likelier = torch.where(probs > expected, probs, 0).double().sum(-1, keepdim=True)
        clear = ((likelier - top_p).abs() > 2e-6) & ((likelier + expected - top_p).abs() > 2e-6)
        assert torch.equal(found[clear], expected[clear]) and clear.any()
        kept = torch.where(probs >= found, probs, 0).double().sum(-1)
        assert (kept > top_p - 1e-5).all()


def test_ends_ties_and_numbers_that_are_none() -> None:
    rows = torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0], [0.5, 0.3, 0.2, 0.0]])
    assert nucleus.threshold(rows, 0.5).tolist() == [[0.25], [1.0], [0.5]]
    assert torch.equal(nucleus.threshold(rows, 0.501), torch.tensor([[0.25], [1.0], [0.3]]))
    assert nucleus.threshold(rows[:, None], 0.9).shape == (3, 1, 1)
    assert nucleus.threshold(rows[:0], 0.9).shape == (0, 1)
    nucleus.threshold(torch.full((1, 5), torch.nan), 0.9)
    # So small a top_p is 0 in float32: the likeliest token stays.
    assert nucleus.threshold(rows, 1e-300).tolist() == [[0.25], [1.0], [0.5]]


def test_an_accelerator_keeps_what_a_cpu_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with a small nucleus, and one whose nucleus exceeds every prefix that is tried."""
    torch.manual_seed(1)
    logits = torch.randn(4, 3000) * torch.tensor([8.0, 3.0, 1.0, 0.01])[:, None]
    params = SamplingParams(1.0, top_p=0.95)
    expected = probabilities(logits, params)
    monkeypatch.setattr(sampling, "is_accelerator", lambda device: True)
    found = probabilities(logits, params)
    kept = expected > 0
    assert kept.sum(-1).min() < 200 and kept.sum(-1).max() > 2000
    # Rounding of the sum may keep one token more or less.
    assert ((found > 0) != kept).sum(-1).max() <= 1
    torch.testing.assert_close(found, expected, atol=4e-4, rtol=1e-3)
