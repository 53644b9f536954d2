"""Contract: before each test the emulated device is reset to its initial state."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The first emulated device, nothing counted, no pair warmed up; no graph or cache outlives the test."""
    from bass_core.model import graphs as graphs

    from .emulation import emulated, runtime  # noqa: F401  registers the device

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    runtime.restore()
    # AMUSD's draft shares its target's device; test_amusd.py lets it have one of its own.
    monkeypatch.setattr("bass_core.decode.overlapped.session.second_device", lambda device: None)
    for module in ("generate", "race"):
        monkeypatch.setattr(f"bass_core.lanes.{module}.warm_up", lambda pair, request: None)
    yield torch.device("emul", 0)
    graphs._idle.clear()
    runtime.restore()
    torch.set_num_threads(threads)
