"""Compile what a model needs in another process: `main` is the code of that process.

Each of PARTS has a process, which shares only the code on disk with the others. A load needs the first two, and a
request also the last. They work on zeros, because compiled code doesn't depend on sizes. Each prints a line per
compiled function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
import torch

from . import chain
from .attention import compiled, paths, step
from .attention.layout import TILE, padded
from .calls import jit, pool
from .calls.threads import state_of
from .kinds import FAST_DOT, HAS_DOT
from .llama import PackedLlama
from .multiply import address_of_kind
from .packing import pack
from .products import linear
from .sampling.calls import compile_all

_HIDDEN, _DIM = 64, 64


def main(part: str, forms: Sequence[str]) -> None:
    """Compile a part of the kernels, or load them if they are compiled already.

    Args:
        part: one of PARTS.
        forms: the formats of the weights (kinds.py), first that of the target.
    """
    with jit.watched(_Lines):
        PARTS[part](forms)


class _Lines:
    """Prints a line per function. As soon as nobody reads them, this raises, and the process ends."""

    def update(self) -> None:
        print(flush=True)

    def close(self) -> None: ...


def _cache() -> Any:
    dtype = torch.bfloat16 if HAS_DOT else torch.float32
    buffer = torch.zeros(1, 2, 1, 1, 1, TILE * padded(_DIM), dtype=dtype)
    return SimpleNamespace(buffer=buffer, starts=[0], groups=[0], prefix=None)


def _forward(forms: Sequence[str]) -> None:
    """Compile the forward, but neither run it nor compile what it calls by address."""

    def compile_only(kernel: Any, phases: int, *arguments: Any) -> None:
        kernel.compile(tuple(numba.typeof(argument) for argument in (state_of(phases), 1, *arguments)))

    replaced: tuple[tuple[Any, str, Any], ...] = (
        (jit, "address_of", lambda *_: 0),
        (pool, "run", compile_only),
        (step, "planned", lambda *_: (*chain.NO_PLAN, 0)),
    )
    for module, name, replacement in replaced:
        setattr(module, name, replacement)
    matrix = pack(torch.zeros(_HIDDEN, _HIDDEN, dtype=torch.bfloat16))
    norms = np.zeros((3, _HIDDEN), np.float32)
    model = PackedLlama(
        matrices=[matrix] * 5,
        norms=norms,
        norm_rows=np.zeros((3, 2), np.int64),
        head_norms=np.zeros((1, 0), np.float32),
        rotated=np.full(1, _DIM),
        factor=1.0,
        eps=1e-5,
        heads=1,
        kv_heads=1,
        dim=_DIM,
    )
    rope = np.zeros(2 * _DIM, np.float32)
    model.run(torch.zeros(1, _HIDDEN), np.arange(2), [0], np.zeros(1, np.int64), _cache(), rope)


def _rest(forms: Sequence[str]) -> None:
    """Compile products, the plan and segments of attention, and single layers."""
    for form in forms:
        address_of_kind(form, FAST_DOT and form == "bfloat16")
    dot = HAS_DOT and forms[0] != "float16"
    compiled.segment_for(_DIM, dot)
    step.Attention(1, 1, _DIM, dot).arguments(np.arange(2), np.zeros(1, np.int64), _cache(), None)
    fuse = pack(torch.zeros(_HIDDEN, 2 * _HIDDEN, dtype=torch.bfloat16))
    linear(torch.zeros(1, 2 * _HIDDEN), fuse)
    row = np.zeros((1, _HIDDEN), np.float32)
    chain.inputs(row.copy(), row, None, fuse)
    paths.move(0, 0, 1, 1, 1, 0, 0, np.zeros(0, np.int64), _DIM, _DIM, HAS_DOT)


PARTS: dict[str, Callable[[Sequence[str]], None]] = {
    "forward": _forward,
    "rest": _rest,
    "sampling": lambda _: compile_all(),
}
