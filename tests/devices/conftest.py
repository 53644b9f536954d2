"""Resets the emulated device before each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Return the first emulated device with empty counters; drop graphs and caches after the test."""
    from bass_core.model import graphs as graphs

    from .emulation import emulated, runtime  # noqa: F401  registers the device

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    runtime.restore()
    # AMUSD's draft shares the target's device. Only test_amusd.py gives the draft a separate device.
    monkeypatch.setattr("bass_core.decode.amusd.session.second_device", lambda device: None)
    for module in ("generate", "race"):
        monkeypatch.setattr(f"bass_core.lanes.{module}.warm_up", lambda pair, request: None)
    yield torch.device("emul", 0)
    graphs._idle.clear()
    runtime.restore()
    torch.set_num_threads(threads)
