"""Rounds on paper equal the decoder's, and their times follow from a table.

Contract: nothing here reads a clock.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from bass_core import ModelPair, stream
from bass_core.length.cost_aware import CostAware
from bass_core.length.costs import CostTable
from bass_core.length.options import make_policy
from bass_core.predict.rounds import Acceptance, predict, rounds
from tests.models import perturbed, tiny

TABLE = CostTable({1: [(1.0, 10.0), (9.0, 18.0)], 4: [(4.0, 12.0), (36.0, 60.0)]}, {1: 1.0, 4: 2.0}, padded=False)


# Drafting pays here whatever the draft has to read, of which the rounds on paper know nothing.
CHEAP = CostTable({1: [(1.0, 10.0), (9.0, 10.5)], 4: [(4.0, 12.0), (36.0, 13.0)]}, {1: 0.1, 4: 0.1}, padded=False)


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    target = tiny("llama")
    return ModelPair(target, perturbed(target, 0.05))


class Replay:
    """An acceptance model that replays recorded counts of accepted drafts for each row."""

    def __init__(self, counts):
        self.counts = {row: deque(mine) for row, mine in counts.items()}

    def draw(self, rng, rows, drafted):
        return [self.counts[row].popleft() for row in rows]


@pytest.mark.parametrize("policy", ["bass", 3, CostAware(CHEAP, timed=False)])
def test_rounds_are_those_of_the_decoder(pair, policy):
    """Given the decoder's accepted counts, the simulator asks for the same draft lengths and drafts as much."""
    prompts = [[1, 2, 3], [7, 5], [11, 3, 9, 4], [2]]
    asked = dict(draft_length=policy, drafter="model", max_new_tokens=24, eos_token_id=None)
    real = [one for one in stream(pair, prompts, **asked) if one.kind != "prefill"]
    counts = {row: [r.accepted for one in real for r in one.rows if r.sequence == row] for row in range(4)}
    played = list(rounds(make_policy(policy), Replay(counts), 4, 23, np.random.default_rng(0)))
    assert [one.draft_length for one in real] == [one.asked for one in played]
    assert [{r.sequence: len(r.drafted) for r in one.rows} for one in real] == [
        dict(zip(one.rows, one.drafted, strict=True)) for one in played
    ]
    assert len({tuple(mine) for mine in counts.values()}) > 1


def test_a_prediction_of_plain_steps_and_of_a_perfect_draft():
    plain = predict(TABLE, make_policy(0), Acceptance.same(0.5), 4, 11, trials=1)
    assert plain.ptl_first_ms == plain.ptl_all_ms == plain.ptl_last_ms == pytest.approx(12.0)
    assert plain.ms_per_token == pytest.approx(12.0)
    assert plain.throughput_tps == pytest.approx(1000 * 4 * 11 / (12.0 * 10))
    perfect = predict(TABLE, make_policy(4), Acceptance.same(1.0), 1, 11, trials=1)
    assert perfect.rounds == 2 and perfect.mean_acceptance_length == 5
    assert perfect.ptl_all_ms == pytest.approx(2 * (14.0 + 4 * 1.0) / 10)


def test_rows_that_end_early_have_a_lower_latency():
    rates = Acceptance(np.array([[0.95], [0.2]]))
    made = predict(TABLE, make_policy(4), rates, 2, 40)
    assert made.ptl_first_ms < made.ptl_all_ms < made.ptl_last_ms
    assert made == predict(TABLE, make_policy(4), rates, 2, 40)
