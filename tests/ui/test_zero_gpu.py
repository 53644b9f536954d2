"""Detection of ZeroGPU, and its errors, quota and reservations, with an emulated fork (zero_gpu.py)."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import gradio as gr
import pytest

import app
from bass_core import BassError, ModelPair
from ui.page.events import UNEXPECTED, Events, Snapshot
from ui.page.limits import Limits
from ui.page.request import RaceRequest, make_request
from ui.sources import zero_gpu
from ui.sources.local import race_source
from ui.sources.service import open_service
from ui.sources.source import PairOptions, Service
from ui.sources.zero_gpu import START_S, ZeroGpu
from ui.sweep.events import SweepEvents

from .zero_gpu import Spaces

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="ZeroGPU forks, which this system does not")
SETTINGS = ("Hello", 2, 24, 0.9, 0)


@pytest.fixture
def spaces() -> Iterator[Spaces]:
    package = Spaces()
    yield package
    package.close()


def events_of(spaces: Spaces, task: Callable[..., Any]) -> Events:
    zero_gpu_source = ZeroGpu(spaces, task)
    return Events(zero_gpu_source.source, Limits(), together=zero_gpu_source.together)


def last_message(events: Events) -> str:
    *_, last = events.run(*SETTINGS)
    return str(json.loads(last[3])["message"])


def raising(error: Exception) -> Callable[..., Generator[Snapshot, None, None]]:
    def task(request: RaceRequest, stopped: object) -> Generator[Snapshot, None, None]:
        raise error
        yield {}

    return task


def opened_service(pair_folders: tuple[Path, Path]) -> Service:
    ask = PairOptions(str(pair_folders[0]), str(pair_folders[1]), device="cpu", dtype="float32")
    return open_service(ask, app.parse([]), Limits(), lambda: 1, 1)


def asked() -> RaceRequest:
    return make_request({"prompt": "Hello", "batch_size": 2, "max_new_tokens": 24, "draft_length": 3}, Limits())


def test_the_package_without_the_variable_is_not_zero_gpu(
    pair_folders: tuple[Path, Path], spaces: Spaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "spaces", spaces)
    # opened() starts measuring costs between races.
    service = opened_service(pair_folders)
    assert service.together is None and service.opened.__name__ == "start"
    *_, last = service.source(asked())
    assert last["done"] and spaces.asked == []
    monkeypatch.setenv("SPACES_ZERO_GPU", "true")
    service = opened_service(pair_folders)
    assert service.together is not None and service.opened.__name__ != "start"
    *_, same = service.source(asked())
    assert same["done"] and len(spaces.asked) == 1
    assert [one["text"] for one in same["lanes"]["bass"]["sequences"]] == [
        one["text"] for one in last["lanes"]["bass"]["sequences"]
    ]


def test_a_refusal_keeps_its_message_and_the_worker(pair: ModelPair, spaces: Spaces) -> None:
    events = events_of(spaces, race_source(pair))
    with pytest.raises(gr.Error, match="races only its own pair"):
        list(events.api("Hello", 1, 4, 0, 0, pair="/etc"))
    worker = spaces._worker
    *_, last = events.api("Hello", 1, 4, 0, 0)
    assert last["done"] and worker is not None and spaces._worker is worker


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (BassError("Too big: ask for less."), "Too big: ask for less."),
        (KeyError("secret"), UNEXPECTED),
        (gr.Error("Not from us"), UNEXPECTED),
    ],
)
def test_only_our_errors_of_the_worker_are_shown(error: Exception, message: str, spaces: Spaces) -> None:
    assert last_message(events_of(spaces, raising(error))) == message


def test_a_killed_worker_is_explained(spaces: Spaces) -> None:
    def task(request: RaceRequest, stopped: object) -> Generator[Any, None, None]:
        yield {"done": False, "lanes": {}, "device": {}}
        os.kill(os.getpid(), signal.SIGKILL)

    assert last_message(events_of(spaces, task)).startswith(
        "ZeroGPU ended the race because its time was over: ask for"
    )


def test_a_reservation_is_repeated_with_the_remaining_quota(pair: ModelPair, spaces: Spaces) -> None:
    events = events_of(spaces, race_source(pair))
    spaces.left = 21
    assert last_message(events) == "" and spaces.asked[-1] == 21 and spaces.asked[0] > START_S
    spaces.left = 4
    assert last_message(events) == (
        f"You have exceeded your free ZeroGPU quota ({spaces.asked[-1]}s requested vs. 4s left). "
        "Try again in 0:12:00."
    )
    spaces.left, spaces.most = 1000, 20
    assert last_message(events) == "" and spaces.asked[-1] <= 20
    spaces.most = 1
    assert "larger than the maximum allowed" in last_message(events)


def test_more_lanes_and_rows_reserve_more_time(pair: ModelPair, spaces: Spaces) -> None:
    events = events_of(spaces, race_source(pair))
    for rows, lanes in ((1, ["bass"]), (1, None), (8, None)):
        next(iter(events.api("Hello", rows, 200, 0, 0, lanes=lanes)))
    assert spaces.asked == sorted(set(spaces.asked)) and spaces.asked[-1] <= zero_gpu.MAX_S


def test_a_race_ends_with_a_message_before_its_reservation(
    pair: ModelPair, spaces: Spaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zero_gpu, "SPARE_S", 1000.0)
    message = last_message(events_of(spaces, race_source(pair)))
    assert message.startswith(f"The GPU was reserved for {spaces.asked[0]} s, which are over")


def test_a_reused_worker_has_the_full_reservation(
    pair: ModelPair, spaces: Spaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first race of a worker loses the time of the fork."""
    monkeypatch.setattr(zero_gpu, "SPARE_S", 0.0)
    events = events_of(spaces, race_source(pair))
    assert last_message(events) == ""
    spaces.left = zero_gpu.LEAST_S
    assert last_message(events) == ""


def test_closing_a_race_ends_it_in_the_worker(pair: ModelPair, spaces: Spaces) -> None:
    events = events_of(spaces, race_source(pair))
    running = events.run("Hello", 2, 1000, 0.9, 0)
    next(running), next(running)
    running.close()
    assert last_message(events) == ""


@pytest.mark.slow
def test_a_sweep_is_one_reservation(pair: ModelPair, spaces: Spaces) -> None:
    sweeps = SweepEvents(events_of(spaces, race_source(pair)))
    *_, last = sweeps.api("Hello", 8, batches=[1, 2], draft_lengths=["bass", "2"], seconds=5)
    assert last["done"] and len(last["points"]) == 4
    assert len(spaces.asked) == 1 and spaces.asked[0] > START_S + 5
