"""A stand-in for NVML's Python module on machines without a GPU: call `plug_in`."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

UUID = "1b2c3d4e-0000-1111-2222-333344445555"


class FakeNvml(ModuleType):
    """Two boards whose numbers differ from CUDA's; `broken` holds the names of calls that raise."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.broken: set[str] = set()
        self.open = 0
        self.boards = {"GPU-ffffffff-0000-0000-0000-000000000000": "wrong", f"GPU-{UUID}": "right"}

    def _call(self, name: str, value: object = None) -> object:
        if name in self.broken:
            raise self.NVMLError(name)
        return value

    def nvmlInit(self) -> None:
        self._call("nvmlInit")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1
        self._call("nvmlShutdown")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object:
        if uuid not in self.boards:
            raise self.NVMLError("not found")
        return self._call("nvmlDeviceGetHandleByUUID", self.boards[uuid])

    def nvmlDeviceGetUtilizationRates(self, board: str) -> object:
        return self._call("nvmlDeviceGetUtilizationRates", SimpleNamespace(gpu=87 if board == "right" else 1))

    def nvmlDeviceGetMemoryInfo(self, board: str) -> object:
        return self._call("nvmlDeviceGetMemoryInfo", SimpleNamespace(used=2048 * 2**20, total=4096 * 2**20))

    def nvmlDeviceGetPowerUsage(self, board: str) -> object:
        return self._call("nvmlDeviceGetPowerUsage", 250500)

    def nvmlDeviceGetTotalEnergyConsumption(self, board: str) -> object:
        return self._call("nvmlDeviceGetTotalEnergyConsumption", 123456)


def plug_in(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """Make torch and NVML report one visible CUDA device."""
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Board 9000")
    return fake
