"""AMUSD, draft and target running at the same time: each draft equals the draft model's output, and counts add up.

Contract: a schedule lets the draft take a step before each look at it, so that nothing asserted depends on the
machine's load; the slow test of many runs leaves that to chance. A draft that fails, hangs back or is no longer
wanted costs speed alone, the lane says so, and nothing is left. tests/conformance checks that the text is exact
for every draft, architecture, batch and sampling.
"""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bass_core import ModelPair, Options, RequestError, SamplingParams, generate, race, stream
from bass_core.decode.overlapped import decoder as amusd
from bass_core.decode.overlapped.draft import split_threads
from bass_core.decode.overlapped.session import DraftSession
from bass_core.decode.overlapped.timeline import Timeline
from bass_core.lanes.generate import _lane
from bass_core.lanes.lane import Lane
from bass_core.lanes.view import lane_view
from bass_core.model import graphs as graphs
from bass_core.sample.distribution import probabilities
from tests.conformance import test_distribution as distribution
from tests.support import ROOT
from tests.support.models import prompts, texts_of, tiny_pair
from tests.support.schedule import draft_in_step

TOKENS = 24
PAIR = tiny_pair()
TARGET, DRAFT = PAIR.target, PAIR.draft
ROWS = prompts(4)
WARM = SamplingParams(0.9)
# Of five token ids, whose distributions are known.
SMALL = ModelPair(distribution.TARGET, distribution.model(1))


@pytest.fixture(autouse=True)
def in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are there in every round."""
    draft_in_step(monkeypatch)


def run(pair: ModelPair = PAIR, rows: Any = ROWS, **arguments: Any) -> Any:
    arguments = {"max_new_tokens": TOKENS} | arguments
    out = generate(pair, rows, method="amusd", **arguments)
    assert out.timeline is not None and out.timeline["note"] is None, "the draft was lost"
    return out


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.8, top_k=30)], ids=["greedy", "warm"])
def test_every_draft_is_what_the_draft_says_of_the_text_before_it(sampling: SamplingParams) -> None:
    """Would reveal a stale token in the draft's cache, a block of an old epoch, or a wrong q."""
    written = [list(row) for row in ROWS]
    checked = 0
    for round_ in stream(PAIR, ROWS, method="amusd", max_new_tokens=40, sampling=sampling):
        for row in round_.rows:
            before, drafted = written[row.sequence], row.drafted
            if drafted:
                ids = torch.tensor([before + drafted])
                logits = DRAFT(ids).logits[0, len(before) - 1 : -1]
                if sampling.greedy:
                    assert logits.argmax(-1).tolist() == drafted
                else:
                    q = probabilities(logits, sampling).gather(1, torch.tensor(drafted)[:, None])[:, 0]
                    torch.testing.assert_close(q, torch.tensor(row.q), rtol=1e-3, atol=1e-6)
                checked += len(drafted)
            before += row.tokens
    assert checked > 30


