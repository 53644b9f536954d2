"""Code for AMX's tiles has the bits of its reference on any CPU, and on one with AMX those of the real tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
import pytest
import torch
from numba import types
from numba.extending import intrinsic

from kernels.cpu import tiles
from kernels.cpu.attention import tiled
from kernels.cpu.attention.layout import SEGMENT, TILE
from kernels.cpu.calls.jit import has_tiles
from kernels.reference.tiles import tile_linear
from tests.support import emulated_tiles

ROWS, CANARY = 32, 1234.5


@pytest.fixture(
    scope="module",
    params=["emulated", pytest.param("AMX", marks=pytest.mark.skipif(not has_tiles(), reason="needs AMX"))],
)
def compiled(request: pytest.FixtureRequest) -> Iterator[tuple[Callable[..., None], Callable[..., None]]]:
    """Return compiled functions of a product of a panel, and of both products of attention."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "emulated":
            emulated_tiles.emulate(patch)

        @numba.njit
        def panel(configured, columns, w, x, y, steps, stride):  # type: ignore[no-untyped-def]
            tiles.configure(configured)
            tiles.multiply_tiles(columns, w, x, y, steps, stride, w, 0, 0)
            tiles.release()

        @numba.njit
        def attend(*arguments):  # type: ignore[no-untyped-def]
            _attend(*arguments)

        yield panel, attend
        assert not emulated_tiles.faults


@intrinsic
def _attend(
    _: Any, number: Any, queries: Any, stride: Any, words: Any, keys: Any, scratch: Any, weights: Any, values: Any,
    count: Any, out: Any, size: Any,
) -> Any:  # fmt: skip
    """Write the scores of `number` queries to `scratch`, and the sums of the values to `out`."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        number, queries, stride, words, keys, scratch, weights, values, count, out, size = args
        tiled.configure(b, number)
        tiled.scores(b, queries, stride, words, keys, count, scratch)
        tiled.mix(b, weights, values, count, out, size)
        tiled.release(b)
        return context.get_dummy_value()

    sizes, addresses = types.intp, types.uintp
    return types.void(
        sizes, addresses, sizes, sizes, addresses, addresses, addresses, addresses, sizes, addresses, sizes
    ), generate


def words(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the words of bfloat16 numbers, uint16, in memory that begins at a multiple of 64 bytes."""
    bits = x.contiguous().view(torch.int16).numpy().view(np.uint16).ravel()
    memory = np.zeros(len(bits) + 32, np.uint16)
    start = -(memory.ctypes.data % 64) // 2 % 32
    memory[start : start + len(bits)] = bits
    return memory[start : start + len(bits)]


def same(result: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(result.contiguous().view(torch.int32), expected.contiguous().view(torch.int32))


@pytest.mark.parametrize("vectors", [1, 5, 15, 16, 17, 31, 33, 47, 48])
def test_a_product_has_the_bits_of_the_reference(vectors: int, compiled: Any) -> None:
    """The last group of 16 vectors overlaps the one before, and rows of results are `stride` numbers apart."""
    torch.manual_seed(vectors)
    inputs, stride = 64, ROWS + 7
    scale = torch.tensor([1.0, 1e-18, 1e-39])[torch.randint(3, (vectors, inputs))]
    weight, x = torch.randn(ROWS, inputs).bfloat16(), (torch.randn(vectors, inputs) * scale).bfloat16()
    packed = words(weight.view(ROWS, inputs // 32, 16, 2).permute(1, 2, 0, 3))
    # What lies after the last vector is not finite.
    block = words(torch.cat((x.view(vectors, inputs // 32, 32).transpose(0, 1).flatten().float(),
                             torch.full((16 * 32,), torch.nan))).bfloat16())  # fmt: skip
    y = np.full((vectors + 16, stride), CANARY, np.float32)
    compiled[0](vectors, vectors, packed.ctypes.data, block.ctypes.data, y.ctypes.data, inputs // 32, stride)
    output = torch.from_numpy(y)
    assert same(output[:vectors, :ROWS], tile_linear(x, weight))
    assert (output[vectors:] == CANARY).all() and (output[:, ROWS:] == CANARY).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_vector_that_is_not_finite_leaves_others_alone(value: float, compiled: Any) -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(ROWS, 32).bfloat16(), torch.randn(20, 32).bfloat16()
    x[17, 3] = value
    y = np.zeros((20, ROWS), np.float32)
    packed, block = words(weight.view(ROWS, 16, 2).transpose(0, 1)), words(x)
    compiled[0](20, 20, packed.ctypes.data, block.ctypes.data, y.ctypes.data, 1, ROWS)
    finite, output = torch.arange(20) != 17, torch.from_numpy(y)
    assert same(output[finite], tile_linear(x[finite], weight)) and not output[17].isfinite().any()


@pytest.mark.parametrize(("queries", "count", "dim"), [(1, 1, 32), (5, 4, 64), (16, 5, 96), (7, 9, 160)])
def test_attention_has_the_bits_of_the_reference(queries: int, count: int, dim: int, compiled: Any) -> None:
    """Of scores and results, groups of four tiles and single ones. Memory after the last query is not finite."""
    torch.manual_seed(dim)
    stride, pairs = dim + 32, TILE // 2
    asked = torch.full((queries + 16, stride), torch.nan).bfloat16()
    asked[:queries, :dim] = torch.randn(queries, dim).bfloat16()
    keys, values = (torch.randn(count, TILE, dim).bfloat16() for _ in range(2))
    weights = torch.full((queries + 16, 2 * SEGMENT), torch.nan).bfloat16()
    weights[:queries, : count * TILE] = torch.rand(queries, count * TILE).bfloat16()
    # The tiles of a cache are not next to each other.
    key_tiles = [words(tile.view(TILE, dim // 2, 2).transpose(0, 1)) for tile in keys]
    value_tiles = [words(tile.view(pairs, 2, dim).transpose(1, 2)) for tile in values]
    places = [np.array([tile.ctypes.data for tile in each], np.int64) for each in (key_tiles, value_tiles)]
    scratch = np.full((queries + 16, SEGMENT), CANARY, np.float32)
    out = np.full((queries + 16, dim), CANARY, np.float32)
    of_queries, of_weights = words(asked), words(weights)
    compiled[1](
        queries, of_queries.ctypes.data, 2 * stride, dim // 2, places[0].ctypes.data, scratch.ctypes.data,
        of_weights.ctypes.data, places[1].ctypes.data, count, out.ctypes.data, 4 * dim,
    )  # fmt: skip
    scores, sums = torch.from_numpy(scratch), torch.from_numpy(out)
    assert same(scores[:queries, : count * TILE], tile_linear(asked[:queries, :dim], keys.flatten(0, 1)))
    assert same(sums[:queries], tile_linear(weights[:queries, : count * TILE], values.flatten(0, 1).T, step=TILE))
    assert (scores[queries:] == CANARY).all() and (scores[:, count * TILE :] == CANARY).all()
    assert (sums[queries:] == CANARY).all()
