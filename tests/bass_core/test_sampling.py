"""The largest value's index, on which every greedy choice and every draw rests."""

from __future__ import annotations

import pytest
import torch

from bass_core.sampling import argmax


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
