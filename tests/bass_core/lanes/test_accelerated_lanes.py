"""Lanes on the emulated accelerator: waits between streams, the time that clocks count, and measurements.

tests/devices describes the errors that the emulated device detects; test_clock.py tests the clock's arithmetic.
"""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bass_core import ModelPair, SamplingParams, generate, race, stream
from bass_core.decode.request import make_request
from bass_core.lanes.lane import Lane
from bass_core.machine import hardware, setup_time, stopwatch
from bass_core.machine.stopwatch import Stopwatch
from bass_core.model import graphs as graphs
from bass_core.model.forward import ForwardBatch
from bass_core.sequence import Round
from kernels.support import new_stream, runtime
from tests.bass_core.accelerated import (  # noqa: F401
    DEVICE,
    ROWS,
    TEXT,
    accelerator,
    on_device,
    small,
    texts,
    while_capturing,
)
from tests.devices.emulation import capture as emulated_capture
from tests.devices.emulation import ledger, order
from tests.support.models import tiny, tiny_head, tiny_pair
from tests.support.threads import together

pytestmark = pytest.mark.usefixtures("small")


@pytest.mark.parametrize("captured", [False, True])
def test_a_lane_waits_until_its_buffers_are_cleared(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The race's thread makes the buffers on its stream; the lane's thread has another stream."""
    if not captured:
        monkeypatch.setenv("BASS_GRAPHS", "0")
    pair = on_device()
    with new_stream(DEVICE):
        *_, last = race(pair, ROWS, scheduling="overlap", **TEXT)
    assert [lane["error"] for lane in last["lanes"].values()] == [None] * 3
    assert bool(emulated_capture.captured) is captured and ledger.races == []


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["model", "head", "adaptive", "prompt_lookup"])
def test_overlapping_lanes_capture_their_first_shapes_before_the_clock_runs(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = on_device()
    if drafter == "head":
        pair = ModelPair(pair.target, tiny_head(tiny("llama")).to(DEVICE))
    capture_threads: list[str] = []
    real = graphs.capture

    def recording(*arguments: Any) -> Any:
        capture_threads.append(threading.current_thread().name)
        return real(*arguments)

    monkeypatch.setattr(graphs, "capture", recording)
    arguments = {**TEXT, "drafter": "model" if drafter == "head" else drafter}
    for method in ("regular", "speculative", "bass"):
        lane = Lane(pair, make_request(pair, ROWS, **arguments), method)
        lane.prepare()
        prepared = len(capture_threads)
        assert prepared and lane.clock.ms == 0
        while lane.step().kind == "prefill":
            pass
        # In its first round a head reads the whole prompt in one step. No later step is as wide.
        assert len(capture_threads) - prepared <= (drafter == "head" and method != "regular")
        lane.end("stopped")
        capture_threads.clear()
        gc.collect()
        graphs._idle.clear()
    list(race(pair, ROWS, scheduling="overlap", **arguments))
    assert capture_threads[0] == threading.current_thread().name and not ledger.races


def test_captures_do_not_count_as_lane_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here each capture takes 200 ms, in which the device is idle, and host and stream share one clock."""
    pair = on_device()
    stream = order.queue(runtime(DEVICE).current_stream(DEVICE).key)

    def slow() -> None:
        stream.ms += 200

    monkeypatch.setattr(emulated_capture, "at_end", slow)
    monkeypatch.setattr(setup_time, "time", SimpleNamespace(perf_counter=lambda: stream.ms / 1000))
    clocks = []
    for _ in range(2):
        lane = Lane(pair, make_request(pair, ROWS, **TEXT), "bass")
        while not lane.finished:
            lane.step()
        clocks.append(lane.clock.ms)
        del lane
        gc.collect()
    assert emulated_capture.captured > 1 and clocks[0] == pytest.approx(clocks[1]) and clocks[1] > 0


def test_bandwidth_is_measured_on_the_device_and_draws_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing a random number would break a capture in another thread."""
    other = torch.device("emul", 1)
    assert hardware.copy_bandwidth(other) == pytest.approx(2 * (1 << 12) / (order.OP_MS / 1000))
    hardware.copy_bandwidth.cache_clear()
    measured: list[float] = []

    def measure() -> None:
        measured.append(hardware.copy_bandwidth(other))

    model = on_device().target_step
    while_capturing(monkeypatch, model, lambda: together(measure))
    runner = graphs.make_runner(model, 1, 64, model.vocab, "pad")
    runner.forward(ForwardBatch(torch.ones(1, 1, dtype=torch.long, device=DEVICE), [0]))
    assert measured


def test_bandwidth_is_none_without_memory_to_measure_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(device: torch.device) -> float:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(hardware, "copy_bandwidth", out_of_memory)
    assert hardware.known_bandwidth(DEVICE) is None and hardware.known_bandwidth(torch.device("cpu")) is None
    out = generate(on_device(), ROWS, **TEXT)
    assert out.metrics.bandwidth_utilization is None


PAIR = tiny_pair()


def check_parts(rounds: list[Round], drafts: bool) -> None:
    """The draft and verify times fit into each round; a round without drafts has no draft time."""
    before, kinds = 0.0, set()
    for round_ in rounds:
        duration, before = round_.time_ms - before, round_.time_ms
        if round_.kind == "prefill":
            assert round_.draft_ms is round_.verify_ms is None
            continue
        assert round_.draft_ms is not None and round_.verify_ms is not None
        draft, verify = round_.draft_ms, round_.verify_ms
        assert verify > 0 and draft + verify <= duration + 1e-6
        assert (draft > 0) == (round_.kind == "verify")
        kinds.add(round_.kind)
    assert ("verify" in kinds) == drafts


@pytest.mark.parametrize("method", ["regular", "speculative", "bass"])
def test_draft_and_verify_times_fit_into_their_round(method: str) -> None:
    for options in ({"draft_length": 3}, {"draft_length": "auto", "tree": (2, 1)}):
        arguments: dict[str, Any] = {**TEXT, **options, "sampling": SamplingParams(0.8)}
        check_parts(list(stream(PAIR, ROWS, method=method, **arguments)), drafts=method != "regular")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("graphs", ["0", "1"])
def test_events_time_the_parts_without_waiting_for_the_device(
    graphs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BASS_GRAPHS", graphs)
    pair = on_device()
    list(stream(pair, ROWS, **TEXT))
    ledger.clear()
    rounds = list(stream(pair, ROWS, **TEXT))
    check_parts(rounds, drafts=True)
    assert not ledger.races and not ledger.waits["device"]


def test_laps_exclude_setup_time_and_can_be_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, clock = Stopwatch(torch.device("cpu")), SimpleNamespace(now=0.0, setup=0.0)
    monkeypatch.setattr(stopwatch, "setup_ms", lambda: clock.setup)
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=lambda: clock.now / 1000))
    for ms, setup in ((0, 0), (10, 4), (5, 9), (7, 0)):
        clock.now, clock.setup = clock.now + ms, clock.setup + setup
        watch.mark()
    assert watch.laps() == pytest.approx([6, 0, 7])
    watch.mark()
    watch.mark()
    assert watch.laps() == [0]
