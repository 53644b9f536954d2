"""Quantised weights: GGUF reads the same numbers in them, errors stay within bounds, rows can be reordered."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from kernels.reference.quantized import (
    QUANTISERS,
    QuantizedWeight,
    dequantise,
    embedding,
    in_bytes,
    linear,
    take_rows,
)

BYTES = {"int8": 96 * 7 + 4 * 7, "q8_0": 34 * 3 * 7, "q4_1": 20 * 3 * 7}
KINDS = list(QUANTISERS)


def random(rows: int = 7, size: int = 96, seed: int = 0) -> Tensor:
    """Return rows of different magnitudes and means."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(rows, 1, generator=generator) + 0.1
    return spread * (torch.randn(rows, size, generator=generator) + spread)


def in_gguf(weight: QuantizedWeight) -> Tensor:
    """Dequantise a weight with the gguf package, for which a block is its scales followed by its values."""
    scales = weight.scales.numpy().view(np.uint8).reshape(-1, 2 if weight.kind == "q8_0" else 4)
    values = weight.values.numpy().view(np.uint8).reshape(len(scales), -1)
    kind = GGMLQuantizationType[weight.kind.upper()]
    return torch.from_numpy(quants.dequantize(np.concatenate((scales, values), axis=1), kind)).view(weight.shape)


@pytest.mark.parametrize("kind", ["q8_0", "q4_1"])
def test_gguf_reads_the_same_numbers_in_a_weight_s_bytes(kind: str) -> None:
    weight = QUANTISERS[kind](random())
    assert torch.equal(dequantise(weight), in_gguf(weight))


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_is_at_most_half_a_step_and_float16_rounding_of_the_bounds(kind: str) -> None:
    plain = random()
    weight = QUANTISERS[kind](plain)
    restored, blocks = dequantise(weight), plain if kind == "int8" else plain.unflatten(1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    step = (
        (blocks.amax(-1, keepdim=True) - blocks.amin(-1, keepdim=True)) / 15 if kind == "q4_1" else largest / 127
    )
    scales = weight.scales[..., :1] if kind == "q4_1" else weight.scales[..., None]
    torch.testing.assert_close(scales.float(), step, rtol=0 if kind == "int8" else 2.0**-11, atol=0)
    error = (restored.view_as(blocks) - blocks).abs()
    assert (error <= 0.5001 * step + (0 if kind == "int8" else 2 * largest * 2.0**-11)).all()
    assert restored.dtype == torch.float32 and weight.shape == (7, 96) and weight.nbytes == BYTES[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_constant_rows_keep_their_values(kind: str) -> None:
    plain = torch.cat((torch.zeros(2, 64), torch.full((1, 64), 1.5), torch.full((1, 64), 1e-12)))
    torch.testing.assert_close(dequantise(QUANTISERS[kind](plain)), plain, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_rounded_once_and_rows_selected_exactly(kind: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight, x, bias = QUANTISERS[kind](random()), torch.randn(2, 3, 96).to(dtype), torch.randn(7).to(dtype)
        assert torch.equal(
            linear(x, weight, bias), F.linear(x.float(), dequantise(weight), bias.float()).to(dtype)
        )
        assert torch.equal(linear(x, weight), F.linear(x.float(), dequantise(weight)).to(dtype))
    weight = QUANTISERS[kind](random(12))
    rows = torch.tensor([11, 0, 3, 3])
    assert torch.equal(dequantise(take_rows(weight, rows)), dequantise(weight)[rows])
    assert torch.equal(embedding(rows.view(2, 2), weight), dequantise(weight)[rows].view(2, 2, 96))
    assert embedding(rows[:0], weight).shape == (0, 96)


def test_a_large_number_rounds_those_away_that_share_its_scale() -> None:
    x = torch.ones(2, 64)
    x[0, 5] = 1000
    rounded = {block: in_bytes(x, block) for block in (32, 64)}
    assert torch.equal(rounded[32][0, 32:], x[0, 32:]) and rounded[64][0].count_nonzero() == 1
    assert torch.equal(rounded[32][1], x[1]) and torch.equal(rounded[64][1], x[1])


def test_a_copy_of_a_model_shares_its_weights() -> None:
    weight = QUANTISERS["int8"](random())
    assert copy.deepcopy([weight])[0] is weight


def test_weights_that_cannot_be_quantised_are_refused() -> None:
    for kind, shape in (("q8_0", (4, 33)), ("q4_1", (4, 16)), ("int8", (4,)), ("int8", (0, 4))):
        with pytest.raises(ValueError, match="shape"):
            QUANTISERS[kind](torch.ones(shape))
    for kind in KINDS:
        with pytest.raises(ValueError, match="finite"):
            QUANTISERS[kind](torch.full((1, 32), torch.nan))
    with pytest.raises(ValueError, match="too large"):
        QUANTISERS["q4_1"](torch.full((1, 32), 1e5))
