"""Random numbers from torch's default generator that leave the caller's numbers unchanged.

Inside `drawing()`, the device's default generator (which `generate` draws from) has this object's own state: it
starts at the seed and continues where the last `drawing()` ended. Outside, the generator is as it was before.
The generator belongs to the whole process, so no other thread may draw from it inside `drawing()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kernels.support import is_accelerator, runtime


class OwnNoise:
    """A stream of random numbers for one lane."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device
        self._state = torch.Generator(device).manual_seed(seed).get_state()

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Let torch's default generator continue this stream in the block; then restore the generator's state."""
        before = self._get()
        try:
            self._set(self._state)
            yield
            self._state = self._get()
        finally:
            self._set(before)

    def _get(self) -> torch.Tensor:
        if is_accelerator(self._device):
            state: torch.Tensor = runtime(self._device).get_rng_state(self._device)
            return state
        return torch.get_rng_state()

    def _set(self, state: torch.Tensor) -> None:
        if is_accelerator(self._device):
            runtime(self._device).set_rng_state(state, self._device)
        else:
            torch.set_rng_state(state)
