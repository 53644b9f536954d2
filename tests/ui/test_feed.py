"""The data of the page: each token once, with its origin and lane time, and null for unknown values."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ui.page import clock as words
from ui.page.limits import Limits
from ui.page.request import keywords, make_request
from ui.race import feed as feed_module
from ui.race.feed import CHART_POINTS, ENDED_S, RUNS, PageFeed, missed

SETTINGS = make_request({"prompt": "Hello", "batch_size": 1}, Limits()).settings()


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
    """All tokens of the only sequence."""
    lines = [json.loads(line) for line in log.split("\n")[2:]]
    return [token for line in lines for token in line["regular"]["new"].get("0", [])]


def test_each_token_is_appended_to_the_log_with_its_origin_text_and_time() -> None:
    feed = PageFeed("r", SETTINGS)
    first, _, _ = feed.update(snapshot(["a", ""], 20))
    head = json.loads(first.split("\n")[0])
    assert (head["run"], head["batch_size"], head["lanes"]) == ("r", 1, ["regular"])
    assert (head["settings"], head["keywords"]) == (SETTINGS, keywords())
    # Text that was held back is added to the last token ("+"). No text can contain a tag or end a line.
    log, view, charts = feed.update(snapshot(["a", "\ufffd", "<script>\n"], 80))
    assert log.startswith(first) and "<" not in log + view + charts and log.count("\n") == 3
    assert tokens(log) == [
        ["s", "a", 0.0, 1], ["a", "", 10.0, 1], ["+", "\ufffd", 10.0, -1], ["r", "<script>\n", 20.0, 1],
    ]  # fmt: skip


def test_only_the_last_view_has_the_spans_of_a_timeline() -> None:
    spans, counts = {"target": [[0, 9]], "draft": [[1, 5]], "rollbacks": [4]}, {"rolled_back": 1, "note": None}
    feed = PageFeed("r", SETTINGS)
    for done, expected in ((False, counts), (True, spans | counts)):
        shot = snapshot(["a"], 40, done=done)
        shot["lanes"]["regular"]["timeline"] = spans | counts
        assert json.loads(feed.update(shot)[1])["lanes"]["regular"]["timeline"] == expected


def test_optional_values_are_passed_on_or_null() -> None:
    shot = snapshot(["a"], 40)
    for values in ({}, {"reading": {"fed": 1, "total": 2, "sequences": [0]}, "cache": {"own": 5}}):
        shot["lanes"]["regular"] |= values
        _, view, charts = (json.loads(text.split("\n")[0]) for text in PageFeed("r", SETTINGS).update(shot))
        assert view["lanes"]["regular"]["reading"] == values.get("reading")
        assert charts["cache"] == {"regular": values.get("cache")}
        assert view["lanes"]["regular"]["metrics"]["throughput_tps"] is None
        assert view["device"]["gpu_utilization"] is None and view["device"]["gpu_power_w"] is None
        assert charts["lanes"]["regular"]["acceptance_rate"] == charts["series"]["rss_mb"] == [None]


def test_charts_stay_small_are_throttled_and_end_with_the_last_snapshot() -> None:
    feed = PageFeed("r", SETTINGS)
    assert len({feed.update(snapshot([], 50.0 * i))[2] for i in range(21)}) == 6
    for i in range(6, 3000):
        feed.update(snapshot([], 200.0 * i))
    charts = json.loads(feed.update(snapshot([], 600_001.0, done=True))[2])
    for series in (charts["series"]["elapsed_ms"], charts["lanes"]["regular"]["clock_ms"]):
        assert CHART_POINTS / 4 < len(series) <= CHART_POINTS + 1
        assert series[0] == 0.0 and series[-1] == 600_001.0 and series == sorted(series)


def test_lanes_without_some_samples_do_not_slow_the_charts_down() -> None:
    feed, changed, before = PageFeed("r", SETTINGS), 0, ""
    for i in range(900):
        shot = snapshot([], 100.0 * i)
        lane = shot["lanes"]["regular"]
        # The clocks of the other lanes do not advance in some samples.
        for name, gap in (("speculative", 10), ("bass", 7), ("amusd", 3)):
            shot["lanes"][name] = lane | {"clock_ms": 1000.0 * (i // 2 - i // 2 // gap)}
        charts = feed.update(shot)[2]
        changed += i >= 600 and charts != before
        before = charts
    # The last 30 s have one sample per 800 ms, four times the interval of the first 24 s (200 ms).
    assert changed == 38


def test_a_lane_whose_clock_does_not_advance_adds_no_points() -> None:
    feed = PageFeed("r", SETTINGS)
    for elapsed in (0.0, 500.0, 1000.0):
        _, _, charts = feed.update(snapshot(["a"], 40.0) | {"elapsed_ms": elapsed})
    assert json.loads(charts)["lanes"]["regular"]["clock_ms"] == [40.0]
    assert json.loads(charts)["series"]["elapsed_ms"] == [0.0, 500.0, 1000.0]


def record(number: int, at: float, drafted: list[str]) -> dict[str, Any]:
    """A round of one row, as bass_core records it."""
    row = {
        "sequence": 0, "start": number, "drafted": [1] * len(drafted), "drafted_text": drafted,
        "p": [0.123456789] * len(drafted), "q": [0.5] * len(drafted), "u": [None] * len(drafted),
        "chance": [0.25] * len(drafted), "one_by_one": 0,
        "accepted": 0, "written": 1, "next_p": None, "parents": None, "path": None, "detail": None,
    }  # fmt: skip
    return {
        "round": number, "kind": "verify", "draft_length": 3 + number, "lengths": [3 + number], "time_ms": at,
        "draft_ms": None, "verify_ms": None, "rows": [row],
    }  # fmt: skip


def test_each_round_is_sent_once_and_its_length_is_charted() -> None:
    feed, rounds = PageFeed("r", SETTINGS), [record(1, 10, ["x", "<b>"]), record(2, 20, [])]
    for count in (1, 2, 2):
        shot = snapshot(["a"] * count, 20.0 * count)
        shot["lanes"]["regular"]["rounds"] = rounds[:count]
        shot["elapsed_ms"] *= 20
        log, _, charts = feed.update(shot)
    sent = [line for text in log.split("\n")[2:] for line in json.loads(text)["regular"]["rounds"]]
    # The page gets the recorded numbers with six digits.
    assert [sent_round["rows"][0].pop("p") for sent_round in sent] == [[0.123457] * 2, []]
    assert [sent_round["rows"][0].pop("p") for sent_round in rounds] and sent == rounds
    assert json.loads(charts)["rounds"]["regular"] == {"time_ms": [10, 20], "draft_length": [4, 5]}


def test_the_log_stays_small_and_missed_lines_can_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "WINDOW", 3000)
    monkeypatch.setattr(feed_module, "RESTART_CHARACTERS", 500)
    feed, sizes, sent, before = PageFeed("long", SETTINGS), [], 0, ""
    for count in range(400):
        log, _, _ = feed.update(snapshot(["word"] * count, 10.0 * count))
        head, first, *lines = log.split("\n")
        assert json.loads(head)["run"] == "long" and int(first) + len(lines) == count + 1
        assert lines == feed.lines[int(first) :]
        sizes.append(len(log) - len(head))
        sent += len(log) - len(before if log.startswith(before) else head)
        before = log
    assert max(sizes) < 3200
    # Few characters are sent a second time when the log restarts.
    assert sent < 1.6 * sum(map(len, feed.lines))
    assert missed("long", 0).split("\n") == feed.lines and missed("long", 398).split("\n") == feed.lines[398:]
    for run, number in (("other", 0), ("long", 400), (None, 0), ("long", "0")):
        assert missed(run, number) == ""


def test_lines_are_stored_for_all_running_races_and_a_few_ended_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(feed_module.time, "monotonic", lambda: now)
    monkeypatch.setattr(feed_module, "_runs", {})
    feeds = [PageFeed(f"run {number}", SETTINGS) for number in range(2 * RUNS + 1)]
    for feed in feeds:
        feed.update(snapshot(["a"], 10.0))
    stored = lambda: [number for number in range(len(feeds)) if missed(f"run {number}", 0)]  # noqa: E731
    assert stored() == list(range(2 * RUNS + 1))
    for feed in feeds[1:]:
        now += 1
        feed.close()
    assert stored() == [0, *range(RUNS + 1, 2 * RUNS + 1)], "the first one still runs"
    now += ENDED_S
    assert stored() == [0, 2 * RUNS], "the last one ended just now"
    now += 1
    assert stored() == [0]


def test_the_head_of_a_recording_has_its_lanes_rows_and_settings() -> None:
    shot = snapshot(["a"], 10)
    shot["lanes"] = {"bass": shot["lanes"]["regular"], "new": shot["lanes"]["regular"]}
    head = json.loads(PageFeed("r", {}).update(shot)[0].split("\n")[0])
    assert (head["lanes"], head["settings"], head["batch_size"]) == (["bass", "new"], {}, 1)


H100 = {"kind": "predicted", "hardware": "H100", "gpus": 1, "target": "7.8B", "draft": "310M"}


def head_of(clock: dict[str, Any] | None, settings: dict[str, Any]) -> dict[str, Any]:
    """The head of a race with this clock."""
    shot: Any = snapshot(["a", "b"], 20, done=True) | ({"clock": clock} if clock else {})
    log, view, _ = PageFeed("r", settings).update(shot)
    assert clock or "predicted" not in view
    return dict(json.loads(log.split("\n")[0]))


def test_the_head_names_the_predicted_machine() -> None:
    head = head_of(H100, {"clock": "h100"})
    assert (head["clock"], head["machine"]) == (H100, "H100 with 7.8B and 310M")
    assert head["code"] == "SimulatedClock('h100', target='7.8b', draft='310m')"
    two = words.on_machine(H100 | {"gpus": 2, "target": "70B", "draft": "8B"})
    assert two == "on 2 predicted H100 with 70B and 8B"
    assert not head_of(None, {"clock": "measured"}).keys() & {"clock", "machine", "code"}
    assert words.machine_of({}) == "machine"


@pytest.mark.parametrize("settings", [{}, {"clock": "tpu"}, {"clock": "own", "clock_tflops": "x"}])
def test_a_recording_with_incomplete_clock_settings_has_no_code(settings: dict[str, Any]) -> None:
    assert head_of(H100, settings)["code"] is None


def test_gpu_counters_reach_the_page_and_energy_counts_from_the_start_of_the_race() -> None:
    feed, shot = PageFeed("r", SETTINGS), snapshot(["a"], 40)
    counters = {"gpu_sm_percent": 51.0, "gpu_tensor_percent": 12.5, "gpu_dram_percent": 70.0}
    for energy in (9000.0, 9500.0):
        shot["device"] |= counters | {"gpu_energy_mj": energy}
        shown = json.loads(feed.update(shot)[1])["device"]
    assert shown["gpu_energy_mj"] == 500 and counters.items() <= shown.items()
