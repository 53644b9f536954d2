"""Trees in the compiled forward: a node has the bits that it has at the end of its path, fed as a text."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from bass_core.model.base import CausalModel, HiddenStateTap
from bass_core.model.cache import RaggedCache
from bass_core.model.forward import BatchTree, ForwardBatch
from bass_core.model.llama_cpu import LlamaCompiled

from .attention.trees import Parents, batch_tree, path, random_tree
from .shapes import DOTS, compiled, exact, fed, made, tokens
from .test_forward import close

KINDS = [(torch.float16, False), *((torch.bfloat16, dot) for dot in DOTS)]
BASES = [240, 255, 256, 31]


@pytest.fixture(params=KINDS, ids=str)
def model(request: Any, monkeypatch: pytest.MonkeyPatch) -> LlamaCompiled:
    dtype, dot = request.param
    return compiled(made("qwen3 of 64, heads of 20", dtype, layers=3), dot, monkeypatch)


def step(
    model: CausalModel,
    cache: RaggedCache,
    x: Tensor,
    lengths: list[int],
    counts: list[int],
    tree: BatchTree | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Each row's logits and states."""
    out = model.forward(ForwardBatch(x, lengths, counts, return_states=True, tree=tree), cache)
    logits, states = (
        [row[:n].clone() for row, n in zip(one, counts, strict=True)] for one in (out.logits, out.require_states())
    )
    return logits, states


def as_texts(
    model: CausalModel, cache: RaggedCache, base: int, tree: Parents, x: Tensor, first: int = 0
) -> Tensor:
    """Logits and states, side by side, of each node at the end of its path, fed token by token."""
    found = []
    for node in range(first, len(tree)):
        for depth, one in enumerate(path(tree, node)):
            logits, states = step(model, cache, x[None, one : one + 1], [base + depth], [1], None)
        found.append(torch.cat((logits[0], states[0]), 1))
    return torch.cat(found)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_logits_states_and_what_follows(model: LlamaCompiled, seed: int, threads: int) -> None:
    """Four rows; then a path of each is kept, and goes on as if there had been no tree."""
    model.readout = HiddenStateTap((1, 2))
    rng = random.Random(seed)
    torch.set_num_threads(threads)
    trees = [random_tree(rng, rng.randint(2, 16)), random_tree(rng, 24), [], random_tree(rng, 9, 3)]
    ids, x, more = tokens(4, 256, seed), tokens(4, 24, seed + 1), tokens(4, 3, seed + 2)
    cache, counts = model.new_cache(4, 290), [len(tree) for tree in trees]
    fed(model, cache, ids, [0] * 4, counts=BASES, eager=True)
    found = step(model, cache, x[:, : max(counts)], BASES, counts, batch_tree(trees))
    kept = [path(tree, rng.randrange(len(tree))) if tree else [] for tree in trees]
    for row, (base, one) in enumerate(zip(BASES, kept, strict=True)):
        cache.keep(row, base, [base + column for column in one])
    lengths = [base + len(one) for base, one in zip(BASES, kept, strict=True)]
    after = fed(model, cache, more, lengths)
    torch.set_num_threads(1)
    for row, (tree, base) in enumerate(zip(trees, BASES, strict=True)):
        alone = model.new_cache(1, 290)
        fed(model, alone, ids[row : row + 1, :base], [0])
        if tree:
            expected = as_texts(model, alone, base, tree, x[row])
            assert torch.equal(torch.cat((found[0][row], found[1][row]), 1), expected)
            fed(model, alone, x[row : row + 1, kept[row]], [base])
        assert torch.equal(fed(model, alone, more[row : row + 1], lengths[row : row + 1])[0], after[row])


def test_a_draft_model_grows_a_tree_from_embeddings(model: LlamaCompiled) -> None:
    base, tree = 250, [-1, 0, 0, 0, 2, 1, 2, 4, 6]
    ids, x = tokens(1, base), torch.randn(len(tree), 64, generator=torch.Generator().manual_seed(0))
    cache, alone = model.new_cache(2, 290), model.new_cache(1, 290)
    fed(model, cache, ids.expand(2, -1), [0, 0])
    fed(model, alone, ids, [0])
    for first, end in ((0, 1), (1, 4), (4, 7), (7, 9)):
        part, counts = x[None, first:end].expand(2, -1, -1), [end - first, 1]
        lengths = [base + first, base + min(1, first)]
        trees = batch_tree([tree[:end], [-1, 0][: 1 + min(1, first)]], [first, min(1, first)])
        logits, states = step(model, cache, part, lengths, counts, trees)
        expected = as_texts(model, alone, base, tree[:end], x, first)
        assert torch.equal(torch.cat((logits[0], states[0]), 1), expected)


@pytest.mark.parametrize(("dtype", "dot"), KINDS)
@pytest.mark.parametrize("shape", ["llama of 36, heads of 12, biases", "qwen3 of 36, heads of 16, biases"])
def test_the_reference_computes_the_same(
    shape: str, dtype: torch.dtype, dot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(shape, dtype)
    ours, theirs = compiled(model, dot, monkeypatch), exact(model)
    a, b = ours.new_cache(3, 200), theirs.new_cache(3, 200)
    ids, x, lengths = tokens(3, 140), tokens(3, 9, 1), [140, 63, 1]
    for one, cache in ((ours, a), (theirs, b)):
        fed(one, cache, ids, [0] * 3)
    rng = random.Random(1)
    trees = [random_tree(rng, count) for count in (9, 4, 1)]
    counts, tree = [len(one) for one in trees], batch_tree(trees)
    mine, own = fed(ours, a, x, lengths, counts=counts, tree=tree), fed(theirs, b, x, lengths, tree=tree)
    real = torch.arange(9) < torch.tensor(counts)[:, None]
    close(mine[real], own[real], dot)


def test_a_batch_of_texts_is_a_batch_without_trees(model: LlamaCompiled) -> None:
    ids, x, chain = tokens(2, 30), tokens(2, 5, 1), list(range(-1, 4))
    found = []
    for tree in (None, batch_tree([chain, chain])):
        cache = model.new_cache(2, 40)
        fed(model, cache, ids, [0, 0])
        found.append((fed(model, cache, x, [30, 17], tree=tree), cache.buffer))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
