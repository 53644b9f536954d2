"""The argmax, on which every greedy choice and every draw rests, and the probabilities that draws use."""

from __future__ import annotations

import pytest
import torch

from bass_core.sample.distribution import argmax, probabilities
from bass_core.sample.params import COLDEST, SamplingParams


@pytest.mark.parametrize("shape", [(7,), (1, 49152), (3, 5, 1000), (2, 0, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_is_torch_s(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = torch.randn(shape).to(dtype)
    assert torch.equal(argmax(values), values.argmax(-1)) and argmax(values).dtype == torch.int64


def test_argmax_takes_the_lowest_of_equals_and_reads_slices() -> None:
    values = torch.zeros(4, 3, 20)
    values[:, :, [5, 17]] = 1.0
    assert argmax(values).eq(5).all()
    assert argmax(values[..., 6:]).eq(11).all() and argmax(values[1:3, 0]).shape == (2,)
    with torch.inference_mode():
        assert argmax(torch.ones(2, 9)).tolist() == [0, 0]


def test_the_coldest_temperature_that_is_drawn_with() -> None:
    """vLLM's bound; below it, and at 0, the likeliest token is taken."""
    assert SamplingParams(COLDEST) != SamplingParams() and not SamplingParams(COLDEST).greedy
    assert all(SamplingParams(t).greedy for t in (0, 0.0, 5e-324, 1e-46, 0.999e-5))
    logits = torch.tensor([[3.0, 3.0, -2.0], [1.0, 1.0 + 2**-20, -3e38]])
    for temperature in (COLDEST, 1e-4, 1.0, 1e9):
        p = probabilities(logits, SamplingParams(temperature))
        assert p.isfinite().all() and torch.allclose(p.sum(-1), torch.ones(2))
        assert p[0, 0] == p[0, 1] and p[1, 1] >= p[1, 0]
    assert probabilities(logits, SamplingParams(1e-46)).tolist() == [[1, 0, 0], [0, 1, 0]]


def test_a_row_has_the_same_probabilities_alone_and_among_others() -> None:
    before = torch.get_num_threads()
    logits = torch.randn(6, 49_152, generator=torch.Generator().manual_seed(0)) * 3
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            together = probabilities(logits, SamplingParams(temperature=1.0, top_p=0.9))
            for row, alone in enumerate(logits):
                assert torch.equal(
                    probabilities(alone[None], SamplingParams(temperature=1.0, top_p=0.9))[0], together[row]
                )
    finally:
        torch.set_num_threads(before)
