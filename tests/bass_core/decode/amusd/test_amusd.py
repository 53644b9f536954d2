"""AMUSD runs draft and target at the same time; a draft that fails or is late costs only speed.

Except in the slow test of many runs, the draft takes one step each time before the target looks for drafts, so
results do not depend on the machine's load. tests/conformance checks that the text is exact.
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
from bass_core.decode.amusd.draft import split_threads
from bass_core.decode.amusd.session import DraftSession
from bass_core.decode.amusd.timeline import Timeline
from bass_core.lanes.generate import _lane
from bass_core.lanes.lane import Lane
from bass_core.lanes.view import lane_view
from bass_core.model import graphs as graphs
from bass_core.sample.distribution import probabilities
from bass_core.verify import judge
from tests.conformance import test_distribution as distribution
from tests.support import ROOT
from tests.support.models import prompts, texts_of, tiny_pair
from tests.support.schedule import draft_in_step

TOKENS = 24
PAIR = tiny_pair()
TARGET, DRAFT = PAIR.target, PAIR.draft
ROWS = prompts(4)
SAMPLED = SamplingParams(0.9)
# Five token ids, with known distributions.
FIVE_TOKENS = ModelPair(distribution.TARGET, distribution.model(1))


@pytest.fixture(autouse=True)
def schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the draft take its steps at fixed points, so that drafts arrive in every round."""
    draft_in_step(monkeypatch)


def run(pair: ModelPair = PAIR, rows: Any = ROWS, **arguments: Any) -> Any:
    arguments = {"max_new_tokens": TOKENS} | arguments
    output = generate(pair, rows, method="amusd", **arguments)
    assert output.timeline is not None and output.timeline["note"] is None, "the draft was lost"
    return output


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.8, top_k=30)], ids=["greedy", "warm"])
def test_every_draft_is_the_draft_models_output_for_the_text_before_it(sampling: SamplingParams) -> None:
    """This fails if the draft's cache has stale tokens, a draft is of an old epoch, or its q is wrong."""
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


