"""Rounds that the device is given before the last one is read write the texts and records of the plain loop."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from bass_core.decode.batch import BatchDecoder
from bass_core.decode.verifier import LaunchedRound, Verifier
from bass_core.lanes.clock import LaneClock
from bass_core.lanes.lane import Lane
from bass_core.machine.transfer import HostCopy
from bass_core.verify.acceptance import UNSOUND
from bass_core.verify.judge import Judge
from kernels.support import runtime

from .emulation import capture, ledger
from .emulation.models import TYPE
from .test_captured_rounds import lane_of

pytestmark = pytest.mark.slow

EMUL = torch.device(TYPE, 0)
# Tokens that end a text, so that rows end at different times.
ENDS = list(range(0, 96, 13))
TIMES = ("time_ms", "draft_ms", "verify_ms")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[LaunchedRound]:
    """Collect the rounds that are launched before the last one is read."""
    rounds, launch = list[LaunchedRound](), Verifier.launch_again

    def noted(self: Verifier, *arguments: Any) -> LaunchedRound:
        rounds.append(launch(self, *arguments))
        return rounds[-1]

    monkeypatch.setattr(Verifier, "launch_again", noted)
    return rounds


@contextmanager
def plain_loop(patch: pytest.MonkeyPatch) -> Iterator[None]:
    with patch.context() as here:
        here.setattr(BatchDecoder, "launches_ahead", False)
        yield


def written(lane: Lane, stop: frozenset[int] = frozenset()) -> tuple[list[Any], list[Any]]:
    """Run a lane; return its texts and records without times. Tokens in `stop` stand in for stop strings."""
    for sequence in lane.sequences:
        sequence.stopped = stop.__contains__ if stop else None
    while not lane.finished:
        lane.step()
    records = [{**record, **dict.fromkeys(TIMES)} for record in lane.trace.records]
    return [(row.token_ids, row.origins, row.finish_reason) for row in lane.sequences], records


def same(one: Any, other: Any) -> bool:
    """Return whether records are equal. A row that stays longer in a wider graph rounds numbers differently."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-6)
    return bool(one == other)


