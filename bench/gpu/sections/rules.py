"""How a kernel's result is compared with a reference, and what its outputs hold before it runs.

Contract: our error against a float64 or float32 reference is at most three times that of plain torch in the same
precision (the rule of flash-attention's tests), or a few rounding steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# (what one process compiles for, the case's name, the case)
Cases = Iterator[tuple[Hashable, str, Callable[[], None]]]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@contextmanager
def poisoned() -> Iterator[None]:
    """Within this context torch.empty returns NaN or the largest integer, which exposes unwritten outputs."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def compare(ours: Tensor, plain: Tensor, exact: Tensor, steps: float = 2.0) -> None:
    """Raises AssertionError if the error of `ours` against `exact` is beyond the rule of the module's contract."""
    if not torch.isfinite(ours).all():
        raise AssertionError("not every output was written, or it is not finite")
    error, allowed = ((one.double() - exact.double()).abs().max().item() for one in (ours, plain))
    steps = max(steps, 32.0 if ours.dtype == torch.float32 else 0.0)
    floor = steps * torch.finfo(ours.dtype).eps * max(1.0, exact.abs().max().item())
    if error > max(3 * allowed, floor):
        raise AssertionError(f"error {error:.2e}, plain torch {allowed:.2e}")
