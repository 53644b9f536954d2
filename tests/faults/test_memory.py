"""Memory: what does not fit is refused with what would; what runs out all the same ends one race and no more."""

from __future__ import annotations

import json
import multiprocessing
import resource
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from bass_core import MemoryShortage, ModelPair, RequestError, SamplingParams, generate, race
from bass_core import admission as admission_module
from bass_core import memory as memory_module
from bass_core.admission import estimate_bytes
from bass_core.cache import RaggedCache
from bass_core.drafters import Proposal
from bass_core.request import make_request

from ..models import NEAR, perturbed, prompts, tiny

TARGET = tiny("llama")
PAIR = ModelPair(TARGET, perturbed(TARGET, NEAR["llama"]))
PROMPT = [5, 6, 7]
CPU = torch.device("cpu")
SCHEDULINGS = ("fair", "overlap", "in_turn")


class Hungry:
    """A drafter that asks the allocator for more than there is, in its third round."""

    calls = 0
    rounds = 0

    def start(self, rows: Any) -> None:
        return None

    def propose(self, rows: Any, caps: list[int], keys: Any) -> Proposal:
        self.rounds += 1
        if self.rounds == 3:
            torch.empty(2**60)
        return Proposal(torch.full((len(rows), max(caps)), 3), caps)

    def settle(self, rows: Any, proposal: Any, accepted: Any) -> None:
        pass

    def move_row(self, source: int, target: int) -> None:
        pass


@pytest.mark.parametrize("scheduling", SCHEDULINGS)
def test_a_race_that_runs_out_ends_in_a_sentence_and_frees_everything(
    scheduling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref[Any]] = []
    real = RaggedCache.__init__

    def remembered(self: RaggedCache, *arguments: Any) -> None:
        real(self, *arguments)
        alive.append(weakref.ref(self))

    monkeypatch.setattr(RaggedCache, "__init__", remembered)
    with pytest.raises(MemoryShortage, match=r"ran out of memory during this race.* smaller batch") as shortage:
        list(race(PAIR, prompts(3), scheduling=scheduling, max_new_tokens=60, drafter=Hungry(), draft_length=3))
    # The error is still held here, as a server's log might hold it.
    assert shortage.value and alive and [ref() for ref in alive if ref() is not None] == []
    *_, last = race(PAIR, prompts(3), scheduling=scheduling, max_new_tokens=8)
    assert last["done"] and all(lane["error"] is None for lane in last["lanes"].values())


def test_generate_says_it_too() -> None:
    with pytest.raises(MemoryShortage, match="smaller batch"):
        generate(PAIR, PROMPT, max_new_tokens=60, drafter=Hungry(), draft_length=3)


def test_other_errors_of_a_step_keep_their_own_words() -> None:
    class Broken(Hungry):
        def propose(self, rows: Any, caps: list[int], keys: Any) -> Proposal:
            raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        generate(PAIR, PROMPT, max_new_tokens=60, drafter=Broken(), draft_length=3)


def test_when_the_system_itself_has_no_more_the_next_race_works() -> None:
    """A process whose address space is limited, and an admission that does not know of it."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_with_little_memory, args=(send,))
    child.start()
    told = receive.recv() if receive.poll(120) else "nothing"
    child.join()
    assert "ran out of memory" in told[0] and told[1:] == [0, True]


def _with_little_memory(send: Any) -> None:
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, used + 2**27))
    try:
        list(race(PAIR, PROMPT, n=4000, max_new_tokens=500, lanes=("regular", "bass")))
        told = "no error"
    except MemoryShortage as error:
        told = str(error)
    from .conftest import left_behind

    caches = left_behind()[0]
    *_, last = race(PAIR, PROMPT, n=2, max_new_tokens=8)
    send.send([told, caches, last["done"]])


def _room(monkeypatch: pytest.MonkeyPatch, needed: int) -> None:
    """Leave exactly what is needed."""
    free = needed / admission_module._HEADROOM + 1
    monkeypatch.setattr(admission_module, "available_bytes", lambda _: free)


@pytest.mark.parametrize(("rows", "tokens"), [(40, 400), (11, 500)])
def test_the_refusal_names_the_largest_that_fits(rows: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for 10 rows of what was asked: ten fit, and so does a shorter text of all; one more of either not."""
    request = make_request(PAIR, PROMPT, n=rows, max_new_tokens=tokens)
    _room(monkeypatch, estimate_bytes(PAIR, request, ("bass",), 10))
    with pytest.raises(RequestError, match="a batch of 10 would fit, or") as refusal:
        generate(PAIR, PROMPT, n=rows, max_new_tokens=tokens)
    shorter = int(str(refusal.value).split(" new tokens would fit")[0].split()[-1])
    assert 0 < shorter < tokens
    admission_module.admit(PAIR, make_request(PAIR, PROMPT, n=10, max_new_tokens=tokens), ("bass",))
    admission_module.admit(PAIR, make_request(PAIR, PROMPT, n=rows, max_new_tokens=shorter), ("bass",))
    for n, more in ((11, tokens), (rows, shorter + 1)):
        with pytest.raises(RequestError):
            admission_module.admit(PAIR, make_request(PAIR, PROMPT, n=n, max_new_tokens=more), ("bass",))


def test_where_neither_alone_would_do_one_short_row_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    request = make_request(PAIR, PROMPT, n=64, max_new_tokens=60)
    _room(monkeypatch, estimate_bytes(PAIR, request, ("bass",), 1))
    with pytest.raises(RequestError, match=r"free: a batch of 1 with \d+ new tokens would fit\."):
        generate(PAIR, PROMPT, n=400, max_new_tokens=500)


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "CGROUP", tmp_path)
    whole = memory_module.available_bytes(CPU)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_module.available_bytes(CPU) == pytest.approx(whole, rel=0.2)
    for name, text in {"max": "3000", "current": "2000", "stat": "anon 1900\ninactive_file 40\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert memory_module.available_bytes(CPU) == 1040


def test_the_estimate_covers_what_a_race_takes(tmp_path: Path) -> None:
    """Against the peak of what torch's own profiler saw taken and given back, with a prompt of 300 tokens."""
    from torch.profiler import ProfilerActivity, profile

    asked: dict[str, Any] = {"n": 32, "max_new_tokens": 24, "draft_length": 4, "sampling": SamplingParams(1.0)}
    request = make_request(PAIR, PROMPT * 100, **asked)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        generate(PAIR, PROMPT * 100, **asked)
    seen.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    held = peak = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    estimate = estimate_bytes(PAIR, request, ("bass",), 32)
    assert estimate / 3 < peak <= estimate