def test_positions_verified_again_get_new_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts after a rejected one are dropped. When the target verifies these positions later, it uses a new u."""
    verified: list[tuple[int, int, int]] = []
    real_verify = judge.verify

    def recorded(logits: Any, drafts: Any, q: Any, counts: Any, keys: Any, *others: Any, **options: Any) -> Any:
        for row, position, begin, count in zip(
            keys.sequence_ids.tolist(), keys.positions.tolist(), keys.begins.tolist(), counts.tolist(), strict=True
        ):
            assert begin <= position
            verified.extend((row, begin, position + i) for i in range(count))
        return real_verify(logits, drafts, q, counts, keys, *others, **options)

    monkeypatch.setattr(judge, "verify", recorded)
    run(sampling=SAMPLED, max_new_tokens=60)
    assert len(set(verified)) == len(verified)
    assert len({(row, position) for row, _, position in verified}) < len(verified), (
        "no position was verified twice"
    )


def test_counts_add_up() -> None:
    """`drafted` counts the drafts that were verified; the others were thrown away."""
    rounds = list(stream(PAIR, ROWS, method="amusd", max_new_tokens=TOKENS, draft_length=3))
    assert (
        max(round_.draft_length for round_ in rounds) <= 4
    )  # three drafts that the target was fed, and one that arrived during its step
    verified = sum(len(row.drafted) for round_ in rounds for row in round_.rows)
    drawn, forwards = (sum(getattr(r, name) for r in rounds) for name in ("draft_tokens", "draft_forwards"))
    # `draft_tokens` includes the tokens thrown away. A forward draws one token for each of at most four rows.
    assert 0 < verified <= drawn and forwards <= drawn <= len(ROWS) * forwards
    output = run(draft_length=3)
    metrics, timeline = output.metrics, output.timeline
    assert timeline["drafted"] == metrics.drafted + timeline["thrown_away"]
    assert metrics.accepted == sum(s.origins.count("accepted") for s in output.sequences)
    assert metrics.target_forwards == 1 + metrics.rounds
    for spans in (timeline["target"], timeline["draft"]):
        assert spans and all(begin <= end for begin, end in spans)
    assert timeline["target"] == sorted(timeline["target"]) and timeline["rollbacks"] == sorted(
        timeline["rollbacks"]
    )


def test_the_draft_never_runs_during_another_lanes_step(monkeypatch: pytest.MonkeyPatch) -> None:
    other_lanes: list[tuple[float, float]] = []
    draft_spans: list[tuple[float, float]] = []
    step, add_draft = Lane.step, Timeline.add_draft

    def timed_step(self: Lane) -> Any:
        begin = time.perf_counter()
        round_ = step(self)
        if self.method != "amusd":
            other_lanes.append((begin, time.perf_counter()))
        return round_

    def timed_add_draft(self: Timeline, begin: float, end: float) -> None:
        draft_spans.append((begin, end))
        add_draft(self, begin, end)

    monkeypatch.setattr(Lane, "step", timed_step)
    monkeypatch.setattr(Timeline, "add_draft", timed_add_draft)
    monkeypatch.setattr("bass_core.lanes.lane.SLICE_MS", 5.0)
    lanes = ("regular", "bass", "amusd")
    *_, last = race(PAIR, ROWS, lanes=lanes, max_new_tokens=60)
    rows = [[s["token_ids"] for s in last["lanes"][name]["sequences"]] for name in lanes]
    assert rows[0] == rows[1] == rows[2]
    assert last["lanes"]["amusd"]["timeline"]["note"] is None
    assert len(draft_spans) > 20 and len(other_lanes) > 20
    assert not [(a, b) for a in other_lanes for b in draft_spans if a[0] < b[1] and b[0] < a[1]]


def test_an_overlapping_race_writes_the_same_text_and_keeps_the_thread_count() -> None:
    threads = torch.get_num_threads()
    assert min(split_threads()) >= 1
    *_, last = race(PAIR, ROWS, lanes=("regular", "amusd"), scheduling="overlap", max_new_tokens=TOKENS)
    regular, amusd_rows = ([s["token_ids"] for s in lane["sequences"]] for lane in last["lanes"].values())
    assert amusd_rows == regular and last["lanes"]["amusd"]["timeline"]["note"] is None
    assert torch.get_num_threads() == threads


def test_amusd_refuses_options_it_cannot_run() -> None:
    for arguments in ({"drafter": "prompt_lookup"}, {"draft_length": 0}, {"verification": "common_stop"}):
        with pytest.raises(RequestError, match="amusd"):
            race(PAIR, ROWS, lanes=("regular", "amusd"), **arguments)
    with pytest.raises(RequestError, match="draft="):
        generate(ModelPair(TARGET), ROWS, method="amusd")
    for name in ("window", "window_model"):
        with pytest.raises(RequestError, match="drafts with the target"):
            generate(PAIR, ROWS[:1], method="amusd", drafter=name)


CASES: dict[str, dict[str, Any]] = {
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


def fail_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the draft complete `step` steps and fail in the next one."""
    real_step, steps = DraftSession.step, []

    def failing_step(self: DraftSession) -> Any:
        steps.append(1)
        if len(steps) > step:
            raise ZeroDivisionError
        return real_step(self)

    monkeypatch.setattr(DraftSession, "step", failing_step)


