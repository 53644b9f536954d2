"""Trees of tokens in the GPU's forward and in captured steps, on a CPU with Triton interpreted.

The logits after each token of a tree are those after its path as text. A replayed step equals an eager one,
whatever trees and chains ran before it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from bass_core.model import graphs as graphs
from bass_core.model.base import CausalModel
from bass_core.model.forward import ForwardBatch
from bass_core.model.graphs import GraphRunner, record_calls
from bass_core.model.llama_cuda import LlamaCuda
from bass_core.model.prefix import SharedPrompts
from bass_core.model.runner import ModelRunner
from bass_core.model.static_step import Padded, RoundInputs, pad_tree
from kernels.plan import MAX_TREE_TOKENS
from tests.support.models import tiny
from tests.support.trees import batch_tree, path

from .test_llama_cuda import no_idle_caches  # noqa: F401

KINDS = [(CausalModel, "pad"), (CausalModel, "sdpa"), (LlamaCuda, "pad")]
TEXT = 6


def make_model(kind: type[CausalModel], backend: str, architecture: str = "llama") -> CausalModel:
    model = kind(tiny(architecture))
    if kind is LlamaCuda:
        model.has_kernels = backend == "fused"
    return model


def grow(rng: random.Random, parents: list[list[int]], width: int) -> list[list[int]]:
    """Add `width` tokens to each row's tree; parents[b][i] is the token that token i follows, or -1."""
    return [[*row, *(rng.randrange(-1, len(row) + i) for i in range(width))] for row in parents]


@pytest.mark.parametrize(
    ("kind", "backend", "architecture"),
    [
        *((*kind, "llama") for kind in KINDS),
        (CausalModel, "pad", "qwen3"),
        (LlamaCuda, "pad", "qwen3"),
        pytest.param(LlamaCuda, "fused", "llama", marks=pytest.mark.slow),
    ],
)
def test_the_logits_of_a_tree_are_those_of_its_paths(
    kind: type[CausalModel], backend: str, architecture: str
) -> None:
    """Two rows of different lengths, whose trees grow over two steps."""
    model, plain = make_model(kind, backend, architecture), CausalModel(tiny(architecture))
    cache, rng = model.new_cache(2, 32), random.Random(5)
    ids = torch.randint(1, 90, (2, TEXT + 9), generator=torch.Generator().manual_seed(2))
    model.forward(ForwardBatch(ids[:, :TEXT], [0, 0]), cache, backend)
    bases, num_fed = [TEXT, TEXT - 2], 0
    parents: list[list[int]] = [[], []]
    for width in (4, 5):
        parents = grow(rng, parents, width)
        tree, lengths = batch_tree(parents, [num_fed] * 2), [base + num_fed for base in bases]
        fed = ids[:, TEXT + num_fed : TEXT + num_fed + width]
        logits = model.forward(ForwardBatch(fed, lengths, tree=tree), cache, backend).logits
        for row, base in enumerate(bases):
            for s in range(width):
                nodes = [TEXT + node for node in path(parents[row], num_fed + s)]
                text = torch.cat((ids[row, :base], ids[row, nodes]))[None]
                expected = plain.forward(ForwardBatch(text, [0]), plain.new_cache(1, 32)).logits[0, -1]
                torch.testing.assert_close(logits[row, s], expected, atol=2e-3, rtol=1e-4)
        num_fed += width


def steps(rng: random.Random) -> Iterator[tuple[int, int, list[int], bool]]:
    """Yield for each step: rows, tokens per row, how many tree tokens each row had before, whether it's a tree."""
    # The number of rows never grows, because padding rows overwrite the cache rows after those of the batch.
    for batch, width, tree in (
        (4, 4, True),
        (4, 4, False),
        (3, 4, True),
        (3, 4, True),
        (3, 11, True),
        (1, 1, True),
    ):
        yield batch, width, [rng.randrange(0, 9) if tree else 0 for _ in range(batch)], tree


