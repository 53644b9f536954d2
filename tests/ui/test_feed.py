"""What the page draws holds every token once, with its origin and lane time, and no number that is not known."""

from __future__ import annotations

import json
from typing import Any

from ui.feed import CHART_POINTS, PageFeed
from ui.limits import RaceRequest

REQUEST = RaceRequest("Hello", 1, 64, 0.7, 0)


def snapshot(pieces: list[str], at: float, *, done: bool = False) -> dict[str, Any]:
    origins = ["sampled", "accepted", "recovered", "bonus"]
    sequence = {
        "text": "".join(pieces), "token_ids": [1] * len(pieces), "pieces": pieces, "finish_reason": None,
        "origins": [origins[i % 4] for i in range(len(pieces))],
        "times_ms": [10.0 * i for i in range(len(pieces))],
    }  # fmt: skip
    lane = {
        "sequences": [sequence], "clock_ms": at, "finished": done, "error": None,
        "metrics": {"ms_per_token": 10.0, "acceptance_rate": None, "speedup": None},
    }  # fmt: skip
    device = {"name": "toy", "kind": "cpu", "cpu_percent": 50.0, "gpu_utilization": None}
    return {
        "done": done, "scheduling": "fair", "elapsed_ms": at, "lanes": {"regular": lane}, "device": device,
    }  # fmt: skip


def tokens(log: str) -> list[list[Any]]:
    """Every token of the one sequence, in order."""
    lines = [json.loads(line) for line in log.split("\n")[1:]]
    return [token for line in lines for token in line["regular"]["new"].get("0", [])]


def test_the_log_holds_origin_text_and_time_of_each_token() -> None:
    log, _, _ = PageFeed("r", REQUEST).update(snapshot(["a", "", "bc", "d"], 40))
    assert json.loads(log.split("\n")[0]) == {"run": "r", "batch_size": 1, "temperature": 0.7}
    assert tokens(log) == [["s", "a", 0.0], ["a", "", 10.0], ["r", "bc", 20.0], ["b", "d", 30.0]]


def test_the_log_only_grows() -> None:
    feed = PageFeed("r", REQUEST)
    first, _, _ = feed.update(snapshot(["a", "b"], 40))
    second, _, _ = feed.update(snapshot(["a", "b", "c"], 80))
    assert second.startswith(first) and [text for _, text, _ in tokens(second)] == ["a", "b", "c"]


def test_text_that_the_last_token_held_back_is_added_to_it() -> None:
    feed = PageFeed("r", REQUEST)
    feed.update(snapshot(["a", ""], 40))
    log, _, _ = feed.update(snapshot(["a", "\ufffd", "c"], 80))
    assert tokens(log)[2:] == [["+", "\ufffd", 10.0], ["r", "c", 20.0]]
    assert "".join(text for _, text, _ in tokens(log)) == "a\ufffdc"


def test_no_text_can_hold_a_tag_or_end_a_line() -> None:
    log, view, charts = PageFeed("r", REQUEST).update(snapshot(["<script>\n"], 40))
    assert "<" not in log + view + charts and log.count("\n") == 1
    assert tokens(log) == [["s", "<script>\n", 0.0]]


def test_missing_values_stay_missing() -> None:
    _, view, charts = PageFeed("r", REQUEST).update(snapshot(["a"], 40))
    assert json.loads(view)["lanes"]["regular"]["metrics"]["throughput_tps"] is None
    device = json.loads(view)["device"]
    assert device["gpu_utilization"] is None and device["gpu_power_w"] is None
    assert json.loads(charts)["lanes"]["regular"]["acceptance_rate"] == [None]
    assert json.loads(charts)["series"]["rss_mb"] == [None]


def test_charts_stay_small_and_end_with_the_last_snapshot() -> None:
    feed = PageFeed("r", REQUEST)
    for i in range(3000):
        feed.update(snapshot([], 200.0 * i))
    charts = json.loads(feed.update(snapshot([], 600_001.0, done=True))[2])
    for series in (charts["series"]["elapsed_ms"], charts["lanes"]["regular"]["clock_ms"]):
        assert CHART_POINTS / 4 < len(series) <= CHART_POINTS + 1
        assert series[0] == 0.0 and series[-1] == 600_001.0 and series == sorted(series)


def test_charts_change_a_few_times_a_second_alone() -> None:
    feed = PageFeed("r", REQUEST)
    charts = [feed.update(snapshot([], 50.0 * i))[2] for i in range(21)]
    assert len(set(charts)) == 6


def test_a_lane_whose_clock_stands_adds_no_points() -> None:
    feed = PageFeed("r", REQUEST)
    for elapsed in (0.0, 500.0, 1000.0):
        _, _, charts = feed.update(snapshot(["a"], 40.0) | {"elapsed_ms": elapsed})
    assert json.loads(charts)["lanes"]["regular"]["clock_ms"] == [40.0]
    assert json.loads(charts)["series"]["elapsed_ms"] == [0.0, 500.0, 1000.0]