def test_what_an_epoch_judged_is_judged_again_with_noise_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts behind a refused one are dropped; their positions are judged again, with a new acceptance u."""
    judged: list[tuple[int, int, int]] = []
    judge = amusd.verify

    def watched(logits: Any, drafts: Any, q: Any, counts: Any, keys: Any, *rest: Any, **options: Any) -> Any:
        for row, at, begin, count in zip(
            keys.sequence_ids.tolist(), keys.positions.tolist(), keys.begins.tolist(), counts.tolist(), strict=True
        ):
            assert begin <= at
            judged.extend((row, begin, at + i) for i in range(count))
        return judge(logits, drafts, q, counts, keys, *rest, **options)

    monkeypatch.setattr(amusd, "verify", watched)
    run(sampling=WARM, max_new_tokens=60)
    assert len(set(judged)) == len(judged)
    assert len({(row, at) for row, _, at in judged}) < len(judged), "no place came again"


def test_what_is_counted() -> None:
    """`drafted` counts the drafts a verification looked at; all other drafts were thrown away."""
    rounds = list(stream(PAIR, ROWS, method="amusd", max_new_tokens=TOKENS, draft_length=3))
    assert max(round_.draft_length for round_ in rounds) <= 4  # three that were fed, and one that came late
    looked_at = sum(len(row.drafted) for round_ in rounds for row in round_.rows)
    drawn, forwards = (sum(getattr(r, name) for r in rounds) for name in ("draft_tokens", "draft_forwards"))
    # `draft_tokens` includes tokens thrown away; one forward draws a token for each of at most four rows.
    assert 0 < looked_at <= drawn and forwards <= drawn <= len(ROWS) * forwards
    out = run(draft_length=3)
    metrics, line = out.metrics, out.timeline
    assert line["drafted"] == metrics.drafted + line["thrown_away"]
    assert metrics.accepted == sum(s.origins.count("accepted") for s in out.sequences)
    assert metrics.target_forwards == 1 + metrics.rounds
    for spans in (line["target"], line["draft"]):
        assert spans and all(begin <= end for begin, end in spans)
    assert line["target"] == sorted(line["target"]) and line["rollbacks"] == sorted(line["rollbacks"])


def test_fair_slices_are_exclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft does not run while another lane takes a step."""
    others: list[tuple[float, float]] = []
    drafting: list[tuple[float, float]] = []
    step, add_draft = Lane.step, Timeline.add_draft

    def stepped(self: Lane) -> Any:
        begin = time.perf_counter()
        round_ = step(self)
        if self.method != "amusd":
            others.append((begin, time.perf_counter()))
        return round_

    def drafted(self: Timeline, begin: float, end: float) -> None:
        drafting.append((begin, end))
        add_draft(self, begin, end)

    monkeypatch.setattr(Lane, "step", stepped)
    monkeypatch.setattr(Timeline, "add_draft", drafted)
    monkeypatch.setattr("bass_core.lanes.lane.SLICE_MS", 5.0)
    lanes = ("regular", "bass", "amusd")
    *_, last = race(PAIR, ROWS, lanes=lanes, max_new_tokens=60)
    rows = [[s["token_ids"] for s in last["lanes"][name]["sequences"]] for name in lanes]
    assert rows[0] == rows[1] == rows[2]
    assert last["lanes"]["amusd"]["timeline"]["note"] is None
    assert len(drafting) > 20 and len(others) > 20
    assert not [(a, b) for a in others for b in drafting if a[0] < b[1] and b[0] < a[1]]


def test_an_overlapping_race_writes_the_text_and_leaves_the_number_of_threads() -> None:
    threads = torch.get_num_threads()
    assert min(split_threads()) >= 1
    *_, last = race(PAIR, ROWS, lanes=("regular", "amusd"), scheduling="overlap", max_new_tokens=TOKENS)
    regular, own = ([s["token_ids"] for s in lane["sequences"]] for lane in last["lanes"].values())
    assert own == regular and last["lanes"]["amusd"]["timeline"]["note"] is None
    assert torch.get_num_threads() == threads


def test_what_is_refused() -> None:
    for arguments in ({"drafter": "prompt_lookup"}, {"draft_length": 0}, {"verification": "common_stop"}):
        with pytest.raises(RequestError, match="amusd"):
            race(PAIR, ROWS, lanes=("regular", "amusd"), **arguments)
    with pytest.raises(RequestError, match="draft="):
        generate(ModelPair(TARGET), ROWS, method="amusd")
    for name in ("window", "window_model"):
        with pytest.raises(RequestError, match="drafts with the target"):
            generate(PAIR, ROWS[:1], method="amusd", drafter=name)


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"sampling": SamplingParams(0.8), "verification": "coupled"},
}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "bass-amusd-draft":
            thread.join(60)
            assert not thread.is_alive()


