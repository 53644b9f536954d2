"""Work in turns: it stands still between them, its errors come out, its thread ends; and noise leaves no trace."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from bass_core.decode.outside.noise import OwnNoise
from bass_core.decode.outside.turns import Turns

CPU = torch.device("cpu")
Hand = Callable[[int], bool]


def counting(log: list[object], most: int = 3) -> Callable[[Hand], None]:
    """Work that hands over 0, 1 and so on, and writes down what happens."""

    def work(hand_over: Hand) -> None:
        for number in range(most):
            log.append(number)
            if not hand_over(number):
                log.append("stopped")
                return
        log.append("done")

    return work


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "turns"]


def test_one_turn_is_one_result_and_nothing_between() -> None:
    log: list[object] = []
    turns: Turns[int] = Turns(counting(log), CPU, "turns")
    assert log == [] and not threads(), "nothing runs before the first turn"
    for number in range(3):
        assert turns.take() == number
        assert log == list(range(number + 1))
    assert turns.take() is None and log[-1] == "done"
    turns.stop()
    assert not threads()


def test_stopping_ends_the_work_and_its_thread() -> None:
    log: list[object] = []
    turns: Turns[int] = Turns(counting(log), CPU, "turns")
    turns.take()
    turns.stop()
    turns.stop()
    assert log == [0, "stopped"] and not threads()
    Turns(counting(log), CPU, "turns").stop()
    assert log == [0, "stopped"], "what was never begun is not begun to be stopped"


def test_an_error_of_the_work_is_the_caller_s() -> None:
    def work(hand_over: Hand) -> None:
        hand_over(1)
        raise ValueError("a broken model")

    turns: Turns[int] = Turns(work, CPU, "turns")
    assert turns.take() == 1
    with pytest.raises(ValueError, match="a broken model"):
        turns.take()
    turns.stop()
    assert not threads()


def test_the_work_has_its_caller_s_number_of_threads() -> None:
    before, seen = torch.get_num_threads(), []

    def work(hand_over: Hand) -> None:
        torch.ones(4, 4) @ torch.ones(4, 4)
        seen.append(torch.get_num_threads())

    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            turns: Turns[int] = Turns(work, CPU, "turns")
            turns.take()
            turns.stop()
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 2]


def test_own_noise_goes_on_and_leaves_the_caller_s_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(4)
    whole = torch.rand(6, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(5)
    noise, drawn, outside = OwnNoise(3, CPU), [], []
    for _ in range(2):
        with noise.drawing():
            drawn.append(torch.rand(3))
        outside.append(torch.rand(2))
    assert torch.equal(torch.cat(drawn), whole)
    assert torch.equal(torch.cat(outside), expected)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError), noise.drawing():
        torch.rand(1)
        raise RuntimeError
    assert torch.equal(torch.get_rng_state(), before)
