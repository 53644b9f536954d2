"""Simulated trees: the real growth and planner behind drawn chances, checked by values that are known otherwise.

Contract: nothing here reads a clock.
"""

from __future__ import annotations

import itertools
from argparse import Namespace

import numpy as np
import pytest

from bass_core.budget.cost_table import CostTable
from bass_core.budget.planner import Planner
from bass_core.budget.trees import FixedNodes
from bass_core.prediction.hardware import Assumptions
from bass_core.prediction.rounds import timed
from bench.simulation.closed_form import tokens_per_round
from bench.simulation.trees import sweep
from bench.simulation.trees.rounds import SHARE, Chances, PlayedTrees, SimulatedDraft, play_trees, tree_rounds

FREE = CostTable({1: [(1.0, 10.0), (64.0, 10.0)]}, {1: 0.1}, padded=False)
DEAR = CostTable({1: [(1.0, 10.0), (2.0, 40.0)], 4: [(4.0, 10.0), (5.0, 40.0)]}, {1: 5.0, 4: 5.0}, padded=False)


def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def played(grower, chances, rows, count):
    return list(itertools.islice(tree_rounds(grower, chances, rows, None, rng()), count))


def test_chances_are_ranked_shared_and_of_the_mean():
    found = Chances((0.8, 0.5)).draw(rng(), np.repeat([0, 1, 7], 10_000))
    assert found.sum(1) == pytest.approx(1.0) and (np.diff(found, axis=1) <= 1e-12).all()
    assert found[:, 1] == pytest.approx(SHARE * (1 - found[:, 0]), rel=1e-3)
    means = found.reshape(3, 10_000, -1)[..., 0].mean(1)
    assert means == pytest.approx([0.8, 0.5, 0.5], abs=0.015)


def test_a_draft_and_a_chain_are_accepted_at_their_rate():
    """One draft: 1 + a. A draft of which each next one is all that is left: Leviathan's formula."""
    one = played(FixedNodes(1), Chances((0.6,)), 1, 1000)
    assert 1 + np.mean([sum(x.accepted) for x in one]) == pytest.approx(1.6, abs=0.06)
    sure = Chances((0.999,), share=1e-9)
    chain = played(FixedNodes(6), sure, 1, 150)
    assert np.mean([x.asked for x in chain]) == pytest.approx(6)
    assert 1 + np.mean([sum(x.accepted) for x in chain]) == pytest.approx(tokens_per_round(0.999, 6), abs=0.05)


def test_the_path_follows_the_drawn_ranks():
    draft = SimulatedDraft(Chances((0.8,)), rng())
    certain = np.eye(24)
    draft.chances = {(0, ()): certain[1], (0, (1,)): certain[0], (0, (1, 0)): certain[2]}
    # Behind draft 3 stands another rank than the one drawn.
    tokens, parents = [0, 1, 1, 0, 1], [-1, -1, 1, 1, 3]
    assert draft.accepted(rng(), 0, tokens, parents) == [1, 3]


def test_best_first_trees_write_more_than_a_chain_and_use_second_candidates():
    tree = played(FixedNodes(8), Chances((0.6,)), 1, 400)
    assert 1 + np.mean([sum(x.accepted) for x in tree]) > tokens_per_round(0.6, 8)
    assert 0.1 < sum(x.seconds for x in tree) / sum(sum(x.drafted) for x in tree) < 0.7


def test_rounds_end_with_their_rows_and_repeat():
    runs = play_trees(Planner(FREE, 3), Chances((0.8,)), 3, 20, seed=1, trials=2)
    assert runs == play_trees(Planner(FREE, 3), Chances((0.8,)), 3, 20, seed=1, trials=2)
    for run in runs:
        assert sum(sum(x.accepted) + len(x.rows) for x in run) == 3 * 19
        assert all(count >= stood for x in run for count, stood in zip(x.drafted, x.accepted, strict=True))
    assert timed(FREE, runs, 20).rounds < 19


def test_the_planner_decides():
    """Free places are used; where a draft costs three steps, nothing is drafted but the trials."""
    free = played(Planner(FREE, 1), Chances((0.8,)), 1, 60)
    dear = played(Planner(DEAR, 4), Chances((0.8,)), 4, 60)
    assert np.mean([sum(x.drafted) for x in free]) > 20
    assert np.mean([sum(x.drafted) == 0 for x in dear]) > 0.9


def test_the_time_of_a_round():
    one = PlayedTrees(2, [0, 1], [3, 1], [1, 0], levels=2)
    costs = CostTable({2: [(2.0, 2.0), (20.0, 20.0)]}, {2: 0.5}, padded=False)
    assert one.ms(costs) == pytest.approx(6 + 1.0)
    padded = CostTable(costs.verify, costs.draft, padded=True)
    assert one.ms(padded) == pytest.approx(8 + 1.0)


def test_where_it_turns():
    rows = [
        {
            "hardware": "X", "batch": batch, "regular tokens/s": 100.0,
            "Algorithm 1 tokens/s": bass, "budget / regular": own / 100, "budget / Algorithm 1": own / bass,
            "budget / cost-aware": 1.0, "other candidates": other, "drafts a row-round": drafts,
        }
        for batch, bass, own, other, drafts in ((1, 200.0, 300.0, 0.3, 9.0), (4, 50.0, 100.0, 0.0, 2.0))
    ]  # fmt: skip
    made = sweep.turns(rows)[0]
    assert 1 < made["Algorithm 1 below regular"] < 4 and 1 < made["trees become chains"] < 4
    assert made["budget below regular"] is made["budget below Algorithm 1"] is made["drafting ends"] is None


def test_the_quick_sweep():
    arguments = Namespace(context=512, acceptance=0.8, seed=0, quick=True)
    rows, claims = sweep.run(arguments, Assumptions())
    assert {row["section"] for row in rows} == {"tree acceptance", "trees", "trees turn"}
    one = next(row for row in rows if row["section"] == "trees" and row["batch"] == 1)
    assert one["budget tokens/s"] > one["Algorithm 1 tokens/s"] > one["regular tokens/s"]
    assert max(abs(row["off"]) for row in rows if row["section"] == "tree acceptance") < 0.35
    assert len(claims) == 2 and all(claim["holds"] is None for claim in claims)