def broken_from(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the draft's steps raise from this one on."""
    whole, steps = DraftSession.step, []

    def broken(self: DraftSession) -> Any:
        steps.append(1)
        if len(steps) > step:
            raise ZeroDivisionError
        return whole(self)

    monkeypatch.setattr(DraftSession, "step", broken)


@pytest.mark.parametrize(("way", "step"), [("greedy", 0), ("coupled", 1), ("coupled", 6)])
def test_a_draft_that_fails_leaves_regular_decoding(way: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it reads the prompts, at its first draft, and later."""
    broken_from(step, monkeypatch)
    lane = _lane(PAIR, ROWS, "amusd", Options(**{"max_new_tokens": 40} | WAYS[way]))
    while not lane.finished:
        lane.step()
    expected = texts_of(generate(PAIR, ROWS, method="regular", max_new_tokens=40, **WAYS[way]))
    assert texts_of(lane) == expected
    note = lane.timeline.note
    assert "failed (ZeroDivisionError)" in note and "regular decoding" in note
    assert lane_view(lane)["timeline"]["note"] == note and lane.error is None


def test_a_draft_that_can_not_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bass_core.decode.overlapped.session.Parts", lambda *_, **__: 1 / 0)
    out = generate(PAIR, ROWS, method="amusd", max_new_tokens=10)
    assert "ZeroDivisionError" in out.timeline["note"] and not out.metrics.drafted
    assert texts_of(out) == texts_of(generate(PAIR, ROWS, method="regular", max_new_tokens=10))


def test_the_draft_of_a_request_that_is_dropped_ends() -> None:
    """With its generator, and without anything that would close it."""
    rounds = stream(PAIR, ROWS, method="amusd", max_new_tokens=400)
    next(rounds)
    lane = _lane(PAIR, ROWS, "amusd", Options(max_new_tokens=400))
    lane.step()
    del rounds, lane


def test_a_pause_waits_for_the_step_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, began, go = DraftSession.step, threading.Event(), threading.Event()

    def slow(self: DraftSession) -> Any:
        began.set()
        go.wait(60)
        return whole(self)

    lane = _lane(PAIR, ROWS, "amusd", Options(max_new_tokens=400))
    monkeypatch.undo()
    monkeypatch.setattr(DraftSession, "step", slow)
    lane.step()
    assert began.wait(60)
    paused = threading.Thread(target=lane.pause)
    paused.start()
    paused.join(0.2)
    assert paused.is_alive()
    go.set()
    paused.join(60)
    assert not paused.is_alive()
    lane.end("stopped")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_many_short_runs_with_delays_on_either_side(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of them is stopped early, some are paused between steps, and some lose their draft."""
    monkeypatch.undo()  # of the schedule: here the delays decide
    chance = random.Random(5)
    whole = DraftSession.step
    expected = texts_of(generate(PAIR, ROWS, method="regular", max_new_tokens=40, eos_token_id=None, **WAYS[way]))
    for _ in range(60):
        monkeypatch.setattr(DraftSession, "step", whole)
        if chance.random() < 0.2:
            broken_from(chance.randint(0, 12), monkeypatch)
        monkeypatch.setattr(amusd, "DELAYS", (chance.choice((0, 0.002, 0.006)), chance.choice((0, 0.002, 0.006))))
        batch, tokens = chance.randint(1, len(ROWS)), chance.randint(1, 40)
        lead = chance.choice((1, 3, "auto"))
        asked = {"max_new_tokens": tokens, "draft_length": lead, "eos_token_id": None, **WAYS[way]}
        lane = _lane(PAIR, ROWS[:batch], "amusd", Options(**asked))
        stop = chance.randint(1, 12) if chance.random() < 1 / 3 else None
        while not lane.finished:
            if stop is not None and len(lane.sequences[0].token_ids) >= stop:
                lane.end("stopped")
                break
            if chance.random() < 0.1:
                lane.pause()
            lane.step()
        for sequence, text in zip(lane.sequences, expected, strict=False):
            written = sequence.token_ids
            assert written == text[: len(written)] and (len(written) == tokens or stop is not None)
        line = lane.timeline
        assert line.made >= line.looked_at


SCRIPT = """
import torch
from bass_core import ModelPair, stream
from bass_core.decode.overlapped.session import DraftSession
torch.set_num_threads(1)
x, step = torch.ones(3000, 3000), DraftSession.step
def slow(self):
    x @ x
    return step(self)
rounds = stream(ModelPair(tiny("llama"), tiny("llama")), prompts(2), method="amusd", max_new_tokens=400)
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
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-500:]


@pytest.mark.parametrize("drafter", ["adaptive", "model"])
def test_a_run_that_stood_before_is_copied(drafter: str) -> None:
    """A copied token has q = 1, the others the draft's q. With five token ids, many runs of three repeat."""
    rows = torch.randint(0, 5, (6, 40), generator=torch.Generator().manual_seed(2)).tolist()
    written = [list(row) for row in rows]
    points = others = 0
    for round_ in stream(SMALL, rows, method="amusd", max_new_tokens=20, drafter=drafter, sampling=WARM):
        for row in round_.rows:
            before = written[row.sequence]
            logits = SMALL.draft(torch.tensor([before + row.drafted])).logits[0, len(before) - 1 : -1]
            own = probabilities(logits, WARM).gather(1, torch.tensor(row.drafted, dtype=torch.long)[:, None])[:, 0]
            for q, expected in zip(row.q, own.tolist(), strict=True):
                copied = q == 1 and expected < 0.99
                points += copied
                others += not copied
                assert copied or q == pytest.approx(expected, rel=1e-3, abs=1e-6)
            before += row.tokens
    assert others and (points > 0) == (drafter == "adaptive")
    same = {"max_new_tokens": 20, "drafter": drafter}
    assert texts_of(run(SMALL, rows, **same)) == texts_of(generate(SMALL, rows, method="regular", **same))
