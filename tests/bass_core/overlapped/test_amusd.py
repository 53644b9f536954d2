"""AMUSD, draft and target running at the same time: each draft equals the draft model's output, and counts add up.

Contract: how far the draft gets depends on timing, so the tests assert only what holds at any pace; slowing the
target lets the draft get ahead. Faults are in test_faults.py. tests/conformance checks that the
text is exact for every draft, architecture, batch and sampling.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from bass_core import ModelPair, RequestError, SamplingParams, generate, race, stream
from bass_core.decode.overlapped import decoder as amusd
from bass_core.decode.overlapped.draft import split_threads
from bass_core.decode.overlapped.timeline import Timeline
from bass_core.lanes.lane import Lane
from bass_core.model import graphs as graphs
from bass_core.model.base import CausalModel
from bass_core.model.graphs import GraphRunner, record_calls
from bass_core.sample.distribution import probabilities

from ...conformance import test_distribution as distribution
from ...models import NEAR, perturbed, prompts, tiny
from ..draft.test_head import tiny_head

TOKENS = 24
TARGET, DRAFT = tiny("llama"), perturbed(tiny("llama"), NEAR["llama"])
PAIR = ModelPair(TARGET, DRAFT)
ROWS = prompts(4)
SMALL = ModelPair(distribution.TARGET, distribution.model(1))
WARM = SamplingParams(0.9)


@pytest.fixture(autouse=True)
def slow_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slows the target, so that a draft on the same core is ahead of most verifications."""
    monkeypatch.setattr(amusd, "DELAYS", (0.004, 0.0))


def run(pair: ModelPair = PAIR, rows: Any = ROWS, **arguments: Any) -> Any:
    arguments = {"max_new_tokens": TOKENS} | arguments
    out = generate(pair, rows, method="amusd", **arguments)
    assert out.timeline is not None and out.timeline["note"] is None, "the draft was lost"
    return out


def texts(out: Any) -> list[list[int]]:
    return [sequence.token_ids for sequence in out.sequences]


@pytest.mark.parametrize("sampling", [SamplingParams(), WARM, SamplingParams(1.0, top_k=20, top_p=0.9)])
def test_a_perfect_draft_is_hardly_ever_rolled_back(sampling: SamplingParams) -> None:
    out = run(ModelPair(TARGET, TARGET), sampling=sampling)
    assert out.metrics.acceptance_rate == 1 and out.metrics.drafted > 0
    # Only tokens the target drew before any draft arrived ("sampled", "bonus") can differ from the draft's.
    own = sum(s.origins.count("bonus") + s.origins.count("sampled") for s in out.sequences)
    assert out.timeline["rolled_back"] <= (0 if sampling.greedy else own)


@pytest.mark.parametrize("kind", ["model", "head"])
def test_captured_steps_of_both_sides_write_the_same_text(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where replays write into static buffers; here a replay calls the forward again."""
    made: list[GraphRunner] = []

    def make(model: Any, batch: int, length: int, vocab: int, backend: str, **rest: Any) -> Any:
        made.append(GraphRunner(model, batch, length, vocab, backend, record=record_calls, **rest))
        return made[-1]

    monkeypatch.setattr(graphs, "make_runner", make)
    pair = ModelPair(TARGET, TARGET if kind == "model" else tiny_head(TARGET))
    pair.target_step = CausalModel(TARGET)
    if kind == "head":
        pair.target_step.readout = pair.draft.readout()
    pair.draft_step = CausalModel(TARGET if kind == "model" else pair.draft.body)
    for sampling in (SamplingParams(), WARM):
        rule = {} if sampling.greedy else {"verification": "coupled"}
        out = run(pair, sampling=sampling, **rule)
        assert texts(out) == texts(run_regular(sampling, **rule))
        assert out.metrics.drafted > 0 and (kind == "head" or out.metrics.acceptance_rate == 1)
    assert all(runner.slot.steps for runner in made)
    # `run_regular` uses PAIR, whose warm-up may have made more runners.
    assert {runner.model for runner in made} >= {pair.target_step, pair.draft_step}
    graphs._idle.clear()


def run_regular(sampling: SamplingParams, **rule: Any) -> Any:
    return generate(PAIR, ROWS, method="regular", max_new_tokens=TOKENS, sampling=sampling, **rule)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.8, top_k=30)])
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
    assert texts(run(SMALL, rows, **same)) == texts(generate(SMALL, rows, method="regular", **same))


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


@pytest.mark.parametrize(
    "arguments", [{"drafter": "prompt_lookup"}, {"draft_length": 0}, {"verification": "common_stop"}]
)
def test_what_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="amusd"):
        generate(PAIR, ROWS, method="amusd", **arguments)
    with pytest.raises(RequestError, match="amusd"):
        race(PAIR, ROWS, lanes=("regular", "amusd"), **arguments)


def test_a_pair_without_a_draft_is_refused() -> None:
    with pytest.raises(RequestError, match="draft="):
        generate(ModelPair(TARGET), ROWS, method="amusd")


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


@pytest.mark.parametrize("scheduling", ["overlap", "in_turn"])
def test_other_schedulings(scheduling: str) -> None:
    *_, last = race(PAIR, ROWS, lanes=("regular", "amusd"), scheduling=scheduling, max_new_tokens=TOKENS)
    regular, own = ([s["token_ids"] for s in lane["sequences"]] for lane in last["lanes"].values())
    assert own == regular and last["lanes"]["amusd"]["timeline"]["note"] is None


def test_cores_are_split() -> None:
    target, draft = split_threads()
    assert target >= 1 and draft >= 1
    threads = torch.get_num_threads()
    run()
    assert torch.get_num_threads() == threads
