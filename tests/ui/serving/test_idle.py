"""Work for idle times makes room for a race at once, starts anew after it, and ends by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator

import pytest

from ui.sources.idle import IdleWork


class Work:
    """Counts endless steps until `finish` is set, and notes whether it ever shared the device with a race."""

    def __init__(self) -> None:
        self.begun, self.open, self.steps = 0, 0, 0
        self.finish, self.stepped = threading.Event(), threading.Event()

    def __call__(self) -> Generator[None, None, None]:
        self.begun += 1
        self.open += 1
        try:
            while not self.finish.is_set():
                self.steps += 1
                self.stepped.set()
                yield
        finally:
            self.open -= 1


@pytest.fixture
def work() -> Work:
    return Work()


def wait_for(happens: Callable[[], bool]) -> None:
    while not happens():
        threading.Event().wait(0.001)


def test_a_race_has_the_device_to_itself_and_the_work_begins_anew_behind_it(work: Work) -> None:
    idle = IdleWork(work)

    def race(request: int) -> Generator[int, None, None]:
        steps = work.steps
        for shown in range(request):
            assert work.open == 0 and work.steps == steps
            yield shown

    idle.start()
    wait_for(lambda: work.steps > 3)
    assert list(idle.beside(race)(3)) == [0, 1, 2]
    wait_for(lambda: work.begun == 2)
    # A race closed midway, by a thread other than the one that started it, also gives the device back.
    closed = idle.beside(race)(9)
    assert next(closed) == 0
    other = threading.Thread(target=closed.close)
    other.start()
    other.join()
    wait_for(lambda: work.begun == 3)
    # With two races, the work starts only after both have ended.
    first, second = idle.beside(race)(2), idle.beside(race)(2)
    next(first), next(second), first.close()
    assert work.open == 0
    second.close()
    work.finish.set()
    idle._thread.join()
    assert work.open == 0


def test_work_that_is_done_or_fails_or_is_stopped_ends_its_thread(
    work: Work, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Generator[None, None, None]:
        yield
        raise KeyError("x")

    done, failed, stopped = IdleWork(lambda: iter_of(2)), IdleWork(broken), IdleWork(work)
    for idle in (done, failed, stopped):
        idle.start()
    wait_for(lambda: work.steps > 0)
    for idle in (done, failed):
        idle._thread.join()
    assert "KeyError" in caplog.text
    stopped.stop()
    assert not stopped._thread.is_alive() and work.open == 0


def iter_of(steps: int) -> Generator[None, None, None]:
    yield from [None] * steps
