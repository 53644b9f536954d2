"""Turns the snapshots of a race into three JSON texts for the page's scripts: log, view and charts.

Start with `PageFeed.update`. The scripts draw only from these texts. No number is estimated or smoothed here.
We send texts because gr.HTML copies and watches every number of a nested value. At ten updates per second, this
can take all of the browser's time.

- View (the current figures) and charts (whole series) are small. Each update replaces them.
- The log grows by one line per snapshot: {lane: {"clock_ms", "new": {index: tokens}, "rounds": records}}. See
  SequenceFeed.fresh for the tokens, and Round.record in bass_core/sequence.py for the records. Line 1 is the head
  of the run (PageFeed._head). Line 2 is the number of lines that were dropped after it.

Gradio sends only the text that was appended. A browser still copies the whole text at each update, so a log of the
whole race would cost time and memory quadratic in its tokens. The log therefore restarts with its newest lines at
WINDOW characters. A page that missed some lines asks for them with `missed`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from bass_core import (
    VERIFICATIONS,
    LaneSnapshot,
    Metrics,
    SequenceSnapshot,
    Snapshot,
)
from ui.page import clock
from ui.page.request import keywords
from ui.race.looks import looks, reference
from ui.race.verdict import LaneRounds, judge

SHOWN_DEVICE = (
    "name", "kind", "gpu_utilization", "gpu_memory_mb", "gpu_memory_total_mb", "gpu_power_w", "gpu_energy_mj",
    "gpu_sm_percent", "gpu_tensor_percent", "gpu_dram_percent", "cpu_percent", "cpu_count", "rss_mb",
)  # fmt: skip
CHARTED_DEVICE = ("gpu_utilization", "gpu_memory_mb", "gpu_power_w", "cpu_percent", "rss_mb")
CHARTED_METRICS = ("ms_per_token", "acceptance_rate", "new_tokens", "flops_utilization")
SPANS = ("target", "draft", "rollbacks")
CHART_POINTS = 120
# At WINDOW characters, the log restarts with its newest lines: at most RESTART_CHARACTERS of them.
WINDOW, RESTART_CHARACTERS = 60_000, 15_000
# `missed` serves every active run, and the newest RUNS ended ones until ENDED_S seconds after their end.
RUNS, ENDED_S = 4, 600.0
_runs: dict[str, PageFeed] = {}


def text(value: object) -> str:
    """Return the value as one line of JSON without "<", because gr.HTML warns about script tags."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _short(value: Any) -> Any:
    """Round the floats of a record: six digits, enough to repeat a test, or three decimals from 1000 on."""
    if isinstance(value, dict):
        return {name: _short(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_short(item) for item in value]
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if abs(value) < 1000 else round(value, 3)


def missed(run: object, first: object) -> str:
    """Return the log's lines of a run from line number `first` on, or "" if the run has been forgotten."""
    _forget_ended()
    feed = _runs.get(run) if isinstance(run, str) else None
    return "" if feed is None or not isinstance(first, int) else "\n".join(feed.lines[max(first, 0) :])


def _forget_ended() -> None:
    """Drop all ended runs except the newest RUNS, and those that ended more than ENDED_S seconds ago."""
    ended = [(feed.ended, run) for run, feed in list(_runs.items()) if feed.ended is not None]
    oldest = time.monotonic() - ENDED_S
    for number, (at, run) in enumerate(sorted(ended, reverse=True)):
        if number >= RUNS or at < oldest:
            _runs.pop(run, None)


class SequenceFeed:
    """Counts the tokens and characters of one sequence that the log already has."""

    def __init__(self) -> None:
        self.tokens, self.characters = 0, 0

    def fresh(self, sequence: SequenceSnapshot) -> list[list[Any]]:
        """Return the new tokens, each as [first letter of its origin, text, lane time in ms, id].

        An entry with the origin "+" adds its text to the previous token. For example, a token that ended inside a
        character gets its text once the next token has arrived.
        """
        pieces, text = sequence["pieces"] or [], sequence["text"] or ""
        origins, times = sequence["origins"], sequence["times_ms"]
        seen = sum(map(len, pieces[: self.tokens]))
        new: list[list[Any]] = []
        if seen > self.characters:
            new.append(["+", text[self.characters : seen], round(times[self.tokens - 1], 3), -1])
        for i in range(self.tokens, len(pieces)):
            new.append([origins[i][0], pieces[i], round(times[i], 3), sequence["token_ids"][i]])
        self.tokens, self.characters = len(pieces), len(text)
        return new


class Series:
    """Named columns over one x. `halve` drops every second row but keeps the first and the newest."""

    def __init__(self, x: str, names: tuple[str, ...]) -> None:
        self.x = x
        self.rows: dict[str, list[float | None]] = {name: [] for name in (x, *names)}

    def add(self, at: float, values: Mapping[str, Any]) -> None:
        """Append one row. A missing value becomes None."""
        for name, column in self.rows.items():
            value = at if name == self.x else values.get(name)
            column.append(None if value is None else round(value, 6 if abs(value) < 1 else 3))

    def full(self) -> bool:
        """Return whether there are more rows than a chart needs."""
        return len(self.rows[self.x]) > CHART_POINTS

    def halve(self) -> None:
        """Drop every second row."""
        first = 1 - len(self.rows[self.x]) % 2
        self.rows = {name: column[:first] + column[first::2] for name, column in self.rows.items()}


class PageFeed:
    """Builds log, view and charts of one run. Close it when the run ends.

    Args:
        run: the name under which `missed` finds its lines, or "" if nobody will ask for them.
    """

    def __init__(self, run: str, settings: Mapping[str, Any], pair: Mapping[str, Any] | None = None) -> None:
        self.run, self.settings, self.pair = run, settings, dict(pair or {})
        self.head: dict[str, Any] = {}
        self.lines: list[str] = []
        # _first: where in `lines` the log begins. _size: the number of characters from there on.
        self._first, self._size = 0, 0
        self._energy: float | None = None
        self.sequences: dict[tuple[str, int], SequenceFeed] = {}
        self.rounds: dict[str, int] = {}
        self.counted: dict[str, LaneRounds] = {}
        self.lane_series: dict[str, Series] = {}
        self.round_series: dict[str, Series] = {}
        self.device_series = Series("elapsed_ms", CHARTED_DEVICE)
        self.interval_ms, self.next_ms = 200.0, 0.0
        self.charts = ""
        # time.monotonic() at the end of the run.
        self.ended: float | None = None

    def close(self) -> None:
        """Mark the run as ended, so that its lines are dropped later."""
        self.ended = time.monotonic()
        _forget_ended()

    def update(self, snapshot: Snapshot) -> tuple[str, str, str]:
        """Return the log, view and charts after this snapshot."""
        readings: Mapping[str, Any] = snapshot["device"]
        device = {key: readings.get(key) for key in SHOWN_DEVICE}
        if (energy := device["gpu_energy_mj"]) is not None:
            # The board counts energy since its driver was loaded, so subtract the first reading.
            self._energy = energy if self._energy is None else self._energy
            device["gpu_energy_mj"] = energy - self._energy
        if not self.head:
            self.head = self._head(snapshot)
            if self.run:
                _runs[self.run] = self
        self._write(snapshot["lanes"])
        self._sample(snapshot, device)
        lanes = {name: self._figures(lane, snapshot["done"]) for name, lane in snapshot["lanes"].items()}
        view = {"run": self.run, "done": snapshot["done"], "lanes": lanes, "device": device}
        view["elapsed_ms"] = round(snapshot["elapsed_ms"], 1)
        view["verdict"] = judge(snapshot["lanes"], self.counted, self.settings, clock.clock_of(snapshot))
        if "comparison" in snapshot:
            view["comparison"] = snapshot["comparison"]
        return self._log(), text(view), self.charts

    def _log(self) -> str:
        """Return the head, the index of the first line that follows, and the newest lines."""
        if self._size >= WINDOW:
            self._first, self._size = len(self.lines), 0
            while self._first and (
                not self._size or self._size + len(self.lines[self._first - 1]) < RESTART_CHARACTERS
            ):
                self._first -= 1
                self._size += len(self.lines[self._first])
        return "\n".join([text(self.head), str(self._first), *self.lines[self._first :]])

    def _head(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return the data that is constant during a run. The settings of a recording may lack lanes and rows."""
        rows = max(len(lane["sequences"]) for lane in snapshot["lanes"].values())
        settings = self.settings
        verification = VERIFICATIONS.get(str(settings.get("verification")))
        return {
            "run": self.run,
            "settings": settings,
            "together": bool(verification and verification.together and settings.get("temperature"))
            and settings.get("acceptance") is None,
            "keywords": keywords(),
            "pair": self.pair,
            "lanes": list(snapshot["lanes"]),
            "looks": looks([*snapshot["lanes"], reference()]),
            "reference": reference(),
            "batch_size": rows,
            **clock.head(snapshot, settings),
        }

    def _write(self, lanes: Mapping[str, LaneSnapshot]) -> None:
        """Append the snapshot's line: for each lane its clock, its new rounds and the new tokens by sequence."""
        line: dict[str, Any] = {}
        for name, lane in lanes.items():
            new = {}
            for index, sequence in enumerate(lane["sequences"]):
                tokens = self.sequences.setdefault((name, index), SequenceFeed()).fresh(sequence)
                if tokens:
                    new[index] = tokens
            records = lane.get("rounds", [])[self.rounds.get(name, 0) :]
            self.rounds[name] = self.rounds.get(name, 0) + len(records)
            counted = self.counted.setdefault(name, LaneRounds())
            lengths = self.round_series.setdefault(name, Series("time_ms", ("draft_length",)))
            for record in records:
                counted.add(record)
                if record["kind"] == "verify":
                    lengths.add(record["time_ms"], record)
            line[name] = {"clock_ms": lane["clock_ms"], "new": new, "rounds": [_short(r) for r in records]}
        self.lines.append(text(line))
        self._size += len(self.lines[-1])

    def _figures(self, lane: LaneSnapshot, done: bool) -> dict[str, Any]:
        metrics: Mapping[str, Any] = lane["metrics"]
        # The spans of a timeline grow with the race, and the page needs them only for the export at its end.
        timeline = {name: value for name, value in lane.get("timeline", {}).items() if done or name not in SPANS}
        return {
            "metrics": {key: _short(metrics.get(key)) for key in {*(f.name for f in fields(Metrics)), *metrics}},
            "finish_reasons": [sequence["finish_reason"] for sequence in lane["sequences"]],
            "clock_ms": lane["clock_ms"],
            "finished": lane["finished"],
            "error": lane["error"],
            "reading": lane.get("reading"),
            **({"timeline": timeline} if timeline else {}),
        }

    def _sample(self, snapshot: Snapshot, device: dict[str, Any]) -> None:
        """Add a row to every chart once per interval, and a row for the last snapshot in any case."""
        elapsed = snapshot["elapsed_ms"]
        if elapsed < self.next_ms and not snapshot["done"]:
            return
        for name, lane in snapshot["lanes"].items():
            series = self.lane_series.setdefault(name, Series("clock_ms", CHARTED_METRICS))
            clocks = series.rows["clock_ms"]
            # Skip lanes that are waiting for their turn or have finished.
            if not clocks or round(lane["clock_ms"], 4) > (clocks[-1] or 0.0):
                series.add(lane["clock_ms"], lane["metrics"])
        self.device_series.add(elapsed, device)
        sampled = (self.device_series, *self.lane_series.values())
        # As soon as one series is full, halve all of them and double the interval. If each series were halved when
        # it is full itself, the interval would be doubled once per series.
        if any(series.full() for series in sampled):
            self.interval_ms *= 2
            for series in sampled:
                series.halve()
        for series in self.round_series.values():
            while series.full():
                series.halve()
        self.next_ms = elapsed + self.interval_ms
        columns: dict[str, Any] = {"series": self.device_series.rows}
        columns["cache"] = {name: lane.get("cache") for name, lane in snapshot["lanes"].items()}
        for key, group in (("lanes", self.lane_series), ("rounds", self.round_series)):
            columns[key] = {name: series.rows for name, series in group.items()}
        self.charts = text({"run": self.run, "device": device, **columns})
