"""NVML's GPU performance monitoring (Hopper and newer): utilization of multiprocessors, tensor cores and memory.

Contract: `read()` returns percentages over the time since the previous `read()`, None for each one that can't be
read; the first call only starts the interval. Figures are of the whole board. Non-goals: MIG slices.
"""

from __future__ import annotations

from typing import Any

# Our field name: NVML's metric id (nvml.h, nvmlGpmMetricId_t).
METRICS = {"gpu_sm_percent": 2, "gpu_tensor_percent": 5, "gpu_dram_percent": 10}


class GpmSampler:
    """Reads one board's metrics. `nvml`: the initialised pynvml module; `board`: an NVML device handle."""

    def __init__(self, nvml: Any, board: Any) -> None:
        self._nvml, self._board = nvml, board
        self._samples: list[Any] = []
        try:
            if nvml.nvmlGpmQueryDeviceSupport(board).isSupportedDevice:
                self._samples = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
        except (nvml.NVMLError, AttributeError):
            pass
        self._started = False

    def read(self) -> dict[str, float | None]:
        """The fields of METRICS, in percent over the time since the last call."""
        nothing: dict[str, float | None] = dict.fromkeys(METRICS)
        if not self._samples:
            return nothing
        nvml = self._nvml
        try:
            nvml.nvmlGpmSampleGet(self._board, self._samples[1])
            if not self._started:
                return nothing
            asked = nvml.c_nvmlGpmMetricsGet_t()
            asked.version = nvml.NVML_GPM_METRICS_GET_VERSION
            asked.numMetrics = len(METRICS)
            asked.sample1, asked.sample2 = self._samples
            for index, metric in enumerate(METRICS.values()):
                asked.metrics[index].metricId = metric
            nvml.nvmlGpmMetricsGet(asked)
            got = [asked.metrics[index] for index in range(len(METRICS))]
            return {
                name: float(one.value) if one.nvmlReturn == 0 else None
                for name, one in zip(METRICS, got, strict=True)
            }
        except (nvml.NVMLError, AttributeError):
            return nothing
        finally:
            self._samples.reverse()
            self._started = True

    def close(self) -> None:
        """Free both samples."""
        samples, self._samples = self._samples, []
        for sample in samples:
            try:
                self._nvml.nvmlGpmSampleFree(sample)
            except (self._nvml.NVMLError, AttributeError):
                continue
