"""Which drafts the target gives up, and when: drafts that start, compile, wait and hang.

Contract: the draft is a thread of this process where only its pace matters, and a real process with a real signal
where it is stopped. Time limits are patched small and slow steps take several times as long, so that no test fails
because a machine is slow.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bass_core import ModelPair, Options, generate
from bass_core.amusd import host as amusd_host
from bass_core.amusd.host import DraftHost
from bass_core.amusd.messages import DraftLostError, Open, Ready, Resume
from bass_core.amusd.session import DraftSession
from bass_core.amusd.shared_memory import Arena, LocalArena
from bass_core.amusd.worker import Worker
from bass_core.lanes.generation import _lane
from bass_core.sampling.params import SamplingParams
from bass_core.sequence import Round
from bass_core.verification.table import VERIFICATIONS

from ...models import NEAR, perturbed, prompts, tiny
from ..drafting.test_head import tiny_head

TARGET = tiny("llama")
ROWS = prompts(2)


@pytest.fixture
def pair() -> Iterator[ModelPair]:
    """A pair whose draft runs as a thread."""
    one = ModelPair(TARGET, perturbed(TARGET, NEAR["llama"]))
    one.amusd_draft = "stream"
    yield one
    amusd_host.close(one)


def opening(session: int = 1) -> Open:
    ends = [len(row) + 40 for row in ROWS]
    return Open(session, ROWS, [0, 1], ends, 4, SamplingParams(), 0, VERIFICATIONS["auto"], "pad", {})


def texts(out: Any) -> list[list[int]]:
    return [sequence.token_ids for sequence in out.sequences]


def test_a_draft_that_has_waited_for_long_is_not_taken_for_one_that_hangs(
    pair: ModelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the draft after each write it makes to the watch: its last stamp is old when it begins to work."""
    hosts: list[DraftHost] = []
    lost: list[str] = []

    class Spied:
        def __init__(self, watch: Any) -> None:
            self.watch = watch

        def __getitem__(self, index: int) -> Any:
            return self.watch[index]

        def __setitem__(self, index: int, value: Any) -> None:
            self.watch[index] = value
            for host in hosts:
                try:
                    host.check()
                except DraftLostError as error:
                    lost.append(str(error))

    class SpiedWorker(Worker):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.watch = Spied(self.watch)  # type: ignore[assignment]

    monkeypatch.setattr(amusd_host, "Worker", SpiedWorker)
    host = DraftHost(pair)
    host.send(opening(), LocalArena({}, pair.device))
    monkeypatch.setattr(amusd_host, "START_PATIENCE_S", 0.0)
    monkeypatch.setattr(amusd_host, "PATIENCE_S", 0.5)
    time.sleep(1.0)
    hosts.append(host)
    host.send(Resume())
    assert host.receive(30), "the draft has begun"
    hosts.clear()
    host.end()
    assert not lost


