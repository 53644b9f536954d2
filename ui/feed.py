"""Contract: turns a race's snapshots into what the page's script draws: three texts, log, view and charts.

They are texts because gr.HTML follows a nested value badly: it copies and watches every number in it, and under
ten updates a second the browser can end up doing nothing else. The log holds every token once and only grows, so
that Gradio sends its new tail alone; view (the figures of this moment) and charts (whole series) are small and
replaced. The script works from these alone; nothing here estimates or smooths a number.
"""

from __future__ import annotations

import json
from typing import Any

from ui.limits import RaceRequest

SHOWN_METRICS = ("ms_per_token", "speedup", "throughput_tps", "acceptance_rate", "new_tokens")
SHOWN_DEVICE = (
    "name", "kind", "gpu_utilization", "gpu_memory_mb", "gpu_memory_total_mb", "gpu_power_w",
    "cpu_percent", "cpu_count", "rss_mb",
)  # fmt: skip
CHARTED_DEVICE = ("gpu_utilization", "gpu_memory_mb", "cpu_percent", "rss_mb")
CHART_POINTS = 240


def _text(value: object) -> str:
    """JSON on one line that holds no tag: gr.HTML warns about values with a script tag in them."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


class SequenceFeed:
    """How much of one sequence the log has."""

    def __init__(self) -> None:
        self.tokens, self.characters = 0, 0

    def fresh(self, sequence: dict[str, Any]) -> list[list[Any]]:
        """What is new: [origin's letter, text, lane ms] a token; "+" adds text that the token before held back."""
        pieces, origins, times = sequence["pieces"], sequence["origins"], sequence["times_ms"]
        seen = sum(map(len, pieces[: self.tokens]))
        new: list[list[Any]] = []
        if seen > self.characters:
            new.append(["+", sequence["text"][self.characters : seen], round(times[self.tokens - 1], 1)])
        for i in range(self.tokens, len(pieces)):
            new.append([origins[i][0], pieces[i], round(times[i], 1)])
        self.tokens, self.characters = len(pieces), len(sequence["text"])
        return new


class Series:
    """Named columns over one x, thinned to CHART_POINTS by dropping every second row."""

    def __init__(self, x: str, names: tuple[str, ...]) -> None:
        self.x = x
        self.rows: dict[str, list[float | None]] = {name: [] for name in (x, *names)}

    def add(self, at: float, values: dict[str, Any]) -> None:
        """Append one row; a value that is missing stays None."""
        for name, column in self.rows.items():
            value = at if name == self.x else values.get(name)
            column.append(None if value is None else round(value, 4))

    def thin(self) -> bool:
        """Halve the rows when there are too many; returns whether it did."""
        if len(self.rows[self.x]) <= CHART_POINTS:
            return False
        self.rows = {name: column[::2] for name, column in self.rows.items()}
        return True


class PageFeed:
    """Everything one run has shown so far."""

    def __init__(self, run: str, request: RaceRequest) -> None:
        self.head = {"run": run, "batch_size": request.batch_size, "temperature": request.temperature}
        self.log = _text(self.head)
        self.sequences: dict[tuple[str, int], SequenceFeed] = {}
        self.lane_series: dict[str, Series] = {}
        self.device_series = Series("elapsed_ms", CHARTED_DEVICE)
        self.interval_ms, self.next_ms = 200.0, 0.0
        self.charts = ""

    def update(self, snapshot: dict[str, Any]) -> tuple[str, str, str]:
        """(log, view, charts) for this snapshot."""
        device = {key: snapshot["device"].get(key) for key in SHOWN_DEVICE}
        self._write(snapshot["lanes"])
        self._sample(snapshot, device)
        lanes = {name: self._figures(lane) for name, lane in snapshot["lanes"].items()}
        return self.log, _text({**self.head, "lanes": lanes, "device": device}), self.charts

    def _write(self, lanes: dict[str, Any]) -> None:
        """One line for this snapshot: every lane's clock and the new tokens of its sequences, by index."""
        line: dict[str, Any] = {}
        for name, lane in lanes.items():
            new = {}
            for index, sequence in enumerate(lane["sequences"]):
                tokens = self.sequences.setdefault((name, index), SequenceFeed()).fresh(sequence)
                if tokens:
                    new[index] = tokens
            line[name] = {"clock_ms": lane["clock_ms"], "new": new}
        self.log += "\n" + _text(line)

    def _figures(self, lane: dict[str, Any]) -> dict[str, Any]:
        return {
            "metrics": {key: lane["metrics"].get(key) for key in SHOWN_METRICS},
            "finish_reasons": [sequence["finish_reason"] for sequence in lane["sequences"]],
            "clock_ms": lane["clock_ms"],
            "finished": lane["finished"],
            "error": lane["error"],
        }

    def _sample(self, snapshot: dict[str, Any], device: dict[str, Any]) -> None:
        """Add a row to every chart, at most one each interval; the last snapshot always counts."""
        elapsed = snapshot["elapsed_ms"]
        if elapsed < self.next_ms and not snapshot["done"]:
            return
        for name, lane in snapshot["lanes"].items():
            series = self.lane_series.setdefault(name, Series("clock_ms", ("ms_per_token", "acceptance_rate")))
            clocks = series.rows["clock_ms"]
            # A lane that waits for its turn or has finished adds nothing.
            if not clocks or round(lane["clock_ms"], 4) > (clocks[-1] or 0.0):
                series.add(lane["clock_ms"], lane["metrics"])
        self.device_series.add(elapsed, device)
        if any([series.thin() for series in (self.device_series, *self.lane_series.values())]):
            self.interval_ms *= 2
        self.next_ms = elapsed + self.interval_ms
        lanes = {name: series.rows for name, series in self.lane_series.items()}
        self.charts = _text({**self.head, "device": device, "lanes": lanes, "series": self.device_series.rows})
