"""Packed products equal torch's at any shape; a vector's bits do not depend on the others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.packing import pack, pack_quantized
from kernels.cpu.products import blocks_of, linear
from kernels.reference.quantized import (
    QuantizedWeight,
    dequantise,
    in_bytes,
    quantise_int8,
    quantise_q4_1,
    quantise_q8_0,
)

from .shapes import DOTS

KINDS = [(torch.bfloat16, dot) for dot in DOTS] + [(torch.float16, False)]


@pytest.mark.parametrize(("dtype", "dot"), KINDS)
@pytest.mark.parametrize("rows", [1, 3, 130])
@pytest.mark.parametrize("inputs", [8, 31, 96, 576])
def test_products_equal_torch(dtype: torch.dtype, dot: bool, rows: int, inputs: int) -> None:
    torch.manual_seed(rows + inputs)
    weight, bias = torch.randn(rows, inputs).to(dtype), torch.randn(rows) if rows % 2 else None
    packed = pack(weight, bias, dot=dot)
    for vectors in (1, 2, 3, 4, 5, 6, 7, 8, 13, 24, 41):
        x = torch.randn(vectors, inputs)
        seen = x.bfloat16().float() if dot else x
        expected = F.linear(seen.double(), weight.double(), None if bias is None else bias.double()).float()
        torch.testing.assert_close(linear(x, packed), expected, atol=2e-6 * inputs, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "dot"), KINDS)
def test_a_vector_has_the_same_bits_by_itself_and_among_others(dtype: torch.dtype, dot: bool) -> None:
    torch.manual_seed(0)
    packed = pack(torch.randn(1300, 96).to(dtype), torch.randn(1300), dot=dot)
    x = torch.randn(230, 96)
    torch.set_num_threads(1)
    alone = torch.cat([linear(vector[None], packed) for vector in x])
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for vectors in (1, 2, 3, 4, 5, 6, 7, 8, 13, 24, 41, 230):
            assert torch.equal(linear(x[:vectors], packed), alone[:vectors])
            assert torch.equal(linear(x[-vectors:], packed), alone[-vectors:])


@pytest.mark.parametrize(("rows", "inputs"), [(1, 32), (70, 96), (1300, 576), (33, 31), (36, 36)])
@pytest.mark.parametrize("quantise", [quantise_int8, quantise_q8_0, quantise_q4_1])
def test_quantised_products_equal_those_of_the_dequantised_numbers(
    quantise: Callable[[Tensor], QuantizedWeight], rows: int, inputs: int
) -> None:
    if inputs % 32 and quantise is not quantise_int8:
        pytest.skip("a row needs a whole number of blocks")
    torch.manual_seed(rows + inputs)
    weight, bias, x = quantise(torch.randn(rows, inputs)), torch.randn(rows), torch.randn(41, inputs)
    x[7], x[8, :32], x[9], x[9, 5] = 0, 0, 0, 1e-37
    packed = pack_quantized(weight, bias)
    expected = F.linear(in_bytes(x).double(), dequantise(weight).double(), bias.double()).float()
    torch.set_num_threads(1)
    alone = torch.cat([linear(vector[None], packed) for vector in x])
    torch.testing.assert_close(alone, expected, atol=1e-6 * inputs, rtol=1e-5)
    torch.set_num_threads(2)
    for vectors in (2, 3, 5, 7, 13, 24, 41):
        assert torch.equal(linear(x[:vectors], packed), alone[:vectors])


@pytest.mark.parametrize("quantise", [quantise_int8, quantise_q8_0, quantise_q4_1])
def test_the_largest_integer_sums_do_not_overflow(quantise: Callable[[Tensor], QuantizedWeight]) -> None:
    weight = torch.ones(33, 4096) * torch.where(torch.arange(33) % 2 == 0, 1, -1)[:, None]
    weight[:, ::32] = 0  # for q4_1: if all numbers of a block were equal, its step would be 0
    x = torch.ones(3, 4096)
    for sign in (1, -1):
        output = linear(sign * x, pack_quantized(quantise(weight)))
        torch.testing.assert_close(output, F.linear(sign * x, weight), rtol=2e-3, atol=0)


@pytest.mark.parametrize("dot", DOTS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_stay_visible(dot: bool, value: float) -> None:
    weight, x = torch.randn(9, 40).bfloat16(), torch.randn(5, 40)
    x[3, 37] = value
    output = linear(x, pack(weight, dot=dot))
    assert torch.equal(output.isfinite().all(1), torch.arange(5) != 3) and not output[3].isfinite().any()


@pytest.mark.parametrize("quantise", [quantise_int8, quantise_q8_0, quantise_q4_1])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_stay_visible_in_quantised_products(
    quantise: Callable[[Tensor], QuantizedWeight], value: float
) -> None:
    x = torch.randn(5, 64)
    x[3, 37] = value
    output = linear(x, pack_quantized(quantise(torch.randn(9, 64))))
    assert torch.equal(output.isfinite().all(1), torch.arange(5) != 3) and not output[3].isfinite().any()


def test_no_vectors_have_no_products() -> None:
    assert linear(torch.zeros(0, 40), pack(torch.randn(9, 40).bfloat16())).shape == (0, 9)


@pytest.mark.parametrize("columns", [4, 8, 48])
def test_blocks_cover_all_vectors_and_fit(columns: int) -> None:
    for vectors in range(100):
        starts = blocks_of(vectors, columns)
        assert starts[0] == 0 and starts[-1] == vectors
        assert all(0 <= width <= columns for width in starts[1:] - starts[:-1])
