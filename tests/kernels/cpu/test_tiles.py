"""AMX tile products have the bits of their reference at every width, and run only if they are permitted."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from kernels.cpu import products
from kernels.cpu.calls.jit import cpu_features, has_tiles
from kernels.cpu.kinds import TILE_COLUMNS, columns_of
from kernels.cpu.packing import pack
from kernels.cpu.products import blocks_of, linear
from kernels.reference.tiles import tile_linear

needs_tiles = pytest.mark.skipif(not has_tiles(), reason="a CPU with AMX is needed")


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)


@needs_tiles
@pytest.mark.parametrize("threads", [1, 2])
def test_any_number_of_vectors_has_the_bits_of_the_reference(threads: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    weight, x = torch.randn(100, 72).bfloat16(), torch.randn(100, 72)
    packed, expected = pack(weight), tile_linear(x.bfloat16(), weight)
    for vectors in range(101):
        assert torch.equal(bits(linear(x[:vectors], packed)), bits(expected[:vectors])), vectors


@needs_tiles
@pytest.mark.parametrize("columns", [5, 8, 17, 48])
def test_tiles_work_with_blocks_of_other_widths(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft head's bfloat16 layer gets the block widths of its int8 body: for example, 4 and 5 for 9 vectors."""
    torch.manual_seed(0)
    weight, x = torch.randn(100, 72).bfloat16(), torch.randn(60, 72)
    packed, expected = pack(weight), tile_linear(x.bfloat16(), weight)
    monkeypatch.setattr(products, "blocks_of", lambda vectors, _: blocks_of(vectors, columns))
    for vectors in range(61):
        assert torch.equal(bits(linear(x[:vectors], packed)), bits(expected[:vectors])), vectors


@needs_tiles
def test_denormal_numbers_count_as_zero() -> None:
    """Tests denormal inputs such as 1e-39, and sums that would be denormal."""
    torch.manual_seed(1)
    scale = torch.tensor([1.0, 1e-18, 1e-20, 1e-39])
    weight = (torch.randn(64, 96) * scale[torch.randint(4, (64, 96))]).bfloat16()
    x = torch.randn(20, 96) * scale[torch.randint(4, (20, 96))]
    assert (weight.float().abs() < torch.finfo(torch.float32).tiny).any()
    assert torch.equal(bits(linear(x, pack(weight))), bits(tile_linear(x.bfloat16(), weight)))


@needs_tiles
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_unsound_vectors_do_not_change_others(value: float) -> None:
    torch.manual_seed(2)
    weight, x = torch.randn(64, 64).bfloat16(), torch.randn(40, 64)
    clean = linear(x, pack(weight))
    x[17, 33] = value
    output = linear(x, pack(weight))
    others = torch.arange(40) != 17
    assert torch.equal(bits(output[others]), bits(clean[others])) and not output[17].isfinite().any()


@pytest.mark.parametrize("dot", [None, False])
def test_the_reference_is_close_to_a_float64_product(dot: bool | None) -> None:
    """The kernels are close to it too, with and without tiles."""
    torch.manual_seed(3)
    weight, x = torch.randn(64, 96).bfloat16(), torch.randn(9, 96).bfloat16().float()
    exact = (x.double() @ weight.double().T).float()
    for output in (tile_linear(x.bfloat16(), weight), linear(x, pack(weight, dot=dot))):
        torch.testing.assert_close(output, exact, atol=2e-4, rtol=1e-4)


def test_a_block_is_as_wide_as_its_kind_can_multiply() -> None:
    assert columns_of("bfloat16", True) == (TILE_COLUMNS if has_tiles() else columns_of("int8", False))


# Checks a product; prints whether this process uses tiles, and the folder of its compiled code.
_PROCESS = """
import torch
from kernels.cpu.calls import jit
from kernels.cpu.packing import pack
from kernels.cpu.products import linear
torch.manual_seed(0)
weight, x = torch.randn(64, 64).bfloat16(), torch.randn(5, 64)
exact = x.bfloat16().double() @ weight.double().T
torch.testing.assert_close(linear(x, pack(weight, dot=True)).double(), exact, atol=2e-4, rtol=1e-4)
print(jit.has_tiles(), jit._versions_folder(jit.folder).name)
"""


@pytest.mark.skipif("avx512bf16" not in cpu_features(), reason="a CPU with bfloat16 products is needed")
def test_code_with_and_without_tiles_is_stored_separately() -> None:
    """Code that uses tiles would kill a process without permission for them."""
    seen = []
    for tiles in ("0", "1"):
        run, env = [sys.executable, "-c", _PROCESS], os.environ | {"BASS_TILES": tiles}
        done = subprocess.run(run, env=env, capture_output=True, text=True, check=True)
        uses_tiles, folder = done.stdout.split()
        assert folder.endswith("-tiles") == (uses_tiles == "True")
        seen.append((uses_tiles, folder))
    assert seen[0][0] == "False" and (seen[0] != seen[1]) == (seen[1][0] == "True")
