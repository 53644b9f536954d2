"""The predicted cost of a round, and the record of what its forwards were fed."""

from __future__ import annotations

from typing import Any

import pytest

from bass_core import CostTable, SamplingParams, SimulatedClock, stream
from bass_core.model.runner import ModelRunner
from bass_core.predict.billing import bill
from bass_core.predict.roofline import Roofline
from bass_core.sequence import Forward, Round, RowRound, Sequence, WindowWork
from tests.support.models import prompts, small_window, tiny_pair

PAIR = tiny_pair()
TARGET = PAIR.target
ROWS = prompts(3)
CLOCK = SimulatedClock("h100").fitted(3, 100)
TABLE = CostTable(
    {1: [(1.0, 10.0), (9.0, 18.0)], 3: [(3.0, 12.0), (27.0, 60.0)]},
    {1: 1.0, 3: 2.0},
    padded=False,
)
REQUEST: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": None}


def row(sequence: int, drafted: int, written: int, parents: list[int] | None = None) -> RowRound:
    zeros = [0.0] * drafted
    return RowRound(
        sequence, [1] * drafted, zeros, zeros, zeros, 0, [1] * written, [""] * written, None, parents=parents
    )


def test_a_round_is_billed_at_the_rows_mean_cached_length() -> None:
    fed = Forward([9, 5], [4, 2])
    round_ = Round("verify", 3, [row(0, 3, 1), row(1, 1, 1)], draft_forwards=3, draft_tokens=4, fed=fed)
    costs = CLOCK.costs(7)
    assert isinstance(costs, Roofline) and costs.context == 7
    spent = bill(CLOCK, round_, [])
    assert spent.verify_ms == costs.verify_ms(2, 8)
    assert spent.draft_ms == 3 * costs.draft_ms(2) + costs.proposal_ms(2) > 3 * costs.draft_ms(2)
    table = bill(SimulatedClock(TABLE), round_, [])
    assert table.verify_ms == TABLE.verify_ms(2, 6) and table.draft_ms == 3 * TABLE.draft_ms(2)


def test_each_draft_is_billed_as_a_forward_of_a_draft_model() -> None:
    """Four drafts for each of two rows are billed as four forwards, copies as none, and trees as one per level."""
    fed = Forward([9, 5], [5, 5])
    rows = [row(0, 4, 1), row(1, 4, 1)]
    chains = Round("verify", 4, rows, draft_forwards=1, draft_tokens=8, fed=fed)
    costs = CLOCK.costs(7)
    assert bill(CLOCK, chains, []).draft_ms == 4 * costs.draft_ms(2) + costs.proposal_ms(2)
    assert bill(CLOCK, Round("verify", 4, rows, fed=fed), []).draft_ms == 0
    trees = [row(0, 4, 1, parents=[-1, -1, 0, 0]), row(1, 4, 1, parents=[-1, -1, 0, 1])]
    branching = Round("verify", 2, trees, draft_forwards=2, draft_tokens=8, fed=fed)
    assert bill(CLOCK, branching, []).draft_ms == 2 * costs.draft_ms(2) + costs.proposal_ms(2)
    assert bill(SimulatedClock(TABLE), branching, []).draft_ms == 2 * TABLE.draft_ms(2)


def test_rounds_without_recorded_forwards_are_billed_by_their_rows() -> None:
    sequences = [Sequence(i, i, [1] * (4 + i), 9, frozenset()) for i in range(2)]
    for sequence in sequences:
        sequence.write([7], ["sampled"])
    first = Round("prefill", rows=[row(0, 0, 1), row(1, 0, 1)])
    assert bill(CLOCK, first, sequences).verify_ms == CLOCK.costs(0).verify_ms(2, 10)
    assert bill(CLOCK, Round("prefill"), sequences).verify_ms == 0
    for sequence in sequences:
        sequence.write([7, 7], ["accepted", "bonus"])
    round_ = Round("verify", 2, [row(0, 2, 2), row(1, 1, 2)])
    spent, costs = bill(CLOCK, round_, sequences), CLOCK.costs(4.5)
    assert spent == (2 * costs.draft_ms(2) + costs.proposal_ms(2), costs.verify_ms(2, 6))


