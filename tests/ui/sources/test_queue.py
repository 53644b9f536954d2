"""Who comes next: the least work first, nobody overtaken for more than a minute; what those who wait are told."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ui.page.limits import Limits
from ui.page.request import RaceRequest, make_request
from ui.sources.queue import PATIENCE_S, Pace, Queue, steps
from ui.sources.source import waiting, words


class Clock:
    """Time that the test moves on."""

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


def test_each_race_has_a_worker_of_its_own(queue: Queue) -> None:
    queue.add("a"), queue.add("b")
    first, second, third = (queue.enter(asked()) for _ in range(3))
    assert {first.worker, second.worker} == {"a", "b"} and third.worker is None
    queue.leave(second)
    assert third.worker == second.worker


def test_the_least_work_comes_first(queue: Queue) -> None:
    queue.add("a")
    running = queue.enter(asked())
    large, small, middle = queue.enter(asked(1024, 32)), queue.enter(asked(16)), queue.enter(asked(16, 8))
    assert [queue.outlook(one)[0] for one in (large, small, middle)] == [3, 1, 2]
    for before, after in ((running, small), (small, middle), (middle, large)):
        assert after.worker is None
        queue.leave(before)
        assert after.worker == "a"


def test_nobody_is_overtaken_for_more_than_a_minute(queue: Queue, clock: Clock) -> None:
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


def test_no_patience_is_the_order_of_arrival(clock: Clock) -> None:
    queue = Queue(patience_s=0.0, clock=clock)
    queue.add("a")
    queue.enter(asked())
    large, small = queue.enter(asked(1024, 32)), queue.enter(asked())
    assert queue.outlook(large)[0] == 1 and queue.outlook(small)[0] == 2


def test_whoever_gives_up_makes_room(queue: Queue) -> None:
    queue.add("a")
    running, gone, waits = (queue.enter(asked()) for _ in range(3))
    queue.leave(gone)
    assert queue.outlook(waits)[0] == 1
    queue.leave(running)
    assert waits.worker == "a" and gone.worker is None


def test_a_lost_worker_gets_nothing_until_it_is_back(queue: Queue) -> None:
    queue.add("a"), queue.add("b")
    first, second = queue.enter(asked()), queue.enter(asked())
    queue.remove(first.worker or "")
    third = queue.enter(asked())
    queue.leave(first)  # its race has failed; the worker is not free
    assert third.worker is None
    queue.add(first.worker or "")
    assert third.worker == first.worker
    queue.leave(first)  # again: it must not free the worker under the third race
    assert queue.enter(asked()).worker is None
    queue.leave(second)


def test_a_worker_that_has_the_pair_is_preferred(queue: Queue) -> None:
    queue.add("a"), queue.add("b")
    own, other = queue.enter(asked()), queue.enter(asked(pair="other"))
    assert (own.worker, other.worker) == ("a", "b")
    queue.leave(own), queue.leave(other)
    again = queue.enter(asked(pair="other"))
    assert again.worker == "b"
    queue.leave(again)
    # A race of the worker's own pair does not unload the other one.
    queue.enter(asked())
    queue.leave(queue.enter(asked()))
    assert queue.enter(asked(pair="other")).worker == "b"


def test_place_and_time_are_told(queue: Queue, clock: Clock) -> None:
    queue.add("a")
    first, second = queue.enter(asked()), queue.enter(asked())
    # Nothing has shown yet how fast the workers are.
    assert queue.outlook(first) == (0, 0.0) and queue.outlook(second) == (1, None)
    clock.now += 10
    queue.leave(first, finished=True)
    third, fourth = queue.enter(asked()), queue.enter(asked())
    clock.now += 4
    assert queue.outlook(third) == (1, pytest.approx(6)) and queue.outlook(fourth) == (2, pytest.approx(16))


def test_waiting_ends_when_a_worker_comes(queue: Queue) -> None:
    ticket = queue.enter(asked())
    assert not queue.wait(ticket, 0.01)
    threading.Timer(0.05, queue.add, ["a"]).start()
    assert queue.wait(ticket, 60) and ticket.worker == "a"


def test_work_grows_with_rows_tokens_and_lanes() -> None:
    sizes = [
        asked(16),
        asked(16, 4),
        asked(64, 4),
        asked(64, 4, lanes=["regular", "speculative", "bass", "amusd"]),
    ]
    assert sorted(map(steps, sizes)) == [steps(one) for one in sizes]
    assert steps(asked(1024, 32)) > 100 * steps(asked(16, 2))


def test_a_pace_is_learnt_from_finished_races_alone() -> None:
    pace = Pace()
    assert pace.expected_s(asked()) is None
    pace.add(asked(time_budget_ms=100), 99.0)
    assert pace.expected_s(asked()) is None
    pace.add(asked(), 2.0)
    assert pace.expected_s(asked()) == pytest.approx(2.0)
    assert pace.expected_s(asked(time_budget_ms=100)) == pytest.approx(0.3)
    assert pace.expected_s(asked(64)) == pytest.approx(2.0 * steps(asked(64)) / steps(asked()))


@pytest.mark.parametrize(
    ("place", "seconds", "text"),
    [
        (3, None, "Waiting for a free worker: place 3 in the queue"),
        (1, 4.2, "Waiting for a free worker: place 1 in the queue, about a few seconds"),
        (2, 47.0, "Waiting for a free worker: place 2 in the queue, about 50 s"),
        (9, 200.0, "Waiting for a free worker: place 9 in the queue, about 3 min"),
        (0, None, "A worker is loading the model"),
    ],
)
def test_the_status_line(place: int, seconds: float | None, text: str) -> None:
    snapshot = waiting(place, seconds)
    assert words(snapshot) == text and not snapshot["lanes"] and not snapshot["done"]


def test_a_worker_that_came_back_belongs_to_its_next_race(queue: Queue) -> None:
    queue.add("a")
    first, second = queue.enter(asked()), queue.enter(asked())
    assert queue.holds(first) and not queue.holds(second)
    queue.remove("a")
    queue.add("a")
    assert queue.holds(second) and not queue.holds(first)
    queue.leave(first)
    assert queue.holds(second)
