"""Launches that the compiler dies of, for tests of the start: a list in place of kernels/triton/needed.py's.

Contract: `launches` gives four, by their names: one that compiles, one whose compilation aborts the process as an
assertion in LLVM does, one that raises, and another that compiles. `hanging` gives one that waits for a process of
its own, as Triton does for ptxas; `passing` one that finds the disk full, and one whose process is killed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import constexpr_function

from kernels.shapes import Card, Shape
from kernels.triton import attention, needed
from kernels.triton.launch import Launch


@constexpr_function
def abort() -> int:
    """What the compiler calls while it compiles."""
    import os  # here, since Triton looks at all that a function finds outside

    os.abort()


@constexpr_function
def wait() -> int:
    """Wait for a process that does not end, and that has the pipe too."""
    import subprocess

    return subprocess.call(["sleep", "600"])


@constexpr_function
def fill() -> int:
    """What a full disk raises."""
    raise OSError(28, "No space left on device")


@constexpr_function
def kill() -> int:
    """End the process as the kernel does where memory is out."""
    import os

    os.kill(os.getpid(), 9)


@triton.jit
def hangs(out, BLOCK: tl.constexpr):
    tl.store(out, wait())


@triton.jit
def fills(out, BLOCK: tl.constexpr):
    tl.store(out, fill())


@triton.jit
def is_killed(out, BLOCK: tl.constexpr):
    tl.store(out, kill())


@triton.jit
def compiles(out, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), tl.arange(0, BLOCK))


@triton.jit
def aborts(out, BLOCK: tl.constexpr):
    tl.store(out, abort())


@triton.jit
def raises(out, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 0, "on purpose")


def launches(shape: Shape, card: Card) -> list[Launch]:
    """All four."""
    return _of((compiles, 16), (aborts, 16), (raises, 16), (compiles, 8))


def hanging(shape: Shape, card: Card) -> list[Launch]:
    """One that compiles, and one that waits."""
    return _of((compiles, 16), (hangs, 16))


def passing(shape: Shape, card: Card) -> list[Launch]:
    """Two that may be compiled another time."""
    return _of((fills, 16), (is_killed, 16))


def _of(*kernels: tuple[Any, int]) -> list[Launch]:
    out = (torch.empty(16, dtype=torch.int32, device="meta"),)
    return [Launch(kernel, out, {"BLOCK": size, "num_warps": 1}) for kernel, size in kernels]


def wide_trees(shape: Shape, card: Card) -> list[Launch]:
    """Attention over trees, whole, by tiles of 64 columns first: Triton 3.7.1 dies of some for 8.0 and 9.0."""
    sizes = attention.tiles
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "tiles", lambda *given: sizes(*given[:5]))
        found = needed.launches(shape, card)
    return [one for one in found if one.options.get("TREE") and one.options.get("WHOLE")]
