"""Models and fixtures for the tests that run on the emulated accelerator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from bass_core import ModelPair, generate
from bass_core.machine import capture, hardware
from bass_core.model.base import CausalModel
from kernels.support import runtime
from tests.devices.conftest import accelerator  # noqa: F401
from tests.devices.emulation import capture as emulated_capture
from tests.devices.emulation import emulated
from tests.support.models import prompts, texts_of, tiny_pair

DEVICE = torch.device(emulated.TYPE, 0)
ROWS = prompts(3)
COUNT = 8
TEXT: dict[str, Any] = {"max_new_tokens": COUNT, "draft_length": 3, "eos_token_id": None}


@pytest.fixture
def small(accelerator: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:  # noqa: F811
    """Reset the process-wide capture state and shorten the copies of the bandwidth measurement."""
    monkeypatch.setattr(capture, "_failed", False)
    monkeypatch.setattr(hardware, "COPY_BYTES", 1 << 12)
    monkeypatch.setattr(emulated_capture, "captured", 0)
    measured = hardware.copy_bandwidth
    yield
    measured.cache_clear()


def on_device(device: torch.device = DEVICE, plain: bool = False) -> ModelPair:
    """Return a pair on the device; `plain` runs transformers' own forward."""
    pair = tiny_pair(0.03, to=device)
    if plain:
        pair.target_step = CausalModel(pair.target)
    return pair


def texts(pair: ModelPair, **arguments: Any) -> list[list[int]]:
    """Return the new token ids of each row."""
    return texts_of(generate(pair, ROWS, **TEXT, **arguments))


def while_capturing(monkeypatch: pytest.MonkeyPatch, model: CausalModel, action: Callable[[], None]) -> None:
    """Run `action` inside each capture of the model's forward."""
    forward = model.forward_captured

    def forward_with_action(*arguments: Any) -> Any:
        if runtime(DEVICE).is_current_stream_capturing():
            action()
        return forward(*arguments)

    monkeypatch.setattr(model, "forward_captured", forward_with_action)
