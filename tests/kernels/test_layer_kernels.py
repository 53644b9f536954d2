"""The cache write, the rotary embedding and products equal their torch references, under Triton's interpreter.

In low precision, the error against float64 may be three times that of torch, or two ULPs, since the interpreter
rounds towards zero.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.reference import cache as cache_reference
from kernels.reference import linear as linear_reference
from kernels.triton import cache_write, linear, pointwise


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    queries=st.integers(1, 4),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 3)]),
    dim=st.sampled_from([16, 20, 64, 80]),
    norm=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    shared=st.booleans(),
    tree=st.booleans(),
)
def test_rotary_embedding_and_cache_write_equal_the_reference(
    lengths: list[int],
    queries: int,
    heads: tuple[int, int],
    dim: int,
    norm: bool,
    dtype: torch.dtype,
    shared: bool,
    tree: bool,
) -> None:
    """The options change the columns to which tokens are written.

    With `shared`, every second row has half of its tokens in a prefix, so it writes to earlier columns. With
    `tree`, all tokens but the first are siblings: they have the same position but different columns.
    """
    torch.manual_seed(len(lengths))
    batch, (q_heads, kv_heads) = len(lengths), heads
    qkv = torch.randn(batch, queries, q_heads + 2 * kv_heads, dim).to(dtype)
    cache = torch.full((2, batch + 1, kv_heads, 20, dim), torch.nan, dtype=dtype)
    # Padding past the last position is rotated like the last position.
    angles = torch.outer(torch.arange(14.0), 1.0 / torch.arange(1, dim // 2 + 1))
    cos, sin = angles.cos(), angles.sin()
    norms = (torch.rand(dim).to(dtype), torch.rand(dim).to(dtype)) if norm else None
    expected_qkv, expected_cache = qkv.clone(), cache.clone()
    at = torch.tensor(lengths)
    starts = at // 2 * (torch.arange(batch) % 2) if shared else None
    positions = at[:, None] + torch.arange(queries).clamp(max=1) if tree else None
    cache_write.rotate_write(qkv, cache, at, cos, sin, norms, 1e-6, starts, positions)
    cache_reference.rotate_write(expected_qkv, expected_cache, at, cos, sin, norms, 1e-6, starts, positions)
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    torch.testing.assert_close(qkv, expected_qkv, **close)
    torch.testing.assert_close(cache, expected_cache, equal_nan=True, **close)


@pytest.mark.parametrize("module", [cache_write, cache_reference])
def test_a_tree_token_is_rotated_by_its_position_and_written_to_its_column(module: Any) -> None:
    """Two siblings and a child of the second one get the states of the last tokens of texts with the same path."""
    torch.manual_seed(0)
    qkv = torch.randn(1, 3, 4, 8)  # two heads of queries, one of keys and of values
    angles = torch.outer(torch.arange(9.0), torch.rand(4))
    cache, at = torch.zeros(2, 1, 1, 9, 8), torch.tensor([5])
    turned = qkv.clone()
    module.rotate_write(turned, cache, at, angles.cos(), angles.sin(), positions=torch.tensor([[5, 5, 6]]))
    for token, position in enumerate((5, 5, 6)):
        alone, text = qkv[:, token : token + 1].clone(), torch.zeros_like(cache)
        module.rotate_write(alone, text, torch.tensor([position]), angles.cos(), angles.sin())
        torch.testing.assert_close(turned[:, token, :2], alone[:, 0, :2])
        torch.testing.assert_close(cache[..., 5 + token, :], text[..., position, :])
    assert not cache[..., :5, :].any() and not cache[..., 8:, :].any()


def test_strided_states_are_written() -> None:
    torch.manual_seed(0)
    states = torch.randn(2, 3, 2, 4, 24)  # [B, S, keys and values, Hkv, D]
    keys, values = (states[:, :, i].transpose(1, 2) for i in range(2))
    lengths = torch.tensor([5, 0])
    ours, theirs = torch.zeros(2, 2, 3, 4, 10, 24)
    cache_write.write(keys, values, ours, lengths)
    cache_reference.write(keys, values, theirs, lengths)
    assert torch.equal(ours, theirs) and ours.abs().sum() > 0
    shared = torch.zeros_like(ours)
    for write in (cache_write.write, cache_reference.write):
        write(keys, values, shared.zero_(), lengths + 32, torch.tensor([32, 32]))
        assert torch.equal(shared, ours)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    rows=st.sampled_from([1, 2, 8, 17, 40]),
    n_size=st.sampled_from([16, 40, 100]),
    k_size=st.sampled_from([64, 512, 600]),
    norm=st.booleans(),
    gate=st.booleans(),
    residual=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_products_equal_the_reference(
    rows: int, n_size: int, k_size: int, norm: bool, gate: bool, residual: bool, dtype: torch.dtype
) -> None:
    rows = min(rows, linear.MAX_ROWS[dtype.itemsize])
    torch.manual_seed(rows + n_size + k_size)
    x = torch.randn(rows, k_size).to(dtype)
    weight = (torch.randn(n_size * (2 if gate else 1), k_size) * k_size**-0.5).to(dtype)
    extra = {
        "norm": (1 + 0.1 * torch.randn(k_size)).to(dtype) if norm else None,
        "eps": 1e-5,
        "gate": gate,
        "residual": torch.randn(rows, n_size).to(dtype) if residual else None,
    }
    wide = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in extra.items()}
    exact = linear_reference.linear(x.double(), weight.double(), **wide)
    ours = (linear.linear(x, weight, **extra).double() - exact).abs().max().item()
    plain = (linear_reference.linear(x, weight, **extra).double() - exact).abs().max().item()
    step = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps * exact.abs().max().item()
    assert ours <= max(3 * plain, step)


def test_mismatched_shapes_are_refused() -> None:
    for x, weight in (((17, 32), (16, 32)), ((2, 32), (16, 31)), ((0, 32), (16, 32))):
        with pytest.raises(ValueError):
            linear.linear(torch.zeros(x), torch.zeros(weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_torch_with_our_norm_and_gate_equal_the_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, 3, 70).to(dtype), torch.randn(2, 3, 70).to(dtype)
    weights = [(torch.randn(sizes) * 70**-0.5).to(dtype) for sizes in ((2 * 1030, 70), (70, 1030))]
    norm = torch.rand(70).to(dtype)

    def layer(module: Any, **rest: Any) -> torch.Tensor:
        to = torch.float64 if module is None else dtype
        numbers = [tensor.to(to) for tensor in (x, norm, *weights, residual.clone())]
        linear = (module or linear_reference).linear
        wide = linear(numbers[0], numbers[2], norm=numbers[1], eps=1e-5, gate=True)
        out: torch.Tensor = linear(wide, numbers[3], residual=numbers[4], **rest)
        assert torch.equal(numbers[4], out) is bool(rest)
        return out

    exact, plain = layer(None), layer(linear_reference)
    allowed = max(3 * (plain.double() - exact).abs().max().item(), 1e-5)
    for rest in ({}, {"overwrite": True}):
        assert (layer(pointwise, **rest).double() - exact).abs().max().item() <= allowed
    total, normed = pointwise.add_norm(x, norm, 1e-5, residual)
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(total, x + residual, **close)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(total, (70,), norm, 1e-5), **close)
    alone = pointwise.add_norm(x[:, :1].contiguous(), norm, 1e-5, residual[:, :1].contiguous())[1]
    assert torch.equal(alone, normed[:, :1])