def test_a_window_is_billed_only_for_the_tokens_that_it_reads() -> None:
    work = WindowWork()
    for _ in range(3):
        work.add(tokens=2, read=600, width=1)
    fed = Forward([9000, 7000], [4, 4])
    round_ = Round(
        "verify", 3, [row(0, 3, 1), row(1, 3, 1)], draft_forwards=3, draft_tokens=6, windowed=work, fed=fed
    )
    costs = CLOCK.costs(8000)
    short = CLOCK.costs(300)
    assert isinstance(short, Roofline)
    window_ms = 3 * short.step_ms(short.target, 2, 2, 1) + costs.proposal_ms(2)
    assert bill(CLOCK, round_, [], runs_draft=False).draft_ms == pytest.approx(window_ms)
    assert bill(SimulatedClock(TABLE), round_, [], runs_draft=False).draft_ms == 3 * TABLE.draft_ms(2)
    round_.draft_forwards = 2  # forwards of the pair's draft, besides the target's three windowed ones
    assert bill(CLOCK, round_, []).draft_ms == pytest.approx(window_ms + 2 * costs.draft_ms(2))


def test_a_prefill_of_the_draft_is_billed_as_draft_time() -> None:
    chunk = Round("prefill", fed=Forward([0, 0, 0], [5, 3, 1], draft=True))
    spent, costs = bill(CLOCK, chunk, []), CLOCK.costs(0)
    assert isinstance(costs, Roofline)
    assert spent.verify_ms == 0 and spent.draft_ms == costs.draft_feed_ms(3, 15) > costs.draft_ms(3)
    assert bill(SimulatedClock(TABLE), chunk, []).draft_ms == TABLE.verify_ms(3, 9) * 2 / 12


DRAFTERS = ("model", "head", "adaptive", "prompt_lookup", "window", "window_model")


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_rounds_record_what_their_forwards_were_fed(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare each round's `fed` with the forwards that reach a ModelRunner.

    In a decoding round, one of these forwards is the target's. The round counts the others as draft or windowed
    forwards.
    """
    if drafter.startswith("window"):
        small_window(monkeypatch)
    pair = tiny_pair("head", target=TARGET) if drafter == "head" else PAIR
    rows = [row * 3 for row in ROWS]
    seen: list[tuple[Any, list[int], list[int]]] = []
    forward = ModelRunner.forward

    def recording(self: ModelRunner, batch: Any) -> Any:
        width = batch.tokens.shape[1]
        counts = [width] * len(batch.lengths) if batch.counts is None else list(batch.counts)
        seen.append((self.model, list(batch.lengths), counts))
        return forward(self, batch)

    monkeypatch.setattr(ModelRunner, "forward", recording)
    name = "model" if drafter == "head" else drafter
    options: dict[str, Any] = {"tree": (2, 1)} if drafter == "adaptive" else {"draft_length": 3}
    rounds = stream(pair, rows, drafter=name, **options, sampling=SamplingParams(1.0), clock=CLOCK, **REQUEST)
    drafted = 0
    for round_ in rounds:
        model = pair.draft_step if round_.fed is not None and round_.fed.draft else pair.target_step
        assert round_.fed is not None
        if round_.fed.counts:
            assert (model, round_.fed.cached, round_.fed.counts) in seen
        if round_.kind != "prefill":
            window_forwards = 0 if round_.windowed is None or drafter == "window" else round_.windowed.forwards
            assert len(seen) - 1 == round_.draft_forwards + window_forwards
            drafted += round_.draft_forwards
        seen.clear()
    assert (drafted > 0) == (drafter != "prompt_lookup")
