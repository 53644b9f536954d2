"""A draft that is slow, stopped, killed or wrong: the text stays exact, the lane reports it, and nothing is left.

Contract: real processes and real signals. `python -m bench amusd --stress` makes many short runs with faults at
random moments; tests/bench runs its short form.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from bass_core import ModelPair, Options, SamplingParams, generate
from bass_core.amusd import decoder as amusd
from bass_core.amusd.host import PATIENCE_S, borrow, close, give_back, prepare
from bass_core.amusd.messages import RowUpdate, TextUpdate
from bass_core.lanes.generation import _lane
from bass_core.lanes.view import lane_view

from ...models import prompts
from .test_amusd import PAIR, TARGET

ROOT = Path(__file__).parents[3]
ROWS = prompts(3)
WARM = {"sampling": SamplingParams(0.9), "verification": "coupled"}


@pytest.fixture(autouse=True, scope="module")
def processes() -> Any:
    yield
    close(PAIR)


def texts(out: Any) -> list[list[int]]:
    return [sequence.token_ids for sequence in out.sequences]


def expected(**arguments: Any) -> list[list[int]]:
    return texts(generate(PAIR, ROWS, method="regular", **arguments))


def draft_process() -> psutil.Process:
    """The pair's running draft process."""
    host = borrow(PAIR)
    assert host.process is not None
    give_back(PAIR, host)
    return psutil.Process(host.process.pid)


def lost_after(steps: int, act: Any, **arguments: Any) -> tuple[Any, psutil.Process]:
    """The finished lane of a request, with `act` applied to the draft's process after `steps` steps."""
    process = draft_process()
    lane = _lane(PAIR, ROWS, "amusd", Options(**{"max_new_tokens": 60} | arguments))
    done = 0
    while not lane.finished:
        if done == steps:
            act(process)
        lane.step()
        done += 1
    return lane, process


def test_a_killed_draft_leaves_regular_decoding() -> None:
    lane, process = lost_after(5, lambda one: one.kill())
    assert [s.token_ids for s in lane.sequences] == expected(max_new_tokens=60)
    assert "ended" in lane.timeline.note and "regular decoding" in lane.timeline.note
    assert lane_view(lane)["timeline"]["note"] == lane.timeline.note and lane.error is None
    assert not process.is_running()


@pytest.mark.slow
def test_a_hung_draft_is_noticed_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP: the process exists but does nothing; the target waits for it at most PATIENCE_S."""
    monkeypatch.setattr(amusd, "DELAYS", (0.05, 0.0))
    assert PATIENCE_S < 1
    lane, process = lost_after(4, lambda one: one.suspend())
    assert "hangs" in lane.timeline.note
    assert [s.token_ids for s in lane.sequences] == expected(max_new_tokens=60)
    assert not process.is_running()


@pytest.mark.slow
def test_a_draft_that_hangs_while_it_is_paused() -> None:
    draft_process().suspend()
    out = generate(PAIR, ROWS, method="amusd", max_new_tokens=60, **WARM)
    assert texts(out) == expected(max_new_tokens=60, **WARM)


@pytest.mark.slow
def test_an_error_inside_the_draft() -> None:
    lane = _lane(PAIR, ROWS, "amusd", Options(max_new_tokens=60))
    client = lane._decoder.client
    for _ in range(4):
        lane.step()
    client._host.send(TextUpdate(client._session, [RowUpdate(0, 9, 1, [1])]))
    while not lane.finished:
        lane.step()
    assert "failed (AssertionError)" in lane.timeline.note
    assert [s.token_ids for s in lane.sequences] == expected(max_new_tokens=60)


@pytest.mark.slow
def test_a_draft_that_can_not_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    close(PAIR)
    monkeypatch.setattr("bass_core.amusd.host._START", "raise SystemExit(3)")
    out = generate(PAIR, ROWS, method="amusd", max_new_tokens=20)
    assert "exit status 3" in out.timeline["note"]
    assert texts(out) == expected(max_new_tokens=20)


@pytest.mark.slow
def test_one_process_serves_all_requests_and_ends_with_its_pair() -> None:
    pair = ModelPair(TARGET, TARGET)
    prepare(pair)
    own = {child.pid for child in psutil.Process().children()}
    for _ in range(3):
        generate(pair, ROWS, method="amusd", max_new_tokens=5)
    assert {child.pid for child in psutil.Process().children()} == own
    host = borrow(pair)
    process = psutil.Process(host.process.pid)
    give_back(pair, host)
    del host, pair
    gc.collect()
    assert not process.is_running()


SCRIPT = """
import time
from bass_core import stream
from tests.models import *
from bass_core import ModelPair
target = tiny("llama")
rounds = stream(ModelPair(target, target), prompts(2), method="amusd", max_new_tokens=400)
for _ in range(3):
    next(rounds)
import psutil
print(*(child.pid for child in psutil.Process().children()), flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_nothing_is_left_when_the_program_is_killed() -> None:
    """Killed in the middle of a request; the script has no `if __name__ == "__main__"` guard."""
    program = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert program.stdout is not None
    pids = [int(pid) for pid in program.stdout.readline().split()]
    assert len(pids) == 1
    program.kill()
    program.wait(30)
    program.stdout.close()
    until = time.monotonic() + 20
    while psutil.pid_exists(pids[0]) and psutil.Process(pids[0]).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, "the draft outlives its program"
        time.sleep(0.05)
