"""The monitor: real figures of this process, and a fake NVML whose calls fail one by one or disappear midway."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from bass_core.machine.monitor import GPU_FIELDS, Monitor, NvmlDevice
from tests.support.nvml import UUID, FakeNvml, plug_in

KEYS = {"name", "kind", *GPU_FIELDS, "cpu_percent", "cpu_count", "rss_mb"}
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
GOOD = {
    "gpu_utilization": 87,
    "gpu_memory_mb": 2048,
    "gpu_memory_total_mb": 4096,
    "gpu_power_w": 250.5,
    "gpu_energy_mj": 123456,
    "gpu_sm_percent": None,
    "gpu_tensor_percent": None,
    "gpu_dram_percent": None,
}


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    return plug_in(monkeypatch)


def gpu_fields(sample: dict[str, object]) -> dict[str, object]:
    return {key: sample[key] for key in GPU_FIELDS}


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "bass-monitor"]


def wait_for(condition: Callable[[], object]) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("the monitor did not get there")


def test_this_process_on_a_cpu() -> None:
    with Monitor(CPU, interval_s=0.02) as monitor:
        first = monitor.latest()
        assert first.keys() == KEYS and first["kind"] == "cpu" and first["name"]
        assert first["cpu_percent"] is None, "nothing was measured yet, and 0 would be a lie"
        assert 10 < first["rss_mb"] < 1e6 and first["cpu_count"] >= 1
        wait_for(lambda: sum(range(200_000)) and (monitor.latest()["cpu_percent"] or 0) > 0)
        assert gpu_fields(monitor.latest()) == dict.fromkeys(GPU_FIELDS)
        json.dumps(monitor.latest())


def test_no_thread_stays_and_it_can_start_again() -> None:
    monitor = Monitor(CPU, interval_s=60)
    assert set(monitor.latest()) == KEYS and monitor.latest()["rss_mb"] is None and threads() == []
    for _ in range(2):
        monitor.start()
        monitor.start()
        assert threads() == ["bass-monitor"]
        monitor.latest().clear()
        assert monitor.latest().keys() == KEYS, "what is told is a copy"
        monitor.stop()
        monitor.stop()
        assert threads() == []
    with pytest.raises(ZeroDivisionError), monitor:
        1 / 0  # noqa: B018
    assert threads() == [] and monitor.latest()["rss_mb"] is not None


def test_all_fields_of_the_board_that_torch_means(nvml: FakeNvml) -> None:
    with Monitor(CUDA, interval_s=60) as monitor:
        sample = monitor.latest()
        assert gpu_fields(sample) == GOOD
        assert (sample["name"], sample["kind"]) == ("Board 9000", "cuda") and sample["rss_mb"] is not None
        assert nvml.open == 1
    assert nvml.open == 0


def test_a_call_that_fails_loses_its_own_field_alone(nvml: FakeNvml) -> None:
    for call, lost in (
        ("nvmlDeviceGetUtilizationRates", {"gpu_utilization"}),
        ("nvmlDeviceGetMemoryInfo", {"gpu_memory_mb", "gpu_memory_total_mb"}),
        ("nvmlDeviceGetPowerUsage", {"gpu_power_w"}),
        ("nvmlDeviceGetTotalEnergyConsumption", {"gpu_energy_mj"}),
        ("nvmlDeviceGetHandleByUUID", set(GPU_FIELDS)),
        ("nvmlInit", set(GPU_FIELDS)),
        ("nvmlShutdown", set()),
    ):
        nvml.broken = {call}
        with Monitor(CUDA, interval_s=60) as monitor:
            sample = monitor.latest()
        assert gpu_fields(sample) == {key: None if key in lost else value for key, value in GOOD.items()}
        assert sample["rss_mb"] is not None and nvml.open == 0


def test_the_board_is_found_by_its_own_name_or_not_at_all(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of a board has a name of its own; without one, or without pynvml, nothing is guessed."""
    slices = {"GPU-ffffffff-0000-0000-0000-000000000000": "wrong", f"MIG-{UUID}": "right"}
    for boards, told in ((slices, UUID), (slices, f"MIG-{UUID}"), (nvml.boards, None)):
        nvml.boards = boards
        properties = SimpleNamespace() if told is None else SimpleNamespace(uuid=told)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, made=properties: made)
        assert NvmlDevice(CUDA).read() == (dict.fromkeys(GPU_FIELDS) if told is None else GOOD)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert NvmlDevice(CUDA).read() == dict.fromkeys(GPU_FIELDS)


def test_nvml_vanishes_midway_and_comes_back(nvml: FakeNvml) -> None:
    every = {name for name in dir(FakeNvml) if name.startswith("nvml")}
    with Monitor(CUDA, interval_s=0.01) as monitor:
        assert gpu_fields(monitor.latest()) == GOOD
        nvml.broken = every
        wait_for(lambda: gpu_fields(monitor.latest()) == dict.fromkeys(GPU_FIELDS))
        assert monitor.latest()["rss_mb"] is not None and threads() == ["bass-monitor"]
        nvml.broken = set()
        wait_for(lambda: gpu_fields(monitor.latest()) == GOOD)


def test_the_real_nvml_without_a_driver_or_with_one() -> None:
    """Whatever this machine has: no exception, and each field is a number or None."""
    board = NvmlDevice(CUDA)
    values = board.read()
    board.close()
    assert tuple(values) == GPU_FIELDS
    assert all(value is None or value >= 0 for value in values.values())


class FakeGpm(FakeNvml):
    """A board with GPM as in pynvml: samples are filled in place, and a metric is computed from two of them."""

    NVML_GPM_METRICS_GET_VERSION = 1

    def __init__(self) -> None:
        super().__init__()
        self.allocated = self.reads = 0

    def nvmlGpmQueryDeviceSupport(self, board: str) -> object:
        return SimpleNamespace(isSupportedDevice=1)

    def nvmlGpmSampleAlloc(self) -> list[int]:
        self.allocated += 1
        return [0]

    def nvmlGpmSampleFree(self, sample: list[int]) -> None:
        self.allocated -= 1

    def nvmlGpmSampleGet(self, board: str, sample: list[int]) -> None:
        self.reads += 1
        sample[0] = self.reads

    def c_nvmlGpmMetricsGet_t(self) -> object:
        return SimpleNamespace(metrics=[SimpleNamespace() for _ in range(3)])

    def nvmlGpmMetricsGet(self, asked: SimpleNamespace) -> None:
        self._call("nvmlGpmMetricsGet")
        assert asked.version == 1 and asked.numMetrics == 3
        assert asked.sample2[0] == asked.sample1[0] + 1, "the newer sample comes second"
        for metric in asked.metrics:
            metric.nvmlReturn = 0 if metric.metricId != 5 else 3
            metric.value = 10.0 * metric.metricId


def test_gpm_figures_are_of_the_interval_between_two_samples(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeGpm()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    board = NvmlDevice(CUDA)
    assert board.read() == GOOD, "one sample alone says nothing"
    for _ in range(2):
        assert board.read() == {**GOOD, "gpu_sm_percent": 20.0, "gpu_dram_percent": 100.0}
    fake.broken.add("nvmlGpmMetricsGet")
    assert board.read() == GOOD
    board.close()
    assert fake.allocated == 0 and fake.open == 0
