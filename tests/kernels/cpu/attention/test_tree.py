"""Attention over token trees: each node has the bits of the last token of its path, fed as a text."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from bass_core.model.cache import RaggedCache
from bass_core.model.tiled import TiledCache
from tests.kernels.cpu.attention.steps import LAYERS, LENGTH, Layer, fill_with_nan, flat_tree
from tests.kernels.cpu.shapes import DOTS
from tests.support.models import slow_but
from tests.support.trees import Parents, path, random_tree

# Lengths before the tree: it begins at every column of a tile, and paths cross the ends of segments.
BASES = [*range(1, 18), *range(248, 260), 500, 511, 512, 1021]


@pytest.fixture(params=LAYERS)
def layer(request: Any) -> Layer:
    return Layer(6, 2, *LAYERS[request.param])


def nodes(layer: Layer, count: int, seed: int) -> Tensor:
    """Return random projections [count, ...] of a tree's tokens."""
    return torch.randn(count, layer.texts.shape[2], generator=torch.Generator().manual_seed(seed))


def as_texts(layer: Layer, cache: TiledCache, base: int, tree: Parents, y: Tensor, first: int = 0) -> Tensor:
    """Feed each node's path as a text after the `base` tokens of a one-row cache; return the nodes' results."""
    results = []
    for node in range(first, len(tree)):
        results.append(layer.feed_rows(cache, [y[path(tree, node)]], [base])[0][-1:])
    return torch.cat(results)


@pytest.mark.parametrize(
    ("base", "threads"), slow_but([(15, 1), (256, 2)], [(base, 2 - base % 2) for base in BASES])
)
def test_a_node_has_the_bits_of_its_path_as_a_text(layer: Layer, base: int, threads: int) -> None:
    """The node's row is fed by itself, and next to rows with other trees, with a chain and without tokens."""
    torch.set_num_threads(threads)
    rng = random.Random(base)
    trees = [random_tree(rng, rng.randint(2, 24)), [], list(range(-1, 5)), random_tree(rng, rng.randint(1, 24), 4)]
    bases = [base, 37, 255, rng.choice(BASES)]
    cache = fill_with_nan(layer.cache(4), layer)
    layer.feed(cache, [0, 1, 2, 3], [0] * 4, bases)
    ys = [nodes(layer, len(tree), row) for row, tree in enumerate(trees)]
    results = layer.feed_rows(cache, ys, bases, tree=flat_tree(trees, bases))
    torch.set_num_threads(1)
    for row, (tree, start, y) in enumerate(zip(trees, bases, ys, strict=True)):
        alone = fill_with_nan(layer.cache(1), layer)
        layer.feed(alone, [row], [0], [start])
        if tree:
            expected = as_texts(layer, alone, start, tree, y)
            assert torch.equal(results[row], expected), (row, tree)
            mine = layer.feed_rows(alone, [y], [start], tree=flat_tree([tree], [start]))[0]
            assert torch.equal(mine, expected)


@pytest.mark.parametrize("threads", slow_but([1], [1, 2]))
def test_trees_after_a_shared_prefix_have_the_bits_of_texts(layer: Layer, threads: int) -> None:
    torch.set_num_threads(threads)
    rng = random.Random(5)
    prefix = layer.cache(2, 560)
    layer.feed(prefix, [0, 1], [0, 0], [560, 272])
    # For each row: its prefix, its length, and the number of nodes of its tree.
    rows = [(0, 560, 9), (0, 575, 4), (1, 272, 24), (0, 760, 13), (None, 300, 5), (1, 511, 0), (0, 600, 1)]
    ends, texts = {0: 560, 1: 272, None: 0}, [3 if group is None else group for group, _, _ in rows]
    cache = fill_with_nan(layer.cache(len(rows), 900, prefix), layer)
    for row, (group, _, _) in enumerate(rows):
        cache.attach(row, group or 0, ends[group])
    bases, starts = [base for _, base, _ in rows], list(cache.starts)
    layer.feed(cache, texts, starts, [a - b for a, b in zip(bases, starts, strict=True)])
    trees = [random_tree(rng, count) for _, _, count in rows]
    ys = [nodes(layer, count, row) for row, (_, _, count) in enumerate(rows)]
    before = prefix.buffer.clone()
    results = layer.feed_rows(cache, ys, bases, tree=flat_tree(trees, bases))
    assert torch.equal(prefix.buffer, before)
    for row, (tree, base, y) in enumerate(zip(trees, bases, ys, strict=True)):
        alone = layer.cache(1)
        layer.feed(alone, [texts[row]], [0], [base])
        if tree:
            assert torch.equal(results[row], as_texts(layer, alone, base, tree, y)), row


