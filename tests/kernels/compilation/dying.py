"""Launches that fail to compile. In tests of the start, these lists replace that of kernels/triton/needed.py."""

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
    """Abort the compiling process, as a failed assertion in LLVM does."""
    import os  # inside, since Triton inspects the globals that a function uses

    os.abort()


@constexpr_function
def wait() -> int:
    """Wait for a process that takes ten minutes and inherits the compiler's pipe, like a ptxas that hangs."""
    import subprocess

    return subprocess.call(["sleep", "600"])


@constexpr_function
def fill() -> int:
    """Raise the error of a full disk."""
    raise OSError(28, "No space left on device")


@constexpr_function
def kill() -> int:
    """Kill the process, as the system does when memory runs out."""
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
    """Return one launch that compiles, one that aborts, one that raises, and another that compiles."""
    return _of((compiles, 16), (aborts, 16), (raises, 16), (compiles, 8))


def hanging(shape: Shape, card: Card) -> list[Launch]:
    """Return one launch that compiles, and one whose compilation never ends."""
    return _of((compiles, 16), (hangs, 16))


def passing(shape: Shape, card: Card) -> list[Launch]:
    """Return two launches with temporary failures: a full disk and a killed process."""
    return _of((fills, 16), (is_killed, 16))


def _of(*kernels: tuple[Any, int]) -> list[Launch]:
    out = (torch.empty(16, dtype=torch.int32, device="meta"),)
    return [Launch(kernel, out, {"BLOCK": size, "num_warps": 1}) for kernel, size in kernels]


def wide_trees(shape: Shape, card: Card) -> list[Launch]:
    """Return launches of unsplit attention over trees with wide tiles, some of which crash Triton 3.7.1."""
    sizes = attention.tiles
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "tiles", lambda *arguments: sizes(*arguments[:5]))
        listed = needed.launches(shape, card)
    return [launch for launch in listed if launch.options.get("TREE") and launch.options.get("WHOLE")]
