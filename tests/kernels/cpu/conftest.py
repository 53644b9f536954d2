"""Contract: these tests need numba, and each may set torch's number of threads. The folder of compiled code is set
before a kernel is imported, so that a changed source is compiled anew."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bass_core.machine import cpu_kernels

collect_ignore_glob = [] if cpu_kernels.available() else ["test_*.py"]


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """torch's number of threads; small work is shared as well."""
    from kernels.cpu.sampling import calls

    monkeypatch.setattr(calls, "_LEAST_SHARED", 0)
    torch.set_num_threads(request.param)
    return int(request.param)
