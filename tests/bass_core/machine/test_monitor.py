"""The monitor, with real figures of this process and a fake NVML whose calls can fail."""

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
    pytest.fail("the monitor never reached the expected state")


def test_figures_of_this_process_on_a_cpu() -> None:
    with Monitor(CPU, interval_s=0.02) as monitor:
        first = monitor.latest()
        assert first.keys() == KEYS and first["kind"] == "cpu" and first["name"]
        assert first["cpu_percent"] is None, "nothing was measured yet, so 0 would be wrong"
        assert 10 < first["rss_mb"] < 1e6 and first["cpu_count"] >= 1
        wait_for(lambda: sum(range(200_000)) and (monitor.latest()["cpu_percent"] or 0) > 0)
        assert gpu_fields(monitor.latest()) == dict.fromkeys(GPU_FIELDS)
        json.dumps(monitor.latest())


def test_the_monitor_leaves_no_thread_and_can_start_again() -> None:
    monitor = Monitor(CPU, interval_s=60)
    assert set(monitor.latest()) == KEYS and monitor.latest()["rss_mb"] is None and threads() == []
    for _ in range(2):
        monitor.start()
        monitor.start()
        assert threads() == ["bass-monitor"]
        monitor.latest().clear()
        assert monitor.latest().keys() == KEYS, "latest() must return a copy"
        monitor.stop()
        monitor.stop()
        assert threads() == []
    with pytest.raises(ZeroDivisionError), monitor:
        1 / 0  # noqa: B018
    assert threads() == [] and monitor.latest()["rss_mb"] is not None


def test_all_fields_are_those_of_torchs_board(nvml: FakeNvml) -> None:
    with Monitor(CUDA, interval_s=60) as monitor:
        sample = monitor.latest()
        assert gpu_fields(sample) == GOOD
        assert (sample["name"], sample["kind"]) == ("Board 9000", "cuda") and sample["rss_mb"] is not None
        assert nvml.open == 1
    assert nvml.open == 0


def test_a_call_that_fails_loses_only_its_own_fields(nvml: FakeNvml) -> None:
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


def test_the_board_is_found_only_by_its_own_uuid(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of a GPU has another UUID than its board. Without a UUID or pynvml, all fields are None."""
    slices = {"GPU-ffffffff-0000-0000-0000-000000000000": "wrong", f"MIG-{UUID}": "right"}
    for boards, uuid in ((slices, UUID), (slices, f"MIG-{UUID}"), (nvml.boards, None)):
        nvml.boards = boards
        properties = SimpleNamespace() if uuid is None else SimpleNamespace(uuid=uuid)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device, found_properties=properties: found_properties
        )
        assert NvmlDevice(CUDA).read() == (dict.fromkeys(GPU_FIELDS) if uuid is None else GOOD)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert NvmlDevice(CUDA).read() == dict.fromkeys(GPU_FIELDS)


def test_fields_are_none_while_nvml_fails(nvml: FakeNvml) -> None:
    all_calls = {name for name in dir(FakeNvml) if name.startswith("nvml")}
    with Monitor(CUDA, interval_s=0.01) as monitor:
        assert gpu_fields(monitor.latest()) == GOOD
        nvml.broken = all_calls
        wait_for(lambda: gpu_fields(monitor.latest()) == dict.fromkeys(GPU_FIELDS))
        assert monitor.latest()["rss_mb"] is not None and threads() == ["bass-monitor"]
        nvml.broken = set()
        wait_for(lambda: gpu_fields(monitor.latest()) == GOOD)


def test_the_real_nvml_never_raises() -> None:
    """With or without a GPU, each field is a number or None."""
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

    def nvmlGpmMetricsGet(self, request: SimpleNamespace) -> None:
        self._call("nvmlGpmMetricsGet")
        assert request.version == 1 and request.numMetrics == 3
        assert request.sample2[0] == request.sample1[0] + 1, "the newer sample comes second"
        for metric in request.metrics:
            metric.nvmlReturn = 0 if metric.metricId != 5 else 3
            metric.value = 10.0 * metric.metricId


def test_gpm_figures_describe_the_interval_between_two_samples(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeGpm()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    board = NvmlDevice(CUDA)
    assert board.read() == GOOD, "one sample has no interval"
    for _ in range(2):
        assert board.read() == {**GOOD, "gpu_sm_percent": 20.0, "gpu_dram_percent": 100.0}
    fake.broken.add("nvmlGpmMetricsGet")
    assert board.read() == GOOD
    board.close()
    assert fake.allocated == 0 and fake.open == 0
