"""A draft model and a draft head give the same logits in a tree as if each path were fed token by token.

The logits are compared in float32, up to rounding. A tree must not affect later proposals.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bass_core import SamplingParams, generate
from bass_core.draft import tree as trees
from bass_core.draft.chain import Level
from bass_core.draft.head.chain import HeadDrafter
from bass_core.draft.model import ModelDrafter
from bass_core.draft.registry import head_drafter
from bass_core.model.forward import ForwardBatch
from bass_core.model.runner import ModelRunner
from bass_core.sample.noise import NoiseKeys
from bass_core.sequence import Sequence
from tests.support.models import prompts, tiny, tiny_pair

TARGET = tiny("llama")
SAMPLED = SamplingParams(1.0)
# LEVELS[level][row] lists drafts as pairs: the token, and the index of its parent among the row's drafts (-1: the
# parent is the row's newest token). Parents are in the level before.
LEVELS: list[list[list[tuple[int, int]]]] = [
    [[(5, -1), (9, -1), (40, -1)], [(7, -1)], [(2, -1), (4, -1)]],
    [[(6, 0), (6, 2), (11, 0), (12, 2)], [(8, 0), (3, 0)], [(7, 1)]],
    [[(1, 4), (2, 3)], [(5, 2), (5, 1)], [(8, 2), (9, 2)]],
    [[(3, 7)], [], [(6, 4)]],
]


def make_drafter(kind: str, tree: tuple[int, ...] | None = None) -> tuple[Any, list[Sequence]]:
    """Return a drafter that has read the prompts of three rows, and the rows."""
    rows = [Sequence(i, i, prompt, 60, frozenset()) for i, prompt in enumerate(prompts(3))]
    pair = tiny_pair("head" if kind == "head" else "perturbed", target=TARGET)
    size = len(pair.draft.vocabulary) if kind == "head" else pair.vocab
    runner = ModelRunner(pair.draft_step, 3, 120, size, "pad")
    drafter: Any = (
        head_drafter(pair.draft, runner, pair.vocab, SAMPLED, tree=tree)
        if kind == "head"
        else ModelDrafter(runner, SAMPLED, tree=tree)
    )
    prefill = drafter.start(rows)
    while prefill is not None and not prefill.done:
        prefill.step()
    if kind == "head":
        torch.manual_seed(3)
        drafter.observe_states(rows, [torch.randn(len(row.tokens) - 1, 64) for row in rows])
    return drafter, rows


@pytest.mark.parametrize("kind", ["model", "head"])
def test_logits_in_a_tree_equal_those_after_the_path(kind: str) -> None:
    """Compare the logits with those of a fresh drafter that is fed each path as a chain."""
    drafter, rows = make_drafter(kind, tree=(1,))
    levels, firsts = drafter.levels(rows, [4] * 3), [-1] * 3
    roots = next(levels)[:, 0].clone()
    node_logits: list[dict[int, torch.Tensor]] = [{} for _ in rows]
    paths: list[list[list[int]]] = [[] for _ in rows]
    for drafts in LEVELS:
        width = max(map(len, drafts))
        tokens = torch.tensor([([token for token, _ in row] + [0] * width)[:width] for row in drafts])
        logits = levels.send(Level(tokens, [[parent for _, parent in row] for row in drafts], firsts))
        firsts = list(map(len, paths))
        for r, row in enumerate(drafts):
            for i, (token, parent) in enumerate(row):
                node_logits[r][len(paths[r])] = logits[r, i].clone()
                paths[r].append([*(paths[r][parent] if parent >= 0 else []), token])
    for r in range(3):
        for node, path in enumerate(paths[r]):
            fresh, fresh_rows = make_drafter(kind)
            expected = path_logits(fresh, fresh_rows, kind, r, path)
            torch.testing.assert_close(roots[r], expected[0], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(
                node_logits[r][node], expected[-1], atol=1e-4, rtol=1e-4, msg=f"row {r}, path {path}"
            )


def path_logits(drafter: Any, rows: list[Sequence], kind: str, r: int, path: list[int]) -> list[torch.Tensor]:
    """Return the logits [V'] of row r after its newest token and after each token of the path, fed one by one."""
    states = None
    if kind == "head":
        logits, states = drafter._catch_up(rows, [1] * 3)
        ends = list(drafter.runner.lengths)
    else:
        logits, ends = drafter._catch_up(rows, [True] * 3)
    logits_after = [logits[r].clone()]
    for step, token in enumerate(path):
        ids = torch.full((3, 1), token)
        inputs = ids if states is None else drafter.head.inputs(ids, states[:, None])
        fed = ForwardBatch(inputs, [end + step for end in ends], return_states=states is not None)
        out = drafter.runner.forward(fed)
        states = None if states is None else out.require_states()[:, 0].clone()
        logits_after.append(out.logits[r, 0].clone())
    return logits_after


@pytest.mark.parametrize("kind", ["model", "head"])
def test_a_tree_does_not_change_the_next_proposal(kind: str) -> None:
    keys = NoiseKeys(1, torch.arange(3), torch.tensor([len(prompt) for prompt in prompts(3)]))
    branching, rows = make_drafter(kind, tree=(3, 2, 1))
    tree = branching.propose(rows, [9] * 3, keys)
    assert branching.drafted == sum(tree.num_drafted) == 45 and branching.calls == 3
    branching.on_verified(rows, tree, [0, 0, 0])
    # The next proposal is a chain.
    branching.branches, branching.trees = False, None
    fresh, fresh_rows = make_drafter(kind)
    for drafter, sequences in ((branching, rows), (fresh, fresh_rows)):
        for row in sequences:
            row.write([4], ["sampled"])
        if kind == "head":
            drafter.observe_states(sequences, [torch.ones(1, 64)] * 3)
    after, expected = (
        drafter.propose(sequences, [4] * 3, keys)
        for drafter, sequences in ((branching, rows), (fresh, fresh_rows))
    )
    assert torch.equal(after.tokens, expected.tokens)
    torch.testing.assert_close(after.probs, expected.probs, atol=1e-4, rtol=1e-4)


def test_a_head_gets_the_states_of_the_accepted_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare all observed states of a row with one forward over its text."""
    pair = tiny_pair("head", target=TARGET)
    observed: dict[int, list[torch.Tensor]] = {}
    observe = HeadDrafter.observe_states

    def recording(self: HeadDrafter, rows: list[Sequence], states: list[torch.Tensor]) -> None:
        for row, new in zip(rows, states, strict=True):
            # Drop the states of the lane's warm-up, which uses the same rows.
            observed[row.index] = [*(observed[row.index] if row.token_ids else []), new.clone()]
        observe(self, rows, states)

    monkeypatch.setattr(HeadDrafter, "observe_states", recording)
    out = generate(pair, prompts(3), tree=(4, 3), drafter="model", max_new_tokens=40, eos_token_id=None)
    assert out.metrics.accepted > 5 and out.metrics.drafted > 3 * out.metrics.accepted
    for row, (prompt, sequence) in enumerate(zip(prompts(3), out.sequences, strict=True)):
        states = torch.cat(observed[row])
        text = torch.tensor([[*prompt, *sequence.token_ids][: len(states)]])
        fed = ForwardBatch(text, [0], return_states=True)
        whole = pair.target_step.forward(fed, pair.target_step.new_cache(1, 120)).require_states()[0]
        assert len(states) > len(prompt) + 30
        torch.testing.assert_close(states[: len(whole)], whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("in_torch", [False, True])
def test_removing_siblings_leaves_a_q_with_nan_as_it_is(in_torch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if in_torch:
        monkeypatch.setattr(trees, "compiled", lambda q: False)
    q = torch.tensor([[0.5, 0.25, 0.25], [0.5, torch.nan, 0.5], [1.0, 0.0, 0.0]])
    rest, _ = trees._without_siblings(q, torch.zeros(3, 1, dtype=torch.long))
    wanted = torch.tensor([[0.0, 0.5, 0.5], [0.5, torch.nan, 0.5], [1.0, 0.0, 0.0]])
    torch.testing.assert_close(rest, wanted, rtol=0, atol=0, equal_nan=True)