def test_a_slow_first_step_is_waited_for_and_a_later_one_is_not(
    pair: ModelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    amusd_host.prepare(pair)
    monkeypatch.setattr(amusd_host, "PATIENCE_S", 0.3)
    monkeypatch.setattr(amusd_host, "SLOW_STEPS", 0)
    steps, go = [], threading.Event()
    step = DraftSession.step

    def slow(self: DraftSession) -> Any:
        steps.append(1)
        if len(steps) == 2:  # the first step feeds the prompt
            time.sleep(1.0)
        if len(steps) == 30:
            go.wait(60)
        return step(self)

    monkeypatch.setattr(DraftSession, "step", slow)
    lane = _lane(pair, ROWS, "amusd", Options(max_new_tokens=300))
    drafted = 0
    while not lane.finished:
        drafted += drafted_in(lane.step())
        time.sleep(0.01)
    go.set()
    assert drafted > 0, "the first step was not waited for"
    assert "hangs" in lane.timeline.note
    assert [s.token_ids for s in lane.sequences] == texts(
        generate(pair, ROWS, method="regular", max_new_tokens=300)
    )


def drafted_in(round_: Round) -> int:
    return sum(len(row.drafted) for row in round_.rows)


def test_messages_pile_up_while_a_first_step_compiles(pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """More messages than the link holds, for longer than a send waits (SEND_PATIENCE_S)."""
    step, go = DraftSession.step, threading.Event()
    host = DraftHost(pair)
    monkeypatch.setattr(DraftSession, "step", lambda self: go.wait(60) and step(self))
    host.send(opening(), LocalArena({}, pair.device))
    host.send(Resume())
    threading.Timer(2.0, go.set).start()
    for _ in range(3000):
        host.send(Resume())
    assert go.is_set(), "so many messages fit the link: send more"
    host.end()


@pytest.mark.parametrize("kind", ["model", "head"])
def test_the_draft_is_warm_when_it_says_that_it_is_ready(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has run a prompt and steps of one token per row, greedy and sampled."""
    pair = ModelPair(TARGET, TARGET if kind == "model" else tiny_head(TARGET))
    pair.amusd_draft = "stream"
    seen: list[tuple[str, Any]] = []
    step, receive = DraftSession.step, DraftHost.receive

    def stepped(self: DraftSession) -> Any:
        blocks = step(self)
        seen.append(("step", (self.spec.params.greedy, sum(len(block.tokens) for block in blocks))))
        return blocks

    def received(self: DraftHost, timeout: float = 0.0) -> list[Any]:
        messages = receive(self, timeout)
        seen.extend(("ready", None) for message in messages if isinstance(message, Ready))
        return messages

    monkeypatch.setattr(DraftSession, "step", stepped)
    monkeypatch.setattr(DraftHost, "receive", received)
    DraftHost(pair).end()
    before = [what for name, what in seen[: seen.index(("ready", None))] if name == "step"]
    for greedy in (True, False):
        assert before.count((greedy, 2)) >= 2, "two rows draft, more than once"
        assert kind == "head" or (greedy, 0) in before, "a prompt is fed"


@pytest.mark.slow
def test_a_process_that_is_stopped_while_it_starts_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP before any import; the lane goes on as regular decoding, and no process is left."""
    hosts: list[DraftHost] = []
    await_ready = DraftHost._await_ready

    def noted(self: DraftHost) -> None:
        hosts.append(self)
        await_ready(self)

    monkeypatch.setattr(DraftHost, "_await_ready", noted)
    monkeypatch.setattr(amusd_host, "QUIET_S", 1.0)
    monkeypatch.setattr(amusd_host, "START_PATIENCE_S", 120.0)
    stop = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP); "
    monkeypatch.setattr(amusd_host, "_START", stop + amusd_host._START)
    pair = ModelPair(TARGET, TARGET)
    begin = time.perf_counter()
    out = generate(pair, ROWS, method="amusd", max_new_tokens=10)
    assert time.perf_counter() - begin < 120, "only the longest patience ended it"
    assert "did not get ready" in out.timeline["note"]
    assert texts(out) == texts(generate(pair, ROWS, method="regular", max_new_tokens=10))
    (host,) = hosts
    assert host.process is not None and host.process.poll() is not None


@pytest.mark.slow
def test_a_start_that_is_slow_but_works_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing and loading take longer than QUIET_S without a time stamp, but the process uses CPU time."""
    monkeypatch.setattr(amusd_host, "QUIET_S", 1.0)
    busy = "import time\nend = time.perf_counter() + 3\nwhile time.perf_counter() < end: pass\n"
    monkeypatch.setattr(amusd_host, "_START", busy + amusd_host._START)
    pair = ModelPair(TARGET, TARGET)
    host = DraftHost(pair)
    assert host.alive
    host.end()


SCRIPT = """
import torch
from bass_core import ModelPair, stream
from bass_core.amusd.session import DraftSession
from tests.models import *
torch.set_num_threads(1)
x, step = torch.ones(3000, 3000), DraftSession.step
def slow(self):
    x @ x
    return step(self)
pair = ModelPair(tiny("llama"), tiny("llama"))
pair.amusd_draft = "stream"
rounds = stream(pair, prompts(2), method="amusd", max_new_tokens=400)
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
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=Path(__file__).parents[3], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-500:]


def test_an_arena_gives_back_what_was_written() -> None:
    """By row and position, between processes and within one."""
    layout = {"q": ((3, 4, 5), torch.float32)}
    values = torch.randn(3, 5, dtype=torch.float64)
    for arena in (Arena(layout), LocalArena(layout, torch.device("cpu"))):
        arena.write("q", [2, 0, 2], [1, 3, 0], values)
        arena.close_fd()
        expected = torch.zeros(3, 4, 5)
        expected[2, 1], expected[0, 3], expected[2, 0] = values.float()
        assert torch.equal(arena["q"], expected)
        got = arena.read("q", [2, 2, 1], [0, 1, 0], torch.device("cpu"))
        assert torch.equal(got, torch.stack((expected[2, 0], expected[2, 1], torch.zeros(5))))


def test_events_order_what_two_streams_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each use of a tensor waits for the zeros or the newest write and for the newest read, on any stream."""
    calls: list[tuple[str, str, int]] = []
    current = "target"

    class Event:
        made = 0

        def __init__(self) -> None:
            Event.made += 1
            self.number = Event.made

        def record(self, stream: Any) -> None:
            calls.append(("record", stream.name, self.number))

    class Stream:
        def __init__(self) -> None:
            self.name = current

        def wait_event(self, event: Event) -> None:
            calls.append(("wait", self.name, event.number))

    class Runtime:
        def __init__(self) -> None:
            self.Event = Event

        def current_stream(self, device: torch.device) -> Stream:
            return Stream()

    monkeypatch.setattr("bass_core.amusd.shared_memory.runtime", lambda device: Runtime())
    monkeypatch.setattr(
        "bass_core.amusd.shared_memory.to_device", lambda rows, device: torch.tensor(rows, device=device)
    )
    meta = torch.device("meta")
    arena = LocalArena({"q": ((2, 3, 5), torch.float32), "states": ((2, 9, 4), torch.float32)}, meta)
    assert [call[:2] for call in calls] == [("record", "target")] * 2
    written, read = calls[0][2], calls[0][2] + 1
    calls.clear()
    current = "draft"
    arena.write("q", [0], [1], torch.zeros(1, 5, device=meta))
    assert calls == [("wait", "draft", written), ("wait", "draft", read), ("record", "draft", written)]
    calls.clear()
    current = "target"
    arena.read("q", [0], [1], meta)
    assert calls == [("wait", "target", written), ("wait", "target", read), ("record", "target", read)]
