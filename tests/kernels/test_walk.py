"""The walk kernel gives the paths, tokens and tests of the sampled walk in bass_core/verify/tree.py."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from bass_core.draft.tree import TreePlanner
from bass_core.draft.tree_graph import full_tree, grow, proposal_of
from bass_core.model.static_step import RoundInputs
from bass_core.sample.distribution import probabilities
from bass_core.sample.draw import draw
from bass_core.sample.noise import NoiseKeys, Role, place_node
from bass_core.sample.params import SamplingParams
from bass_core.verify.acceptance import UNSOUND, RowOutcome
from bass_core.verify.rules import VERIFICATIONS
from bass_core.verify.tree import verify_tree
from bass_core.verify.tree_judge import TreeJudge
from bass_core.verify.tree_shape import JudgedTree
from bass_core.verify.tree_triton import outcomes_of, walk_on_device
from kernels.triton.walk import walk_trees
from tests.support.models import slow_but

SEED = 0x1234_5678_9ABC_DEF1
REJECTION = VERIFICATIONS["rejection"]
SOFT = SamplingParams(temperature=1.0)


def walked(logits: Tensor, tree: JudgedTree, keys: NoiseKeys, params: SamplingParams) -> list[RowOutcome]:
    """Return the kernel's result as the reference's type."""
    return outcomes_of(walk_on_device(logits, tree, keys, params), tree)


def compare(ours: list[RowOutcome], theirs: list[RowOutcome]) -> None:
    """Check that two verifications are equal."""
    for mine, reference in zip(ours, theirs, strict=True):
        assert (mine.path, mine.next_token) == (reference.path, reference.next_token)
        assert math.isnan(reference.next_p) or mine.next_p == reference.next_p
        # Compare the tests as strings, because NaN does not equal NaN.
        assert list(map(str, mine.tests)) == list(map(str, reference.tests))


def random_trees(
    logits: Tensor, keys: NoiseKeys, dice: random.Random, near: float, sampled: bool, size: int | None = None
) -> JudgedTree:
    """Return random trees of likely and random tokens; most nodes have one child that was drawn from q.

    q differs from p by noise of size `near`. If it is 0, q equals p, so p - q is zero after a rejection.
    """
    batch, columns, vocab = logits.shape
    p = probabilities(logits, SOFT)
    tokens, parents, drawn, rows = [], [], [], []
    for r in range(batch):
        count = dice.randrange(columns) if size is None else size
        row_tokens: list[int] = []
        row_parents: list[int] = []
        row_drawn: list[int] = []
        while len(row_tokens) < count:
            node = dice.randrange(-1, len(row_tokens))
            siblings = [token for token, parent in zip(row_tokens, row_parents, strict=True) if parent == node]
            has_drawn = any(
                place >= 0 for place, parent in zip(row_drawn, row_parents, strict=True) if parent == node
            )
            row_parents.append(node)
            if has_drawn or not sampled or dice.random() < 0.4:
                # Siblings after a drawn child are random tokens.
                likely = p[r, node + 1].topk(min(3, vocab)).indices.tolist() if not has_drawn else []
                row_tokens.append(dice.choice([*likely, dice.randrange(vocab)]))
                row_drawn.append(-1)
                continue
            noise = torch.randn(vocab, generator=torch.Generator().manual_seed(dice.randrange(1 << 30)))
            q = probabilities(logits[r, node + 1] + near * noise, SOFT)
            q = q if near == 0 else q.index_fill(0, torch.tensor(siblings, dtype=torch.long), 0.0)
            q = q / q.sum() if near else q
            at = place_node(keys.positions[r], torch.tensor(node + 1))
            token = draw(
                q[None], keys.seed, keys.sequence_ids[r : r + 1], at[None], keys.stream(Role.DRAFT)[r : r + 1]
            )
            row_tokens.append(int(token))
            row_drawn.append(len(rows))
            rows.append(q)
        tokens.append(row_tokens)
        parents.append(row_parents)
        drawn.append(row_drawn)
    return JudgedTree(tokens, parents, drawn if rows else None, torch.stack(rows) if rows else None)


def some_keys(batch: int, epochs: bool = False) -> NoiseKeys:
    at = torch.arange(batch) * 7 + 9
    return NoiseKeys(SEED, torch.arange(batch) * 2**33 + 5, at, at - 4 if epochs else None)


@pytest.mark.parametrize(
    ("sampled", "near", "batch", "drafts", "vocab"),
    slow_but(
        [(True, 2.0, 8, 5, 9)],
        [
            (True, 2.0, 8, 5, 9),
            (True, 0.0, 8, 5, 9),
            (True, 0.3, 4, 16, 300),
            (False, 0.3, 4, 16, 300),
            (True, 2.0, 1, 62, 2500),
        ],
    ),
)
def test_decisions_equal_the_reference(sampled: bool, near: float, batch: int, drafts: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(batch, drafts + 1, vocab, generator=generator) * 2
    keys = some_keys(batch, epochs=vocab == 300)
    tree = random_trees(logits, keys, random.Random(batch), near, sampled)
    theirs = verify_tree(logits, tree, keys, SOFT, REJECTION)
    compare(walked(logits, tree, keys, SOFT), theirs)


@pytest.mark.parametrize("children", [(3, 2), (1, 2, 1)])
def test_a_captured_judge_of_full_trees_decides_like_the_reference(children: tuple[int, ...]) -> None:
    """Some rows draft less deep than others, and have other tokens in place of the rest of their trees."""
    vocab, depths = 9, [len(children), 1, 0] * 6
    trees = TreePlanner(children, SOFT, Role.DRAFT, vocab)
    shape = full_tree(trees, len(children), vocab)
    rows, drafts, keys = len(depths), shape.firsts[-1], some_keys(len(depths))
    torch.manual_seed(3)
    logits = torch.randn(rows, 1 + drafts, vocab) * 2
    # The draft's logits are near the target's: those of the newest token, and then those of each level's drafts.
    near, firsts = logits + 0.5 * torch.randn(logits.shape), [0, *(first + 1 for first in shape.firsts)]
    levels: Any = (near[:, first:end] for first, end in pairwise(firsts))
    probs = torch.zeros(rows, shape.fed + 1, vocab)
    tokens, _ = grow(trees, shape, levels, None, keys, probs)
    proposal = proposal_of(shape, tokens, probs, depths)
    tree = JudgedTree.of(proposal.tokens, proposal.parents, proposal.drawn, probs.flatten(0, 1))
    theirs = verify_tree(logits[:, : 1 + proposal.width], tree, keys, SOFT, REJECTION)
    judge = TreeJudge(SOFT, REJECTION, None, shape)
    fed = torch.cat((torch.zeros(rows, 1, dtype=torch.long), tokens), dim=1)
    seeds = torch.full((rows,), SEED)
    counts = torch.tensor(proposal.num_drafted)
    inputs = RoundInputs(counts=counts, ids=keys.sequence_ids, positions=keys.positions, seeds=seeds)
    judged = judge.run(logits, fed, inputs, probs, None, judge.constants(logits.device))
    compare(judge.outcomes(judged.packed, replace(proposal, tokens=tokens)), theirs)
    assert len({outcome.accepted for outcome in theirs}) > 2


@pytest.mark.slow
@pytest.mark.parametrize("sound", [True, False])
def test_every_outcome_occurs_and_a_drawn_child_without_a_valid_q_is_skipped(sound: bool) -> None:
    """Drawn drafts are accepted and rejected, and walks continue at other children, each several times.

    If `sound` is false, a third of the q's contain NaN, and a third are 0 at the draft. Drafts with q = 0 are
    tested like others.
    """
    logits = torch.randn(60, 9, 6, generator=torch.Generator().manual_seed(0)) * 2
    keys = some_keys(60)
    tree = random_trees(logits, keys, random.Random(0), 2.0, True, size=8)
    assert tree.drawn is not None and tree.probs is not None
    if not sound:
        tree.probs[::3, 0] = torch.nan
        for tokens, places in zip(tree.tokens, tree.drawn, strict=True):
            for token, place in zip(tokens, places, strict=True):
                if place >= 0 and place % 3 == 1:
                    tree.probs[place, token] = 0.0
    theirs = verify_tree(logits, tree, keys, SOFT, REJECTION)
    compare(walked(logits, tree, keys, SOFT), theirs)
    tests = [
        (place, draft in set(outcome.path or []), test)
        for places, outcome in zip(tree.drawn, theirs, strict=True)
        for draft, (place, test) in enumerate(zip(places, outcome.tests, strict=True))
    ]
    if sound:
        accepted = sum(place >= 0 and on_path for place, on_path, _ in tests)
        rejected = sum(place >= 0 and not on_path and not math.isnan(test.u) for place, on_path, test in tests)
        elsewhere = sum(place < 0 and on_path for place, on_path, _ in tests)
        assert min(accepted, rejected, elsewhere) > 5, (accepted, rejected, elsewhere)
    else:
        assert all(math.isnan(test.u) for place, _, test in tests if place >= 0 and place % 3 == 0)
        assert any(test.q == 0 and test.chance == 1 for place, _, test in tests if place >= 0)


def test_filters_are_applied_before_the_walk() -> None:
    params = SamplingParams(0.7, top_k=9, top_p=0.9)
    logits = torch.randn(6, 7, 40, generator=torch.Generator().manual_seed(2)) * 2
    keys = some_keys(6)
    tree = random_trees(logits, keys, random.Random(3), 1.0, True)
    compare(walked(logits, tree, keys, params), verify_tree(logits, tree, keys, params, REJECTION))


def test_empty_trees_rows_without_drafts_and_equal_children() -> None:
    logits, keys = torch.randn(3, 1, 30, generator=torch.Generator().manual_seed(4)), some_keys(3)
    empty = JudgedTree([[], [], []], [[], [], []])
    compare(walked(logits, empty, keys, SOFT), verify_tree(logits, empty, keys, SOFT, REJECTION))
    wider = torch.cat((logits, logits.flip(2)), 1)
    single = JudgedTree([[], [4], []], [[], [-1], []])
    compare(walked(wider, single, keys, SOFT), verify_tree(wider, single, keys, SOFT, REJECTION))
    logits = torch.full((20, 4, 8), -9.0)
    logits[:, :, 5] = 9.0
    tree = JudgedTree([[5, 5, 2]] * 20, [[-1, -1, 1]] * 20)
    theirs = verify_tree(logits, tree, some_keys(20), SOFT, REJECTION)
    assert theirs[0].path == [0] and math.isnan(theirs[0].tests[1].p), "they count once"
    compare(walked(logits, tree, some_keys(20), SOFT), theirs)


def test_nan_logits_are_marked_unsound() -> None:
    logits = torch.randn(3, 3, 20, generator=torch.Generator().manual_seed(5))
    logits[1] = torch.nan
    keys = some_keys(3)
    sound = torch.randn(3, 3, 20, generator=torch.Generator().manual_seed(6))
    tree = random_trees(sound, keys, random.Random(1), 1.0, True, size=2)
    ours, theirs = walked(logits, tree, keys, SOFT), verify_tree(logits, tree, keys, SOFT, REJECTION)
    assert ours[1].next_token == theirs[1].next_token == UNSOUND
    compare([ours[0], ours[2]], [theirs[0], theirs[2]])


def test_mismatched_arguments_are_refused() -> None:
    keys, p = some_keys(2), torch.rand(2, 3, 8)
    drafts = torch.zeros(2, 2, dtype=torch.long)
    rest = (drafts, drafts - 1, keys.sequence_ids, keys.positions, keys.begins, torch.tensor([1]))
    with pytest.raises(ValueError, match="does not fit 2 rows of 2"):
        walk_trees(p[:, :2], None, drafts, *rest)
    with pytest.raises(ValueError, match="fit p"):
        walk_trees(p, torch.rand(1, 9), drafts, *rest)
    with pytest.raises(ValueError, match="fit the drafts"):
        walk_trees(p, None, drafts, drafts[:1], *rest[1:])
    with pytest.raises(ValueError, match="of 0 distributions"):
        walk_on_device(p, JudgedTree([[1, 2]] * 2, [[-1, 0]] * 2, [[-1, 0]] * 2), keys, SOFT)
