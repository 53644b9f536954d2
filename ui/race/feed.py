"""Turns a race's snapshots into what the page's scripts draw: three texts, called log, view and charts.

Contract: the scripts work from these alone, and nothing here estimates or smooths a number. They are texts because
gr.HTML copies and watches every number of a nested value, which at ten updates a second can take all of the
browser's time. View (the current figures) and charts (whole series) are small and are replaced.

The log is the newest part of a list of lines, one for each snapshot: {lane: {"clock_ms", "new": {index: tokens},
"rounds": records}}; see SequenceFeed.fresh, and Round.record in bass_core/sequence.py. Its first line is the run's
head, see PageFeed._head, and its second the number of lines before the third. Gradio sends only what is appended
to a text. Once the log has WINDOW characters, it starts again with its last lines: a browser copies the whole text
with each update, so a log of the whole race would cost time and memory with the square of its tokens. A page that
missed lines asks for them: see `missed`.
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
CHART_POINTS = 120
# Once the log has WINDOW characters, it starts again with its newest lines, of up to KEPT characters.
WINDOW, KEPT = 150_000, 15_000
# Besides the runs that go on, the lines of the RUNS that ended last can be asked for again, for ENDED_S seconds.
RUNS, ENDED_S = 4, 600.0
_runs: dict[str, PageFeed] = {}


def text(value: object) -> str:
    """JSON on one line without tags: gr.HTML warns about values with a script tag in them."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _short(value: Any) -> Any:
    """A record with fewer digits: six, enough to repeat an acceptance test by hand, or of large numbers three
    after the point.
    """
    if isinstance(value, dict):
        return {name: _short(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_short(one) for one in value]
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if abs(value) < 1000 else round(value, 3)


def missed(run: object, first: object) -> str:
    """The lines of a run from number `first` on; none of a run that is not known any more."""
    _forget_ended()
    feed = _runs.get(run) if isinstance(run, str) else None
    return "" if feed is None or not isinstance(first, int) else "\n".join(feed.lines[max(first, 0) :])


def _forget_ended() -> None:
    """Drop the runs that ended before the last RUNS did, or more than ENDED_S seconds ago."""
    ended = [(feed.ended, run) for run, feed in list(_runs.items()) if feed.ended is not None]
    oldest = time.monotonic() - ENDED_S
    for number, (at, run) in enumerate(sorted(ended, reverse=True)):
        if number >= RUNS or at < oldest:
            _runs.pop(run, None)


class SequenceFeed:
    """How much of one sequence the log already holds: number of tokens, and characters of its text."""

    def __init__(self) -> None:
        self.tokens, self.characters = 0, 0

    def fresh(self, sequence: SequenceSnapshot) -> list[list[Any]]:
        """The new tokens, each [origin's first letter, text, lane ms, id]; "+" adds text to the token before."""
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
    """Named columns over one x; `halve` drops every second row and keeps the first and the newest."""

    def __init__(self, x: str, names: tuple[str, ...]) -> None:
        self.x = x
        self.rows: dict[str, list[float | None]] = {name: [] for name in (x, *names)}

    def add(self, at: float, values: Mapping[str, Any]) -> None:
        """Append one row; a missing value is None."""
        for name, column in self.rows.items():
            value = at if name == self.x else values.get(name)
            column.append(None if value is None else round(value, 6 if abs(value) < 1 else 3))

    def full(self) -> bool:
        """Whether there are more rows than a chart needs."""
        return len(self.rows[self.x]) > CHART_POINTS

    def halve(self) -> None:
        """Drop every second row."""
        first = 1 - len(self.rows[self.x]) % 2
        self.rows = {name: column[:first] + column[first::2] for name, column in self.rows.items()}


class PageFeed:
    """What one run has shown so far; close it when the run ends.

    Args:
        run: name under which its lines can be asked for; "" if nobody will ask.
        settings: the race's.
        pair: names the models for the page's snippet.
    """

    def __init__(self, run: str, settings: Mapping[str, Any], pair: Mapping[str, Any] | None = None) -> None:
        self.run, self.settings, self.pair = run, settings, dict(pair or {})
        self.head: dict[str, Any] = {}
        self.lines: list[str] = []
        # The number of the log's first line, and the characters of its lines.
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
        # When the run ended, by time.monotonic().
        self.ended: float | None = None

    def close(self) -> None:
        """Note that the run has ended, so that its lines are forgotten in time."""
        self.ended = time.monotonic()
        _forget_ended()

    def update(self, snapshot: Snapshot) -> tuple[str, str, str]:
        """(log, view, charts) for this snapshot."""
        readings: Mapping[str, Any] = snapshot["device"]
        device = {key: readings.get(key) for key in SHOWN_DEVICE}
        if (energy := device["gpu_energy_mj"]) is not None:
            # The board counts from the start of its driver.
            self._energy = energy if self._energy is None else self._energy
            device["gpu_energy_mj"] = energy - self._energy
        if not self.head:
            self.head = self._head(snapshot)
            if self.run:
                _runs[self.run] = self
        self._write(snapshot["lanes"])
        self._sample(snapshot, device)
        lanes = {name: self._figures(lane) for name, lane in snapshot["lanes"].items()}
        view = {"run": self.run, "done": snapshot["done"], "lanes": lanes, "device": device}
        view["elapsed_ms"] = round(snapshot["elapsed_ms"], 1)
        view["verdict"] = judge(snapshot["lanes"], self.counted, self.settings, clock.clock_of(snapshot))
        if "comparison" in snapshot:
            view["comparison"] = snapshot["comparison"]
        return self._log(), text(view), self.charts

    def _log(self) -> str:
        """The newest lines, after the head and the number of the first of them."""
        if self._size >= WINDOW:
            self._first, self._size = len(self.lines), 0
            while self._first and (not self._size or self._size + len(self.lines[self._first - 1]) < KEPT):
                self._first -= 1
                self._size += len(self.lines[self._first])
        return "\n".join([text(self.head), str(self._first), *self.lines[self._first :]])

    def _head(self, snapshot: Snapshot) -> dict[str, Any]:
        """What stays the same in a run. Lanes and rows are the snapshot's: a recording may lack settings."""
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
        """Append this snapshot's line: each lane's clock, its new rounds, and new tokens of sequences by index."""
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

    def _figures(self, lane: LaneSnapshot) -> dict[str, Any]:
        metrics: Mapping[str, Any] = lane["metrics"]
        return {
            "metrics": {key: _short(metrics.get(key)) for key in {*(f.name for f in fields(Metrics)), *metrics}},
            "finish_reasons": [sequence["finish_reason"] for sequence in lane["sequences"]],
            "clock_ms": lane["clock_ms"],
            "finished": lane["finished"],
            "error": lane["error"],
            "reading": lane.get("reading"),
            **({"timeline": lane["timeline"]} if "timeline" in lane else {}),
        }

    def _sample(self, snapshot: Snapshot, device: dict[str, Any]) -> None:
        """Add a row to every chart, at most one per interval; the last snapshot is always added."""
        elapsed = snapshot["elapsed_ms"]
        if elapsed < self.next_ms and not snapshot["done"]:
            return
        for name, lane in snapshot["lanes"].items():
            series = self.lane_series.setdefault(name, Series("clock_ms", CHARTED_METRICS))
            clocks = series.rows["clock_ms"]
            # A lane that waits for its turn or has finished adds no point.
            if not clocks or round(lane["clock_ms"], 4) > (clocks[-1] or 0.0):
                series.add(lane["clock_ms"], lane["metrics"])
        self.device_series.add(elapsed, device)
        sampled = (self.device_series, *self.lane_series.values())
        # Halved together: lanes that missed samples fill up later, and each would double the interval again.
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
