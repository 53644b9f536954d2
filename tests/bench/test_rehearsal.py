"""The scheduler that replaces ZeroGPU's in a rehearsal keeps to its quota and kills late workers."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from bench.rehearsal import Scheduler


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    running = Scheduler()
    yield running
    running.server.shutdown()
    running.server.server_close()


def test_time_is_granted_up_to_the_quota_and_an_idle_worker_is_reported(scheduler: Scheduler) -> None:
    def ask_for(seconds: int) -> httpx.Response:
        return httpx.post(f"{scheduler.url}/schedule", params={"durationSeconds": seconds}, trust_env=False)

    scheduler.left = 20
    assert (ask_for(30).status_code, ask_for(30).json()["left"]) == (429, 20)
    assert ask_for(20).json()["idle"] is False and (scheduler.asked, scheduler.given) == ([30, 30, 20], [20])
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as worker:
        httpx.post(f"{scheduler.url}/allow", params={"pid": worker.pid}, trust_env=False)
        httpx.post(f"{scheduler.url}/release", trust_env=False)
        assert ask_for(10).json()["idle"] is True
        httpx.post(f"{scheduler.url}/release", trust_env=False)
        worker.kill()
    assert ask_for(10).json()["idle"] is False and scheduler.killed == 0


def test_a_worker_that_exceeds_its_time_is_killed(scheduler: Scheduler) -> None:
    scheduler.answer("/schedule", {"durationSeconds": "0"})
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as worker:
        scheduler.answer("/allow", {"pid": str(worker.pid)})
        assert worker.wait() == -signal.SIGKILL
    assert scheduler.killed == 1
