"""The order of races (least work first, limited overtaking), and idle work that gives way to races."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest

from ui.page.limits import Limits
from ui.page.request import RaceRequest, make_request
from ui.sources.idle import IdleWork
from ui.sources.queue import PATIENCE_S, Queue, WaitEstimate, steps
from ui.sources.source import waiting, words


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def asked(tokens: int = 16, rows: int = 1, **more: Any) -> RaceRequest:
    return make_request({"prompt": "Hello", "max_new_tokens": tokens, "batch_size": rows} | more, Limits())


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> Queue:
    return Queue(clock=clock)


def test_the_least_work_comes_first(queue: Queue) -> None:
    queue.add("a")
    running = queue.enter(asked())
    large, small, middle = queue.enter(asked(1024, 32)), queue.enter(asked(16)), queue.enter(asked(16, 8))
    assert [queue.outlook(one)[0] for one in (large, small, middle)] == [3, 1, 2]
    for before, after in ((running, small), (small, middle), (middle, large)):
        assert after.worker is None and not queue.wait(after, 0.01)
        queue.leave(before)
        assert after.worker == "a"
    # A waiting race is woken.
    last = queue.enter(asked())
    threading.Timer(0.05, queue.add, ["b"]).start()
    assert queue.wait(last, 60) and last.worker == "b"


def test_no_race_is_overtaken_for_more_than_a_minute(queue: Queue, clock: Clock) -> None:
    queue.add("a")
    running, large = queue.enter(asked()), queue.enter(asked(1024, 32))
    clock.now += PATIENCE_S - 1
    early = queue.enter(asked())
    assert queue.outlook(early)[0] == 1
    clock.now += 1
    late = queue.enter(asked())
    assert [queue.outlook(one)[0] for one in (large, early, late)] == [1, 2, 3]
    queue.leave(running)
    assert large.worker == "a"
    # Without patience, races run in order of arrival.
    strict = Queue(patience_s=0.0, clock=clock)
    tickets = [strict.enter(asked()), strict.enter(asked(1024, 32)), strict.enter(asked())]
    assert [strict.outlook(one)[0] for one in tickets] == [1, 2, 3]


def test_a_race_that_gives_up_leaves_the_queue(queue: Queue) -> None:
    queue.add("a")
    running, given_up, waits = (queue.enter(asked()) for _ in range(3))
    queue.leave(given_up)
    assert queue.outlook(waits)[0] == 1
    queue.leave(running)
    assert waits.worker == "a" and given_up.worker is None


def test_a_lost_worker_gets_nothing_until_it_is_back(queue: Queue) -> None:
    queue.add("a"), queue.add("b")
    first, second = queue.enter(asked()), queue.enter(asked())
    queue.remove(first.worker or "")
    third = queue.enter(asked())
    queue.leave(first)  # the race ends, but its worker was removed, so no race gets that worker
    assert third.worker is None
    queue.add(first.worker or "")
    assert third.worker == first.worker
    queue.leave(first)  # leaving again must not free the worker, which now has the third race
    assert queue.enter(asked()).worker is None
    queue.leave(second)


def test_a_worker_that_has_the_pair_is_preferred(queue: Queue) -> None:
    queue.add("a"), queue.add("b")
    same_pair, other_pair = queue.enter(asked()), queue.enter(asked(pair="other"))
    assert (same_pair.worker, other_pair.worker) == ("a", "b")
    queue.leave(same_pair), queue.leave(other_pair)
    again = queue.enter(asked(pair="other"))
    assert again.worker == "b"
    queue.leave(again)
    # A race with the pair that app.py was started with does not unload the other pair.
    queue.enter(asked())
    queue.leave(queue.enter(asked()))
    assert queue.enter(asked(pair="other")).worker == "b"


def test_the_outlook_gives_place_and_time(queue: Queue, clock: Clock) -> None:
    queue.add("a")
    first, second = queue.enter(asked()), queue.enter(asked())
    # No race has finished, so the waiting time is not known yet.
    assert queue.outlook(first) == (0, 0.0) and queue.outlook(second) == (1, None)
    clock.now += 10
    queue.leave(first, finished=True)
    third, fourth = queue.enter(asked()), queue.enter(asked())
    clock.now += 4
    assert queue.outlook(third) == (1, pytest.approx(6)) and queue.outlook(fourth) == (2, pytest.approx(16))


def test_work_grows_with_rows_tokens_and_lanes() -> None:
    sizes = [
        asked(16),
        asked(16, 4),
        asked(64, 4),
        asked(64, 4, lanes=["regular", "speculative", "bass", "amusd"]),
    ]
    assert sorted(map(steps, sizes)) == [steps(one) for one in sizes]
    assert steps(asked(1024, 32)) > 100 * steps(asked(16, 2))


def test_a_pace_is_learnt_only_from_races_without_a_budget() -> None:
    pace = WaitEstimate()
    assert pace.expected_s(asked()) is None
    pace.add(asked(time_budget_ms=100), 99.0)
    assert pace.expected_s(asked()) is None
    pace.add(asked(), 2.0)
    assert pace.expected_s(asked()) == pytest.approx(2.0)
    assert pace.expected_s(asked(time_budget_ms=100)) == pytest.approx(0.3)
    assert pace.expected_s(asked(64)) == pytest.approx(2.0 * steps(asked(64)) / steps(asked()))


def test_the_status_line_gives_place_and_rounded_time() -> None:
    for place, seconds, text in (
        (3, None, "Waiting for a free worker: place 3 in the queue"),
        (1, 4.2, "Waiting for a free worker: place 1 in the queue, about a few seconds"),
        (2, 47.0, "Waiting for a free worker: place 2 in the queue, about 50 s"),
        (9, 200.0, "Waiting for a free worker: place 9 in the queue, about 3 min"),
        (0, None, "The model is being loaded"),
    ):
        snapshot = waiting(place, seconds)
        assert words(snapshot) == text and not snapshot["lanes"] and not snapshot["done"]


def test_a_worker_that_returns_belongs_to_the_next_race(queue: Queue) -> None:
    queue.add("a")
    first, second = queue.enter(asked()), queue.enter(asked())
    assert queue.holds(first) and not queue.holds(second)
    queue.remove("a")
    queue.add("a")
    assert queue.holds(second) and not queue.holds(first)
    queue.leave(first)
    assert queue.holds(second)


class Work:
    """Work for IdleWork: steps until `finish` is set. It counts its starts, open generators and steps."""

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


def test_idle_work_ends_for_a_race_and_restarts_after_it(work: Work) -> None:
    idle = IdleWork(work)

    def race(request: int) -> Generator[int, None, None]:
        steps = work.steps
        for shown in range(request):
            assert work.open == 0 and work.steps == steps
            yield shown

    idle.start()
    wait_for(lambda: work.steps > 3)
    assert list(idle.pausing_for(race)(3)) == [0, 1, 2]
    wait_for(lambda: work.begun == 2)
    # A race that another thread closes midway also frees the device.
    closed = idle.pausing_for(race)(9)
    assert next(closed) == 0
    other = threading.Thread(target=closed.close)
    other.start()
    other.join()
    wait_for(lambda: work.begun == 3)
    # With two races, the work restarts only after both have ended.
    first, second = idle.pausing_for(race)(2), idle.pausing_for(race)(2)
    next(first), next(second), first.close()
    assert work.open == 0
    second.close()
    idle.stop()
    assert work.open == 0


def test_work_that_is_done_restarts_after_a_race(work: Work) -> None:
    """A race can find costs to measure again."""
    idle = IdleWork(work)
    work.finish.set()
    idle.start()
    for races in range(3):
        wait_for(lambda done=races + 1: work.begun == done and not work.open)
        assert list(idle.pausing_for(iter_of)(1)) == [None]
    idle.stop()
    assert not idle._thread.is_alive() and work.steps == 0


def test_the_thread_ends_when_the_work_fails_or_is_stopped(work: Work, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Generator[None, None, None]:
        yield
        raise KeyError("x")

    failed, stopped = IdleWork(broken), IdleWork(work)
    for idle in (failed, stopped):
        idle.start()
    wait_for(lambda: work.steps > 0)
    failed._thread.join()
    assert "KeyError" in caplog.text
    stopped.stop()
    assert not stopped._thread.is_alive() and work.open == 0


def iter_of(steps: int) -> Generator[None, None, None]:
    yield from [None] * steps
