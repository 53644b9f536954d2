"""Every kernel gives the same result in any order of its programs, and accesses no memory outside its tensors."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import interpreter_builder

from tests.kernels.launching.launches import LAUNCHES
from tests.support import ROOT
from tests.support.models import slow_but


@contextmanager
def permuted(seed: int) -> Iterator[None]:
    """Run the programs of each launch in a random order, by permuting the interpreter's program ids."""
    dim, index = interpreter_builder.set_grid_dim, interpreter_builder.set_grid_idx
    order: list[tuple[int, ...]] = []
    waiting: list[tuple[int, ...]] = []

    def set_dim(*grid: int) -> None:
        order[:] = list(torch.cartesian_prod(*(torch.arange(size) for size in grid)).tolist())
        random.Random(seed).shuffle(order)
        waiting[:] = order
        dim(*grid)

    def set_index(*_: int) -> None:
        index(*waiting.pop())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter_builder, "set_grid_dim", set_dim)
        patch.setattr(interpreter_builder, "set_grid_idx", set_index)
        yield


QUICK = ["skinny", "put", "decide, block", "walk, no draft drawn"]


@pytest.mark.parametrize("name", slow_but(QUICK, LAUNCHES))
def test_the_order_of_programs_does_not_matter(name: str) -> None:
    usual = LAUNCHES[name](lambda tensor: tensor)
    with permuted(1):
        other = LAUNCHES[name](lambda tensor: tensor)
    for before, after in zip(usual, other, strict=True):
        assert torch.equal(before.nan_to_num(), after.nan_to_num())


@triton.jit
def last_program_wins(out):
    tl.store(out, tl.program_id(0) + 10 * tl.program_id(1))


def test_a_launch_that_depends_on_the_order_is_noticed() -> None:
    results = set()
    for seed in range(8):
        out = torch.zeros(1, dtype=torch.int32)
        with permuted(seed):
            last_program_wins[(3, 2)](out)
        results.add(out.item())
    assert len(results) > 1 and results <= {0, 1, 2, 10, 11, 12}


def guard(side: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.kernels.launching.guard", side]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="pages are protected by mprotect")
@pytest.mark.parametrize("side", ["end", "start"])
def test_no_launch_accesses_memory_outside_its_tensors(side: str) -> None:
    done = guard(side)
    names = done.stdout.splitlines()
    assert done.returncode == 0, f"in {names[-1:]}: {done.returncode} {done.stderr[-2000:]}"
    assert names == list(LAUNCHES)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="pages are protected by mprotect")
def test_an_access_beyond_a_tensor_is_noticed() -> None:
    assert guard("beyond").returncode == -signal.SIGSEGV
