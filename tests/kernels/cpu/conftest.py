"""Tests of the CPU kernels are skipped without numba, and may set torch's number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bass_core.machine import cpu_kernels

# `available` sets the folder of compiled code, so call it before any kernel is imported.
collect_ignore_glob = [] if cpu_kernels.available() else ["test_*.py"]


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Set torch's number of threads, and let the kernels share even small work among them."""
    from kernels.cpu.sampling import calls

    monkeypatch.setattr(calls, "_LEAST_SHARED", 0)
    torch.set_num_threads(request.param)
    return int(request.param)