@pytest.mark.parametrize(
    ("kind", "backend", "prefixes"),
    [
        *((*kind, True) for kind in KINDS),
        (CausalModel, "pad", False),
        pytest.param(LlamaCuda, "fused", True, marks=pytest.mark.slow),
    ],
)
def test_a_replay_of_trees_equals_the_eager_step(kind: type[CausalModel], backend: str, prefixes: bool) -> None:
    """Different trees of one shape share a capture; chains of that shape have a separate one."""
    model, rng = make_model(kind, backend), random.Random(1)
    # Switch off the kernels for products and rotation, because a replay and an eager step call the same ones.
    model.has_kernels = False
    shared = SharedPrompts((tuple(range(1, 33)),)) if prefixes else SharedPrompts(())
    runner = GraphRunner(model, 4, 64, model.vocab, backend, record=record_calls, shared=shared)
    eager = ModelRunner(model, 4, 64, model.vocab, backend, shared=shared)
    for each in (runner, eager):
        if prefixes:
            model.forward(ForwardBatch(torch.arange(1, 33)[None], [0]), each.cache.prefix, backend)
            each.cache.attach(1, 0, 16)
            each.cache.attach(2, 0, 32)
        # Fill the cache with tokens. The steps read them as text, or as tree tokens of earlier steps.
        starts = [each.cache.starts[row] for row in range(4)]
        model.forward(ForwardBatch(torch.arange(80).view(4, 20) + 5, starts), each.cache, backend)
    generator = torch.Generator().manual_seed(3)
    for batch, width, before, is_tree in steps(rng):
        ids = torch.randint(1, 90, (batch, width), generator=generator)
        parents = [grow(rng, [[]], tree_len + width)[0] for tree_len in before]
        tree = batch_tree(parents, before) if is_tree else None
        lengths = [
            start + 3 * row + tree_len for row, (start, tree_len) in enumerate(zip(starts, before, strict=False))
        ]
        fed = ForwardBatch(ids, lengths, tree=tree)
        replayed, expected = (each.forward(fed).logits for each in (runner, eager))
        torch.testing.assert_close(replayed, expected, atol=1e-4, rtol=1e-4)
    captured = sorted((*key[:2], key[-1]) for key in runner.slot.steps)
    assert captured == [(1, 1, True), (4, 4, False), (4, 4, True), (4, 17, True)]


def test_trees_without_spare_bits_are_not_padded() -> None:
    """A step of 11 tokens is padded to 17 if the tree's bit mask has room for 17, otherwise it runs unpadded."""
    model = make_model(CausalModel, "pad")
    runner = GraphRunner(model, 1, 128, model.vocab, "pad", record=record_calls)
    ids = torch.arange(11)[None] + 3
    for before in (MAX_TREE_TOKENS - 17, MAX_TREE_TOKENS - 16, MAX_TREE_TOKENS - 11):
        parents = [list(range(-1, before + 10))]
        runner.forward(ForwardBatch(ids, [before + 2], tree=batch_tree(parents, [before])))
    assert sorted(key[:2] for key in runner.slot.steps) == [(1, 11), (1, 17)]


def test_a_padding_token_sees_only_itself() -> None:
    """A padding row has an empty tree, so that no NaN reaches a real token."""
    model = make_model(CausalModel, "pad")
    runner = GraphRunner(model, 4, 64, model.vocab, "pad", record=record_calls)
    tree = batch_tree([[-1] * 11] * 3, [0] * 3)
    runner.forward(ForwardBatch(torch.ones(3, 11, dtype=torch.long), [5, 6, 7], tree=tree))
    (step,) = runner.slot.steps.values()
    padded = pad_tree(tree, 4, 17)
    sees, depths = Padded(padded.sees, 17), Padded(padded.depths, 17)
    inputs = RoundInputs([5, 6, 7], sees=sees, depths=depths, before=padded.before)
    fed = inputs.views(step.numbers).tree
    assert fed is not None
    own_bits = torch.ones(17, dtype=torch.long) << torch.arange(17)
    assert torch.equal(fed.sees[3], own_bits) and torch.equal(fed.sees[:3, 11:], own_bits[11:].expand(3, 6))
    assert not fed.depths[:, 11:].any() and not fed.before.any()


@pytest.mark.parametrize("rows", [3, 4])
def test_a_rounds_numbers_come_back_by_name(rows: int) -> None:
    """Fields that a step does not read are None. Rows beyond the round's are zeros."""
    tokens = [[8, 9], [10], [12, 13]]
    inputs = RoundInputs([5, 6, 7], counts=[1, 2, 0], tokens=Padded(tokens, 2), copied_drafts=Padded([[]] * 3, 0))
    buffer = inputs.packed(rows, torch.device("cpu"))
    static = inputs.views(buffer[:, :rows])
    padding = [0] * (rows - 3)
    assert buffer.shape == (4, 4) and static.lengths.tolist() == [5, 6, 7, *padding]
    assert static.counts.tolist() == [1, 2, 0, *padding] and static.copied_drafts.shape == (rows, 0)
    assert static.tokens.tolist() == [[8, 9], [10, 0], [12, 13], *([0, 0] for _ in padding)]
    assert static.prefix is None and static.tree is None and static.seeds is None
