"""The hash of random numbers (bass_core/sample/noise.py) as one operator of the emulated device.

`hash_at_once(monkeypatch)` saves 160 operators per draw. Don't use it everywhere: only without it do captures of
the hash show that it reads nothing on the host (test_graphs.py, test_launched_ahead.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bass_core.sample import noise

from .memory import is_emulated

_library = torch.library.Library("bass_emulation", "DEF")
_library.define("philox(Tensor[] counter, Tensor[] key) -> (Tensor, Tensor, Tensor, Tensor)")
_hash = noise.philox


def _on_cpu(counter: list[Tensor], key: list[Tensor]) -> tuple[Tensor, ...]:
    with np.errstate(over="ignore"):
        words = _hash(tuple(word.numpy() for word in counter), (key[0].numpy(), key[1].numpy()))
    return tuple(torch.as_tensor(word) for word in words)


_library.impl("philox", _on_cpu, "CPU")


def hash_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the hash as one operator on the device until the end of the test."""

    def philox(counter: tuple[Any, ...], key: tuple[Any, Any]) -> tuple[Any, ...]:
        if not is_emulated(counter[0]):
            return _hash(counter, key)
        words: tuple[Tensor, ...] = torch.ops.bass_emulation.philox(counter, list(map(torch.as_tensor, key)))
        return words

    monkeypatch.setattr(noise, "philox", philox)
