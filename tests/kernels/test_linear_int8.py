"""Matrix products with int8 weights equal their torch reference under the interpreter, and compile without a GPU.

Contract: the error against float64 is at most three times plain torch's, or two ULPs, since the interpreter rounds
towards zero.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.reference import linear as linear_reference
from kernels.triton import linear_int8

ROOT = Path(__file__).parents[2]


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    rows=st.sampled_from([1, 2, 8, 17, 40]),
    n_size=st.sampled_from([16, 40, 100]),
    k_size=st.sampled_from([64, 512, 600, 1024]),
    norm=st.booleans(),
    gate=st.booleans(),
    residual=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_products(
    rows: int, n_size: int, k_size: int, norm: bool, gate: bool, residual: bool, dtype: torch.dtype
) -> None:
    rows = min(rows, linear_int8.MOST_ROWS[dtype.itemsize])
    torch.manual_seed(rows + n_size + k_size)
    x = torch.randn(rows, k_size).to(dtype)
    outputs = n_size * (2 if gate else 1)
    weight = torch.randint(-128, 128, (outputs, k_size), dtype=torch.int8)
    scale = (0.5 + torch.rand(outputs)) * k_size**-0.5 / 74
    extra = {
        "norm": (1 + 0.1 * torch.randn(k_size)).to(dtype) if norm else None,
        "eps": 1e-5,
        "gate": gate,
        "residual": torch.randn(rows, n_size).to(dtype) if residual else None,
    }
    wide = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in extra.items()}
    exact = linear_reference.linear(x.double(), weight.double() * scale.double()[:, None], **wide)
    ours = (linear_int8.linear(x, weight, scale, **extra).double() - exact).abs().max().item()
    plain = (linear_reference.linear_int8(x, weight, scale, **extra).double() - exact).abs().max().item()
    step = torch.finfo(dtype).eps * exact.abs().max().item()
    assert plain <= (20 if dtype == torch.float32 else 8) * step
    assert ours <= max(3 * plain, 1e-5 if dtype == torch.float32 else 2 * step)


@pytest.mark.parametrize(
    ("x", "weight", "scales"),
    [((17, 32), (16, 32), 16), ((2, 32), (16, 31), 16), ((2, 32), (16, 32), 1), ((0, 32), (16, 32), 16)],
    ids=["rows", "k", "scale", "none"],
)
def test_refuses_what_does_not_fit(x: tuple[int, int], weight: tuple[int, int], scales: int) -> None:
    with pytest.raises(ValueError):
        linear_int8.linear(torch.zeros(x), torch.zeros(weight, dtype=torch.int8), torch.ones(scales))


def test_refuses_a_weight_of_another_type() -> None:
    with pytest.raises(ValueError, match="float32"):
        linear_int8.linear(torch.zeros(2, 32), torch.zeros(16, 32), torch.ones(16))


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 120])
def test_compiles_without_spills(arch: int, tmp_path: Path) -> None:
    """Compiled in a process without the interpreter. Two or more rows use tensor cores."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compilation.compile_int8", str(arch)],
        cwd=ROOT, env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["kernel"] for row in rows} == {"gemv_int8", "skinny_int8"}
    assert not [row for row in rows if row["spills"] or row["local"] or row["shared"] > 99 * 1024]
    assert all(row["mma"] == ("skinny" in row["kernel"] and "fp32" not in row["variant"]) for row in rows)
