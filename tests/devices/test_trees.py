"""Trees of drafts on the emulated device: captured steps of trees read nothing, and nothing waits but the verdict.

Contract: a replay's logits are within float32 rounding of an eager step's; a round's one wait is the copy of what
was verified.
"""

from __future__ import annotations

import random

import pytest
import torch

from bass_core.model.forward import ForwardBatch, verified_tree
from bass_core.model.graphs import GraphRunner
from bass_core.sample.noise import NoiseKeys
from bass_core.sample.params import SamplingParams
from bass_core.verify.rules import VERIFICATIONS
from bass_core.verify.tree import DraftTree, verify_tree

from .emulation import emulated, ledger
from .emulation.models import pair
from .test_graphs import BACKENDS, record

EMUL = torch.device(emulated.TYPE, 0)


def some_parents(dice: random.Random, count: int) -> list[list[int]]:
    """Three rows of trees: each draft follows an earlier one or the newest token."""
    return [[dice.randrange(-1, draft) for draft in range(count - row)] for row in range(3)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_captured_step_of_trees_reads_nothing(backend: str) -> None:
    """A chain and a tree of one width are two captures; the next tree replays the first one's."""
    model, dice = pair("llama", "none").target_step, random.Random(1)
    runner = GraphRunner(model, 4, 64, model.vocab, backend, record=record)
    eager, lengths = model.new_cache(4, 64), [0, 0, 0]
    for is_tree in (False, True, True, False, True):
        ids = torch.arange(15).view(3, 5) % 90 + 1
        tree = verified_tree(some_parents(dice, 4)) if is_tree else None
        batch = ForwardBatch(ids.to(EMUL), lengths, tree=tree)
        before, uploads = ledger.reads.total(), ledger.uploads["captured"]
        mine = runner.forward(batch).logits
        assert ledger.reads.total() == before and ledger.uploads["captured"] == uploads and not ledger.races
        theirs = model.forward(batch, eager, backend).logits
        torch.testing.assert_close(mine.cpu(), theirs.cpu(), atol=1e-4, rtol=1e-4)
        lengths = [length + 1 + row for row, length in enumerate(lengths)]
    assert sorted((*key[:2], key[-1]) for key in runner.slot.steps) == [(4, 5, False), (4, 5, True)]


def test_an_accepted_path_is_moved_without_a_wait() -> None:
    """In one read and one write for all layers; what lies behind the path stays."""
    model = pair("llama", "none").target_step
    cache = model.new_cache(2, 16)
    cache.buffer.copy_(torch.randn(cache.buffer.shape, generator=torch.Generator().manual_seed(0)))
    before = cache.buffer.cpu().clone()
    ledger.clear()
    cache.keep(1, 5, [5, 7, 11])
    assert not ledger.reads and not ledger.waits.total() and not ledger.uploads["blocking"]
    expected = before.clone()
    expected[:, :, 1, :, 5:8] = before[:, :, 1, :, [5, 7, 11]]
    assert torch.equal(cache.buffer.cpu(), expected)


@pytest.mark.parametrize(("temperature", "verification"), [(0.0, "rejection"), (0.8, "coupled")])
def test_a_walk_to_the_target_s_choices_copies_once(temperature: float, verification: str) -> None:
    parents = some_parents(random.Random(2), 6)
    tokens = [[(7 * draft) % 30 for draft in range(len(row))] for row in parents]
    logits = torch.randn(3, 7, 30, generator=torch.Generator().manual_seed(1)).to(EMUL)
    keys = NoiseKeys(3, torch.arange(3), torch.arange(3) + 4)
    params = SamplingParams(temperature)
    here = NoiseKeys(3, keys.sequence_ids.to(EMUL), keys.positions.to(EMUL))
    ledger.clear()
    mine = verify_tree(logits, DraftTree(tokens, parents), here, params, VERIFICATIONS[verification])
    assert ledger.reads.total() <= 1 and not ledger.uploads["blocking"]
    theirs = verify_tree(logits.cpu(), DraftTree(tokens, parents), keys, params, VERIFICATIONS[verification])
    assert [(one.path, one.next_token) for one in mine] == [(one.path, one.next_token) for one in theirs]
