"""NVML's GPU performance monitoring (Hopper and newer): use of multiprocessors, tensor cores and memory.

`read()` returns percentages over the time since the previous `read()`, or None if they can't be read; the first
call only starts the interval. Figures are of the whole board; MIG slices are not supported.
"""

from __future__ import annotations

from typing import Any

# Our field name: NVML's metric id (nvml.h, nvmlGpmMetricId_t).
METRICS = {"gpu_sm_percent": 2, "gpu_tensor_percent": 5, "gpu_dram_percent": 10}


class GpmSampler:
    """Reads one board's metrics."""

    def __init__(self, nvml: Any, board: Any) -> None:
        """Allocate the samples, given the initialised pynvml module and an NVML device handle."""
        self._nvml, self._board = nvml, board
        self._samples: list[Any] = []
        try:
            if nvml.nvmlGpmQueryDeviceSupport(board).isSupportedDevice:
                self._samples = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
        except (nvml.NVMLError, AttributeError):
            pass
        self._started = False

    def read(self) -> dict[str, float | None]:
        """Return the fields of METRICS, in percent over the time since the last call."""
        no_values: dict[str, float | None] = dict.fromkeys(METRICS)
        if not self._samples:
            return no_values
        nvml = self._nvml
        try:
            nvml.nvmlGpmSampleGet(self._board, self._samples[1])
            if not self._started:
                return no_values
            query = nvml.c_nvmlGpmMetricsGet_t()
            query.version = nvml.NVML_GPM_METRICS_GET_VERSION
            query.numMetrics = len(METRICS)
            query.sample1, query.sample2 = self._samples
            for index, metric in enumerate(METRICS.values()):
                query.metrics[index].metricId = metric
            nvml.nvmlGpmMetricsGet(query)
            metrics = [query.metrics[index] for index in range(len(METRICS))]
            return {
                name: float(metric.value) if metric.nvmlReturn == 0 else None
                for name, metric in zip(METRICS, metrics, strict=True)
            }
        except (nvml.NVMLError, AttributeError):
            return no_values
        finally:
            self._samples.reverse()
            self._started = True

    def close(self) -> None:
        samples, self._samples = self._samples, []
        for sample in samples:
            try:
                self._nvml.nvmlGpmSampleFree(sample)
            except (self._nvml.NVMLError, AttributeError):
                continue
