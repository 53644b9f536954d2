"""The bits of a row's logits do not depend on other rows, on tokens fed with it, or on the number of threads.

A tree node has the bits of the last token of its path, fed as a text. attention/ tests prefixes and chunks.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from bass_core.model.base import CausalModel, HiddenStateTap
from bass_core.model.cache import RaggedCache
from bass_core.model.forward import ForwardBatch, HostTreeMask
from bass_core.model.llama_cpu import LlamaCompiled
from bass_core.model.weights.quantized import quantise_model
from tests.support.models import slow_but
from tests.support.trees import Parents, batch_tree, path, random_tree

from .shapes import KINDS, compiled, forward_logits, make_model, tokens

WIDTHS = [1, 2, 3, 4, 5, 1, 3, 5, 2, 4, 5, 1, 2, 3, 4, 5]
LENGTHS = [1 + 9 * row for row in range(16)]
BASES = [240, 255, 256, 31]


@pytest.fixture(params=[*KINDS, "int8"], ids=str)
def model(request: Any, monkeypatch: pytest.MonkeyPatch) -> LlamaCompiled:
    if request.param == "int8":
        quantised = make_model("llama, hidden size 36, heads of 12, biases", torch.bfloat16)
        quantise_model(quantised, "int8")
        return LlamaCompiled(quantised)
    dtype, fast, dot = request.param
    return compiled(make_model("qwen3, hidden size 64, heads of 20", dtype), fast, dot, monkeypatch)


@pytest.mark.parametrize("threads", slow_but([1], [1, 2]))
def test_a_row_has_the_same_bits_by_itself_and_among_sixteen(model: LlamaCompiled, threads: int) -> None:
    torch.set_num_threads(threads)
    prompts, step = tokens(16, max(LENGTHS), 1), tokens(16, 5, 2)
    cache = model.new_cache(16, 160)
    forward_logits(model, cache, prompts, [0] * 16, counts=LENGTHS, eager=True)
    together = forward_logits(model, cache, step, LENGTHS, counts=WIDTHS)
    torch.set_num_threads(1)
    for row, (length, width) in enumerate(zip(LENGTHS, WIDTHS, strict=True)):
        alone = model.new_cache(1, 160)
        forward_logits(model, alone, prompts[row : row + 1, :length], [0])
        logits = forward_logits(model, alone, step[row : row + 1, :width], [length])
        assert torch.equal(logits[0], together[row, :width])
        # Feed the rows token by token, as regular decoding does.
        for at in range(width):
            assert torch.equal(
                forward_logits(model, alone, step[row : row + 1, at : at + 1], [length + at])[0],
                logits[0, at : at + 1],
            )


def test_a_cache_has_the_size_that_the_model_predicts(model: LlamaCompiled) -> None:
    for size in ((1, 1), (3, 33), (2, 16, 3, 48)):
        assert model.new_cache(*size).nbytes == model.cache_bytes(*size)
    assert 16 * model.cost.kv_bytes == model.cache_bytes(1, 16)


def step(
    model: CausalModel,
    cache: RaggedCache,
    x: Tensor,
    lengths: list[int],
    counts: list[int],
    tree: HostTreeMask | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the logits and states of each row."""
    out = model.forward(ForwardBatch(x, lengths, counts, return_states=True, tree=tree), cache)
    logits, states = (
        [row[:n].clone() for row, n in zip(part, counts, strict=True)]
        for part in (out.logits, out.require_states())
    )
    return logits, states


def as_texts(
    model: CausalModel, cache: RaggedCache, base: int, tree: Parents, x: Tensor, first: int = 0
) -> Tensor:
    """Return the logits and states [nodes, ...] of each node, with its path fed token by token as a text."""
    results = []
    for node in range(first, len(tree)):
        for depth, token in enumerate(path(tree, node)):
            logits, states = step(model, cache, x[None, token : token + 1], [base + depth], [1], None)
        results.append(torch.cat((logits[0], states[0]), 1))
    return torch.cat(results)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "threads"), [(0, 1), (1, 1), (0, 2)])
def test_tree_nodes_and_accepted_paths_have_the_bits_of_texts(
    model: LlamaCompiled, seed: int, threads: int
) -> None:
    """After keeping a path of each tree, the rows go on as if there had been no trees."""
    model.readout = HiddenStateTap((0, 1))
    rng = random.Random(seed)
    torch.set_num_threads(threads)
    trees = [random_tree(rng, rng.randint(2, 16)), random_tree(rng, 24), [], random_tree(rng, 9, 3)]
    ids, x, more = tokens(4, 256, seed), tokens(4, 24, seed + 1), tokens(4, 3, seed + 2)
    cache, counts = model.new_cache(4, 290), [len(tree) for tree in trees]
    forward_logits(model, cache, ids, [0] * 4, counts=BASES, eager=True)
    results = step(model, cache, x[:, : max(counts)], BASES, counts, batch_tree(trees))
    accepted_paths = [path(tree, rng.randrange(len(tree))) if tree else [] for tree in trees]
    for row, (base, accepted) in enumerate(zip(BASES, accepted_paths, strict=True)):
        cache.keep(row, base, [base + column for column in accepted])
    lengths = [base + len(accepted) for base, accepted in zip(BASES, accepted_paths, strict=True)]
    after = forward_logits(model, cache, more, lengths)
    torch.set_num_threads(1)
    for row, (tree, base) in enumerate(zip(trees, BASES, strict=True)):
        alone = model.new_cache(1, 290)
        forward_logits(model, alone, ids[row : row + 1, :base], [0])
        if tree:
            expected = as_texts(model, alone, base, tree, x[row])
            assert torch.equal(torch.cat((results[0][row], results[1][row]), 1), expected)
            forward_logits(model, alone, x[row : row + 1, accepted_paths[row]], [base])
        assert torch.equal(
            forward_logits(model, alone, more[row : row + 1], lengths[row : row + 1])[0], after[row]
        )


def test_trees_that_are_chains_equal_a_plain_step(model: LlamaCompiled) -> None:
    ids, x, chain = tokens(2, 30), tokens(2, 5, 1), list(range(-1, 4))
    results = []
    for tree in (None, batch_tree([chain, chain])):
        cache = model.new_cache(2, 40)
        forward_logits(model, cache, ids, [0, 0])
        results.append((forward_logits(model, cache, x, [30, 17], tree=tree), cache.buffer))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.slow
def test_a_tree_fed_in_levels_from_embeddings_has_the_bits_of_texts(model: LlamaCompiled) -> None:
    base, tree = 250, [-1, 0, 0, 0, 2, 1, 2, 4, 6]
    ids, x = tokens(1, base), torch.randn(len(tree), model.hidden, generator=torch.Generator().manual_seed(0))
    cache, alone = model.new_cache(2, 290), model.new_cache(1, 290)
    forward_logits(model, cache, ids.expand(2, -1), [0, 0])
    forward_logits(model, alone, ids, [0])
    for first, end in ((0, 1), (1, 4), (4, 7), (7, 9)):
        part, counts = x[None, first:end].expand(2, -1, -1), [end - first, 1]
        lengths = [base + first, base + min(1, first)]
        trees = batch_tree([tree[:end], [-1, 0][: 1 + min(1, first)]], [first, min(1, first)])
        logits, states = step(model, cache, part, lengths, counts, trees)
        expected = as_texts(model, alone, base, tree[:end], x, first)
        assert torch.equal(torch.cat((logits[0], states[0]), 1), expected)
