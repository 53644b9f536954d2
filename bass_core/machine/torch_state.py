"""Set the caller's global torch settings aside while we compute (`torch_defaults`).

The default dtype and the precision belong to the whole process: if several blocks are open at once, the last one
to end restores them. Threads, gradients and deterministic algorithms need no block: kernels take any number of
threads, our forwards run in inference mode, and their results are deterministic.

Limit: transformers' `from_pretrained` changes the process's default dtype while it makes a 16-bit model. If a
block begins in another thread meanwhile, it mistakes that dtype for the caller's and may leave it set. So don't
load such a model while another thread generates.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")


class _Settings(NamedTuple):
    """Settings of the process.

    Attributes:
        precision: of float32 products, as `torch.set_float32_matmul_precision` takes it; None if the caller has
            set others for some devices, so that torch refuses to read it.
        precisions: the same per kind of device; empty in torch 2.8, which has one for all.
    """

    dtype: torch.dtype
    precision: str | None
    precisions: tuple[str, ...]


_MODULES: tuple[Any, ...] = (torch.backends.mkldnn, torch.backends.cuda)
_BACKENDS: list[Any] = [getattr(module, "matmul", None) for module in _MODULES]
_PER_DEVICE = all(hasattr(matmul, "fp32_precision") for matmul in _BACKENDS)
_FULL_PRECISION = ("none", "ieee")

_lock = threading.Lock()
# The open blocks, each with the caller's settings before the first of them.
_open: dict[object, _Settings] = {}


def _current() -> _Settings:
    precisions = tuple(matmul.fp32_precision for matmul in _BACKENDS) if _PER_DEVICE else ()
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:
        precision = None
    return _Settings(torch.get_default_dtype(), precision, precisions)


@cache
def _ours(before: _Settings) -> _Settings:
    precisions = tuple(name if name in _FULL_PRECISION else "ieee" for name in before.precisions)
    return _Settings(torch.float32, before.precision and "highest", precisions)


def _change(before: _Settings, after: _Settings) -> None:
    if after == before:
        return
    if after.dtype != before.dtype:
        torch.set_default_dtype(after.dtype)
    if after[1:] == before[1:]:
        return
    # First the setting for all devices, which changes theirs. torch refuses to read it if they contradict it.
    if after.precision is not None:
        torch.set_float32_matmul_precision(after.precision)
    for matmul, precision in zip(_BACKENDS, after.precisions, strict=False):
        matmul.fp32_precision = precision


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Give the block torch's initial settings. It decorates functions too; for generators use `stepped`.

    The default dtype is float32, the default device is the CPU, autocast is off, and products of float32 matrices
    have full precision: with less, a row's logits would depend on the number of rows.
    """
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        block = object()
        try:
            with _lock:
                _open[block] = before = next(iter(_open.values()), None) or _current()
                if len(_open) == 1:
                    _change(before, _ours(before))
            yield
        finally:
            with _lock:
                # Ctrl-C may have come before the block was registered.
                if block in _open:
                    before = _open.pop(block)
                    if not _open:
                        _change(_ours(before), before)


def stepped(items: Iterable[T]) -> Iterator[T]:
    """Yield the same items, each computed in a block of `torch_defaults` that ends before it is yielded."""
    steps = iter(items)
    while True:
        with torch_defaults():
            try:
                item = next(steps)
            except StopIteration:
                return
        yield item
