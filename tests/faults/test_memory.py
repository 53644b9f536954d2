"""A shortage of memory at run time ends one race only."""

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
def test_a_race_that_runs_out_ends_in_a_sentence_and_frees_everything(scheduling: str) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 60, "drafter": FailingDrafter(3), "draft_length": 3}
    # The test holds the error, as a server's log might: it must not keep tensors alive.
    with (
        frees_at_once(),
        pytest.raises(MemoryShortage, match=r"ran out of memory during this race.* smaller batch") as shortage,
    ):
        list(race(PAIR, prompts(3), scheduling=scheduling, **asked))
    assert shortage.value
    *_, last = race(PAIR, prompts(3), scheduling=scheduling, max_new_tokens=8)
    assert last["done"] and all(lane["error"] is None for lane in last["lanes"].values())


def test_generate_says_it_too() -> None:
    with pytest.raises(MemoryShortage, match="smaller batch"):
        generate(PAIR, PROMPT, max_new_tokens=60, drafter=FailingDrafter(3), draft_length=3)


def test_other_errors_of_a_step_keep_their_own_words() -> None:
    broken = FailingDrafter(1, RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        generate(PAIR, PROMPT, max_new_tokens=60, drafter=broken, draft_length=3)


@pytest.mark.slow
def test_when_the_system_itself_has_no_more_the_next_race_works() -> None:
    """The process has a limited address space (RLIMIT_AS), of which the admission check does not know."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_with_little_memory, args=(send,))
    child.start()
    told = receive.recv() if receive.poll(120) else "nothing"
    child.join()
    assert "ran out of memory" in told[0] and told[1:] == [0, True]


def _with_little_memory(send: Any) -> None:
    used, before = psutil.Process().memory_info().vms, alive(collect=True)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, used + 2**27))
    try:
        list(race(PAIR, PROMPT, n=4000, max_new_tokens=500, lanes=("regular", "bass")))
        told = "no error"
    except MemoryShortage as error:
        told = str(error)
    left = alive(collect=True) - before
    *_, last = race(PAIR, PROMPT, n=2, max_new_tokens=8)
    send.send([told, left, last["done"]])