# Options of `lane_of`, with a set of tokens at which texts stop.
CASES: dict[str, tuple[tuple[str, int, str, str], dict[str, Any]]] = {
    "regular": (("regular", 1, "greedy", "head"), {}),
    "regular, rows end": (("regular", 5, "sampled", "head"), {"eos_token_id": ENDS}),
    "head": (("bass", 1, "greedy", "head"), {}),
    "head, rows end": (("bass", 5, "sampled", "head"), {"eos_token_id": ENDS, "max_new_tokens": 60}),
    "head, stop strings": (("bass", 5, "greedy", "head"), {"draft_length": 1, "stop": ENDS}),
    "head, long drafts": (
        ("bass", 3, "sampled", "head"), {"draft_length": 7, "synthetic_acceptance": 0.8, "stop": ENDS}
    ),
    "eagle head": (("bass", 2, "greedy", "eagle"), {}),
    "draft model": (("bass", 1, "sampled", "perturbed"), {}),
    "draft model, stop strings": (("bass", 5, "sampled", "perturbed"), {"stop": ENDS}),
    "draft model, rows end": (("bass", 5, "greedy", "perturbed"), {"eos_token_id": ENDS, "draft_length": 1}),
    "draft model, 5 drafts": (("bass", 2, "top-p", "perturbed"), {"draft_length": 5}),
    "speculative": (("speculative", 2, "sampled", "perturbed"), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_texts_and_records_are_those_of_the_plain_loop(
    name: str, launched: list[LaunchedRound], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, given = CASES[name]
    options = {"max_new_tokens": 30, **given}
    stop = frozenset(options.pop("stop", ()))
    with plain_loop(monkeypatch):
        texts, records = written(lane_of(*arguments, **options), stop)
    assert not launched
    lane = lane_of(*arguments, **options)
    own_texts, own_records = written(lane, stop)
    assert own_texts == texts and same(own_records, records)
    assert len(records) // 3 < len(launched) <= len(records)
    assert not ledger.races and lane.error is None


@pytest.mark.parametrize("asked", ["inspect", "logprobs", "penalties", "common_stop", "auto", "tree", "adaptive"])
def test_rounds_that_the_host_decides_are_not_launched_ahead(asked: str, launched: list[LaunchedRound]) -> None:
    options: dict[str, Any] = {
        "common_stop": {"verification": "common_stop"},
        "auto": {"draft_length": "bass"},
        "tree": {"tree": (2, 1)},
        "adaptive": {"drafter": "adaptive"},
    }.get(asked, {asked: True} if asked in ("inspect", "logprobs") else {})
    sampling = "penalties" if asked == "penalties" else "greedy"
    written(lane_of("bass", 2, sampling, max_new_tokens=12, **options))
    assert not launched


@pytest.mark.parametrize(("method", "draft", "graphs"), [("regular", "head", 1), ("bass", "head", 2)])
def test_the_next_round_is_launched_before_this_one_is_read(
    method: str, draft: str, graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the host waits for a round, the device has all graphs of the next one."""
    log = list[str]()
    replay, wait = capture.CUDAGraph.replay, HostCopy.wait

    def replayed(self: capture.CUDAGraph) -> None:
        log.append("replay")
        replay(self)

    def waited(self: HostCopy) -> torch.Tensor:
        log.append("wait")
        return wait(self)

    monkeypatch.setattr(capture.CUDAGraph, "replay", replayed)
    monkeypatch.setattr(HostCopy, "wait", waited)
    lane = lane_of(method, 2, "greedy", draft, max_new_tokens=100)
    for _ in range(6):
        lane.step()
    log.clear()
    decoder: Any = lane._decoder
    for _ in range(3):
        text = [len(row.tokens) for row in lane.sequences]
        lane.step()
        # The host's text lacks the round that the device has begun.
        assert decoder._next is not None and all(
            len(row.tokens) > before for row, before in zip(lane.sequences, text, strict=True)
        )
    assert log == [*["replay"] * graphs, "wait"] * 3
    lane.end("stopped")


def test_a_stopped_lane_waits_for_the_round_that_it_leaves_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another lane may get its cache, on another stream."""
    lane, waits, wait = lane_of("regular", 2, "greedy", "head"), list[HostCopy](), HostCopy.wait
    for _ in range(4):
        lane.step()
    decoder: Any = lane._decoder
    copy = decoder._next.verifying.copy

    def waited(self: HostCopy) -> torch.Tensor:
        waits.append(self)
        return wait(self)

    monkeypatch.setattr(HostCopy, "wait", waited)
    lane.end("stopped")
    assert waits == [copy]


@pytest.mark.parametrize(
    ("ahead", "method", "draft"),
    [(True, "regular", "head"), (False, "regular", "head"), (True, "bass", "head"), (True, "bass", "perturbed")],
)
def test_unsound_numbers_end_a_lane_with_the_same_error(
    ahead: bool, method: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next round is fed a token of id -1, which must not reach an embedding."""
    monkeypatch.setattr(BatchDecoder, "launches_ahead", ahead)
    run = Judge.run

    def unsound(self: Judge, *arguments: Any) -> Any:
        judged = run(self, *arguments)
        positions = arguments[2].positions
        judged.packed[:, 1] = judged.packed[:, 1].where(positions < 26, float(UNSOUND))
        return judged

    monkeypatch.setattr(Judge, "run", unsound)
    lane = lane_of(method, 2, "greedy", draft)
    with pytest.raises(Exception, match="NaN or infinite"):
        while True:
            lane.step()
    # Positions before 26 are sound, so a round may end there or have jumped over a few of them.
    longest = max(len(row.tokens) for row in lane.sequences)
    assert longest == 26 if method == "regular" else 26 <= longest < 30
    lane.end("error")


def test_a_clock_counts_work_of_the_next_round_one_step_late() -> None:
    """Operators take 0.01 ms. The first step queues 4 operators of its round and 3 of the next one."""
    clock, x, module, ms = LaneClock(EMUL), torch.zeros(4, device=EMUL), runtime(EMUL), list[float]()

    def work(count: int) -> Any:
        for _ in range(count):
            x.add_(1)
        event = module.Event(enable_timing=True)
        event.record()
        return event

    for counts in ((4, 3), (0, 5), (0, 6), (0, 0)):
        with clock.running():
            begins = work(counts[0])
            work(counts[1])
            clock.next_begins(begins if counts[1] else None)
        ms.append(clock.ms)
        # Other lanes' work between the steps.
        work(7)
    assert ms == pytest.approx([0.04, 0.07, 0.12, 0.18])