@pytest.mark.parametrize("base", slow_but([255], [1, 15, 16, 30, 250, 255, 256, 600]))
def test_a_tree_fed_level_by_level_has_the_bits_of_texts(layer: Layer, base: int) -> None:
    """A draft model feeds a tree one level at a time. Nodes see their ancestors in the levels fed earlier."""
    rng = random.Random(base)
    cache, alone = fill_with_nan(layer.cache(1), layer), layer.cache(1)
    for row_cache in (cache, alone):
        layer.feed(row_cache, [0], [0], [base])
    tree: Parents = []
    y = nodes(layer, 24, base)
    for width in (1, 3, 5, 1, 6, 8):
        fed = len(tree)
        newest = range(max(0, fed - 5), fed)
        tree = tree + [rng.choice(newest) if fed else -1 for _ in range(width)]
        step = flat_tree([tree], [base + fed], [fed])
        results = layer.feed_rows(cache, [y[fed : len(tree)]], [base + fed], tree=step)[0]
        assert torch.equal(results, as_texts(layer, alone, base, tree, y, fed))


@pytest.mark.parametrize("base", slow_but([255], [13, 16, 31, 250, 255, 256]))
def test_an_accepted_path_equals_a_text(layer: Layer, base: int) -> None:
    """Tokens fed after an accepted path have the same bits as after the same tokens fed as text."""
    rng = random.Random(base)
    for turn in range(12):
        tree = random_tree(rng, rng.randint(2, 20))
        y, more = nodes(layer, len(tree), turn), nodes(layer, 3, turn + 50)
        cache, plain = (fill_with_nan(layer.cache(3), layer) for _ in range(2))
        layer.feed(cache, [1, 0, 2], [0] * 3, [5, base, base])
        layer.feed(plain, [1, 0, 2], [0] * 3, [5, base, base])
        no_tokens = y[:0]
        layer.feed_rows(
            cache, [no_tokens, y, no_tokens], [5, base, base], tree=flat_tree([[], tree, []], [5, base, base])
        )
        accepted = path(tree, rng.randrange(len(tree)))
        cache.keep(1, base, [base + column for column in accepted])
        layer.feed_rows(plain, [no_tokens, y[accepted], no_tokens], [5, base, base])
        for count in (3, 1):
            lengths = [5, base + len(accepted), base]
            results, expected = (
                layer.feed_rows(row_cache, [more[:count]] * 3, lengths) for row_cache in (cache, plain)
            )
            assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True)), (tree, accepted)


@pytest.mark.parametrize("dot", DOTS)
def test_accepted_columns_move_as_in_a_plain_cache(dot: bool) -> None:
    """Columns after a prefix move in all layers, and other rows don't change."""
    dtype = torch.bfloat16 if dot else torch.float32
    sizes = (3, 2, 48, 2, 20)
    tiled = TiledCache(*sizes, dtype, prefix=TiledCache(3, 1, 32, 2, 20, dtype))
    plain = RaggedCache(*sizes, dtype, prefix=RaggedCache(3, 1, 32, 2, 20, dtype))
    plain.buffer.normal_()

    def columns() -> Tensor:
        """Return the cache as [layers, 2, rows, heads, columns, dim]; see kernels/cpu/attention/layout.py."""
        words, pairs = 32 // (2 if dot else 1), 2 if dot else 1
        tiles = tiled.buffer.view(*tiled.buffer.shape[:5], 16 * 32)
        keys = tiles[:, 0].unflatten(-1, (words, 16, pairs)).transpose(-3, -2).flatten(-2)
        values = tiles[:, 1].unflatten(-1, (16 // pairs, 32, pairs)).transpose(-1, -2).flatten(-3, -2)
        return torch.stack((keys, values), 1).flatten(4, 5)[..., :20]

    def fill(states: Tensor) -> None:
        padded = torch.nn.functional.pad(states, (0, 12)).unflatten(4, (3, 16))
        pairs = 2 if dot else 1
        keys = padded[:, 0].unflatten(-1, (-1, pairs)).transpose(-3, -2).flatten(-3)
        values = padded[:, 1].unflatten(-2, (-1, pairs)).transpose(-1, -2).flatten(-3)
        tiled.buffer.copy_(torch.stack((keys, values), 1))

    fill(plain.buffer)
    assert torch.equal(columns(), plain.buffer)
    for cache in (tiled, plain):
        cache.attach(1, 0, 16)
    for row, first, sources in ((1, 30, [33, 34, 37]), (0, 15, [16, 20]), (1, 17, [17, 18, 60])):
        for cache in (tiled, plain):
            cache.keep(row, first, sources)
        assert torch.equal(columns(), plain.buffer)


@pytest.mark.slow
def test_the_largest_trees_have_the_bits_of_texts(layer: Layer) -> None:
    """One tree has a long path, the other has all nodes on one level."""
    cache, alone = layer.cache(2, LENGTH), layer.cache(1, LENGTH)
    comb = [-1, *(max(0, node - 1 - node % 2) for node in range(1, 63))]
    star = [-1, *[0] * 62]
    for base in (15, 250, 700):
        layer.feed(cache, [0, 0], [0, 0], [base, base])
        layer.feed(alone, [0], [0], [base])
        y = nodes(layer, 63, base)
        results = layer.feed_rows(cache, [y, y], [base, base], tree=flat_tree([comb, star], [base, base]))
        for tree, out in zip((comb, star), results, strict=True):
            assert torch.equal(out, as_texts(layer, alone, base, tree, y))
