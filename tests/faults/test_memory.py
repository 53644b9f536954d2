"""A shortage of memory during a race ends only that race."""

from __future__ import annotations

import multiprocessing
import resource
from typing import Any

import psutil
import pytest

from bass_core import (
    MemoryShortage,
    generate,
    race,
)
from tests.support.drafters import FailingDrafter
from tests.support.memory import alive, frees_at_once
from tests.support.models import prompts, slow_but, tiny_pair

PAIR = tiny_pair()
PROMPT = [5, 6, 7]


@pytest.mark.parametrize("scheduling", slow_but(["fair"], ["fair", "overlap", "in_turn"]))
def test_a_race_that_runs_out_of_memory_frees_everything(scheduling: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": 60, "drafter": FailingDrafter(3), "draft_length": 3}
    # The test keeps the error, as a server's log might. The error must not keep tensors alive.
    with (
        frees_at_once(),
        pytest.raises(MemoryShortage, match=r"ran out of memory during this race.* smaller batch") as shortage,
    ):
        list(race(PAIR, prompts(3), scheduling=scheduling, **options))
    assert shortage.value
    *_, last = race(PAIR, prompts(3), scheduling=scheduling, max_new_tokens=8)
    assert last["done"] and all(lane["error"] is None for lane in last["lanes"].values())


def test_generate_raises_a_memory_shortage() -> None:
    with pytest.raises(MemoryShortage, match="smaller batch"):
        generate(PAIR, PROMPT, max_new_tokens=60, drafter=FailingDrafter(3), draft_length=3)


def test_other_errors_of_a_step_are_raised_unchanged() -> None:
    broken = FailingDrafter(1, RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        generate(PAIR, PROMPT, max_new_tokens=60, drafter=broken, draft_length=3)


@pytest.mark.slow
def test_the_next_race_works_after_the_system_refused_memory() -> None:
    """The admission check does not know the limit on the process's address space (RLIMIT_AS)."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_with_little_memory, args=(send,))
    child.start()
    report = receive.recv() if receive.poll(120) else "nothing"
    child.join()
    assert "ran out of memory" in report[0] and report[1:] == [0, True]


def _with_little_memory(send: Any) -> None:
    used, before = psutil.Process().memory_info().vms, alive(collect=True)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, used + 2**27))
    try:
        list(race(PAIR, PROMPT, n=4000, max_new_tokens=500, lanes=("regular", "bass")))
        message = "no error"
    except MemoryShortage as error:
        message = str(error)
    left = alive(collect=True) - before
    *_, last = race(PAIR, PROMPT, n=2, max_new_tokens=8)
    send.send([message, left, last["done"]])