@pytest.mark.parametrize(("case", "step"), [("greedy", 0), ("coupled", 1), ("coupled", 6)])
def test_a_draft_that_fails_leaves_regular_decoding(case: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft fails while it reads the prompts, at its first draft, or later."""
    fail_after(step, monkeypatch)
    lane = _lane(PAIR, ROWS, "amusd", Options(**{"max_new_tokens": 40} | CASES[case]))
    while not lane.finished:
        lane.step()
    expected = texts_of(generate(PAIR, ROWS, method="regular", max_new_tokens=40, **CASES[case]))
    assert texts_of(lane) == expected
    note = lane.timeline.note
    assert "failed (ZeroDivisionError)" in note and "regular decoding" in note
    assert lane_view(lane)["timeline"]["note"] == note and lane.error is None


def test_a_draft_that_cannot_be_created_leaves_regular_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bass_core.decode.amusd.session.DrafterInputs", lambda *_, **__: 1 / 0)
    output = generate(PAIR, ROWS, method="amusd", max_new_tokens=10)
    assert "ZeroDivisionError" in output.timeline["note"] and not output.metrics.drafted
    assert texts_of(output) == texts_of(generate(PAIR, ROWS, method="regular", max_new_tokens=10))


def test_the_draft_thread_of_a_dropped_request_ends() -> None:
    # Nothing closes the rounds, so garbage collection must end the thread; `nothing_is_left` checks that it did.
    rounds = stream(PAIR, ROWS, method="amusd", max_new_tokens=400)
    next(rounds)
    lane = _lane(PAIR, ROWS, "amusd", Options(max_new_tokens=400))
    lane.step()
    del rounds, lane


def test_a_pause_waits_for_the_running_step(monkeypatch: pytest.MonkeyPatch) -> None:
    real_step, began, may_end = DraftSession.step, threading.Event(), threading.Event()

    def slow_step(self: DraftSession) -> Any:
        began.set()
        may_end.wait(60)
        return real_step(self)

    lane = _lane(PAIR, ROWS, "amusd", Options(max_new_tokens=400))
    monkeypatch.undo()
    monkeypatch.setattr(DraftSession, "step", slow_step)
    lane.step()
    assert began.wait(60)
    paused = threading.Thread(target=lane.pause)
    paused.start()
    paused.join(0.2)
    assert paused.is_alive()
    may_end.set()
    paused.join(60)
    assert not paused.is_alive()
    lane.end("stopped")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_many_short_runs_with_random_delays(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the runs are stopped early, some are paused between steps, and some lose their draft."""
    monkeypatch.undo()  # Remove the fixed schedule: in this test, random delays decide when drafts arrive.
    rng = random.Random(5)
    real_step = DraftSession.step
    expected = texts_of(
        generate(PAIR, ROWS, method="regular", max_new_tokens=40, eos_token_id=None, **CASES[case])
    )
    for _ in range(60):
        monkeypatch.setattr(DraftSession, "step", real_step)
        if rng.random() < 0.2:
            fail_after(rng.randint(0, 12), monkeypatch)
        monkeypatch.setattr(
            "bass_core.decode.amusd.decoder.DELAYS", (rng.choice((0, 0.002, 0.006)), rng.choice((0, 0.002, 0.006)))
        )
        batch, tokens = rng.randint(1, len(ROWS)), rng.randint(1, 40)
        draft_length = rng.choice((1, 3, "auto"))
        options = {"max_new_tokens": tokens, "draft_length": draft_length, "eos_token_id": None, **CASES[case]}
        lane = _lane(PAIR, ROWS[:batch], "amusd", Options(**options))
        stop = rng.randint(1, 12) if rng.random() < 1 / 3 else None
        while not lane.finished:
            if stop is not None and len(lane.sequences[0].token_ids) >= stop:
                lane.end("stopped")
                break
            if rng.random() < 0.1:
                lane.pause()
            lane.step()
        for sequence, text in zip(lane.sequences, expected, strict=False):
            written = sequence.token_ids
            assert written == text[: len(written)] and (len(written) == tokens or stop is not None)
        timeline = lane.timeline
        assert timeline.made >= timeline.looked_at


SCRIPT = """
import torch
from bass_core import ModelPair, stream
from bass_core.decode.amusd.session import DraftSession
from tests.support.models import prompts, tiny
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
    """The thread is inside a matrix product, which returns during interpreter shutdown."""
    result = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr[-500:]


@pytest.mark.parametrize("drafter", ["adaptive", "model"])
def test_a_repeated_run_of_tokens_is_copied(drafter: str) -> None:
    """Copied tokens have q = 1, the others the draft's q.

    With only five token ids, many sequences of three tokens occur again.
    """
    rows = torch.randint(0, 5, (6, 40), generator=torch.Generator().manual_seed(2)).tolist()
    written = [list(row) for row in rows]
    copies = others = 0
    for round_ in stream(FIVE_TOKENS, rows, method="amusd", max_new_tokens=20, drafter=drafter, sampling=SAMPLED):
        for row in round_.rows:
            text = written[row.sequence]
            logits = FIVE_TOKENS.draft(torch.tensor([text + row.drafted])).logits[0, len(text) - 1 : -1]
            draft_q = probabilities(logits, SAMPLED).gather(
                1, torch.tensor(row.drafted, dtype=torch.long)[:, None]
            )[:, 0]
            for q, expected in zip(row.q, draft_q.tolist(), strict=True):
                copied = q == 1 and expected < 0.99
                copies += copied
                others += not copied
                assert copied or q == pytest.approx(expected, rel=1e-3, abs=1e-6)
            text += row.tokens
    assert others and (copies > 0) == (drafter == "adaptive")
    options = {"max_new_tokens": 20, "drafter": drafter}
    assert texts_of(run(FIVE_TOKENS, rows, **options)) == texts_of(
        generate(FIVE_TOKENS, rows, method="regular", **options)
    )
