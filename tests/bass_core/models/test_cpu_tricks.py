"""Each shortcut of the CPU's forward gives the same result as the plain code beside it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bass_core.models.weights.cpu_tricks import (
    Norm,
    bare,
    interleaved,
    pairs,
    plain_norm,
    plain_rotate,
    rotate,
    turns,
)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_the_norm_by_hypot_is_rmsnorm(scale: float) -> None:
    """Includes vectors of zeros and near zeros, where eps dominates."""
    x = scale * torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 0
    weight = torch.randn(48)
    torch.testing.assert_close(Norm(weight, 1e-5)(x), plain_norm(x, weight, 1e-5), atol=1e-6, rtol=1e-5)


def test_the_complex_product_is_the_rotation() -> None:
    """For a layer's outputs at four positions, three heads of 8; components in the order of `pairs`."""
    heads, dim = 3, 8
    layer = nn.Linear(16, heads * dim).requires_grad_(False)
    x, angles = torch.randn(4, 16), torch.randn(4, dim // 2)
    cos, sin = (torch.cat((part, part), dim=-1) for part in (angles.cos(), angles.sin()))
    ours = interleaved(layer, dim)(x)
    rotate(ours, turns(cos, sin).repeat(1, heads))
    plain = plain_rotate(layer(x).view(4, heads, dim), cos[:, None], sin[:, None])
    torch.testing.assert_close(ours.view(4, heads, dim), plain[..., pairs(dim)], atol=1e-6, rtol=1e-5)


@pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="torch without FBGEMM")
def test_the_bare_operator_is_the_operator() -> None:
    weight, x = torch.randn(6, 4).half().float(), torch.randn(3, 4)
    packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
    overload = torch.ops.quantized.linear_dynamic_fp16.default
    assert torch.equal(bare(overload)(x, packed), torch.ops.quantized.linear_dynamic_fp16(x, packed))
    torch.testing.assert_close(bare(overload)(x, packed), x @ weight.T, atol=1e-5, rtol=1e-5)
    assert bare(plain_norm) is plain_norm
