"""A draft that fails, hangs back, or is no longer wanted: the text stays exact, the lane says so, nothing is left.

Contract: nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bass_core import Options, SamplingParams, generate, stream
from bass_core.decode.overlapped import decoder as amusd
from bass_core.decode.overlapped.session import DraftSession
from bass_core.lanes.generate import _lane
from bass_core.lanes.view import lane_view

from ...models import prompts
from .test_amusd import PAIR, texts

ROWS = prompts(3)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"sampling": SamplingParams(0.8), "verification": "coupled"},
}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "bass-amusd-draft":
            thread.join(60)
            assert not thread.is_alive()


def broken_from(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the draft's steps raise from this one on."""
    whole, steps = DraftSession.step, []

    def broken(self: DraftSession) -> Any:
        steps.append(1)
        if len(steps) > step:
            raise ZeroDivisionError
        return whole(self)

    monkeypatch.setattr(DraftSession, "step", broken)


@pytest.mark.parametrize("step", [0, 1, 6])
@pytest.mark.parametrize("way", WAYS)
def test_a_draft_that_fails_leaves_regular_decoding(way: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it reads the prompts, at its first draft, and later."""
    monkeypatch.setattr(amusd, "DELAYS", (0.004, 0.0))
    broken_from(step, monkeypatch)
    lane = _lane(PAIR, ROWS, "amusd", Options(**{"max_new_tokens": 40} | WAYS[way]))
    while not lane.finished:
        lane.step()
    expected = texts(generate(PAIR, ROWS, method="regular", max_new_tokens=40, **WAYS[way]))
    assert [s.token_ids for s in lane.sequences] == expected
    note = lane.timeline.note
    assert "failed (ZeroDivisionError)" in note and "regular decoding" in note
    assert lane_view(lane)["timeline"]["note"] == note and lane.error is None


def test_a_draft_that_can_not_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bass_core.decode.overlapped.session.Parts", lambda *_, **__: 1 / 0)
    out = generate(PAIR, ROWS, method="amusd", max_new_tokens=10)
    assert "ZeroDivisionError" in out.timeline["note"] and not out.metrics.drafted
    assert texts(out) == texts(generate(PAIR, ROWS, method="regular", max_new_tokens=10))


def test_the_draft_of_a_request_that_is_dropped_ends() -> None:
    """With its generator, and without anything that would close it."""
    rounds = stream(PAIR, ROWS, method="amusd", max_new_tokens=400)
    next(rounds)
    lane = _lane(PAIR, ROWS, "amusd", Options(max_new_tokens=400))
    lane.step()
    del rounds, lane


def test_a_pause_waits_for_the_step_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, began, go = DraftSession.step, threading.Event(), threading.Event()

    def slow(self: DraftSession) -> Any:
        began.set()
        go.wait(60)
        return whole(self)

    lane = _lane(PAIR, ROWS, "amusd", Options(max_new_tokens=400))
    monkeypatch.setattr(DraftSession, "step", slow)
    lane.step()
    assert began.wait(60)
    paused = threading.Thread(target=lane.pause)
    paused.start()
    paused.join(0.2)
    assert paused.is_alive()
    go.set()
    paused.join(60)
    assert not paused.is_alive()
    lane.end("stopped")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_many_short_runs_with_delays_on_either_side(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of them is stopped early, some are paused between steps, and some lose their draft."""
    chance = random.Random(5)
    whole = DraftSession.step
    expected = texts(generate(PAIR, ROWS, method="regular", max_new_tokens=40, eos_token_id=None, **WAYS[way]))
    for _ in range(60):
        monkeypatch.setattr(DraftSession, "step", whole)
        if chance.random() < 0.2:
            broken_from(chance.randint(0, 12), monkeypatch)
        monkeypatch.setattr(amusd, "DELAYS", (chance.choice((0, 0.002, 0.006)), chance.choice((0, 0.002, 0.006))))
        batch, tokens = chance.randint(1, len(ROWS)), chance.randint(1, 40)
        lead = chance.choice((1, 3, "auto"))
        asked = {"max_new_tokens": tokens, "draft_length": lead, "eos_token_id": None, **WAYS[way]}
        lane = _lane(PAIR, ROWS[:batch], "amusd", Options(**asked))
        stop = chance.randint(1, 12) if chance.random() < 1 / 3 else None
        while not lane.finished:
            if stop is not None and len(lane.sequences[0].token_ids) >= stop:
                lane.end("stopped")
                break
            if chance.random() < 0.1:
                lane.pause()
            lane.step()
        for sequence, text in zip(lane.sequences, expected, strict=False):
            written = sequence.token_ids
            assert written == text[: len(written)] and (len(written) == tokens or stop is not None)
        line = lane.timeline
        assert line.made >= line.looked_at


SCRIPT = """
import torch
from bass_core import ModelPair, stream
from bass_core.decode.overlapped.session import DraftSession
from tests.models import *
torch.set_num_threads(1)
x, step = torch.ones(3000, 3000), DraftSession.step
def slow(self):
    x @ x
    return step(self)
rounds = stream(ModelPair(tiny("llama"), tiny("llama")), prompts(2), method="amusd", max_new_tokens=400)
for _ in range(3):
    next(rounds)
DraftSession.step = slow
for _ in range(3):
    next(rounds)
print("done")
"""


@pytest.mark.slow
def test_a_program_may_end_while_a_thread_drafts() -> None:
    """The program ends while the thread is inside a matrix product, which returns during interpreter shutdown."""
    folder = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=folder, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-500:]
