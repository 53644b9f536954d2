"""Attention equals torch's; a row's bits do not depend on shared prefixes or other rows."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from kernels.cpu.attention.plan import APART, DIRECT, SHARED, planned
from kernels.cpu.attention.tree import NO_TREE
from tests.support.models import slow_but

from ..shapes import DOTS
from .steps import LAYERS, LENGTH, Layer, fill_with_nan

# Heads, key-value heads, dim; groups of 1 to 6 query heads.
SHAPES = [(4, 2, 8), (3, 1, 12), (2, 2, 64), (8, 2, 20), (6, 1, 16), (5, 1, 2), (2, 1, 80), (6, 2, 64)]
# Lengths just below, at and above the ends of tiles, blocks and segments.
LENGTHS = [0, 1, 15, 16, 63, 64, 239, 255, 256, 257, 511, 512, 700, 1290]


@pytest.fixture(params=LAYERS)
def layer(request: Any) -> Layer:
    return Layer(6, 2, *LAYERS[request.param])


def same(results: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize(
    ("shape", "dot"), slow_but([((6, 1, 16), False), ((6, 2, 64), DOTS[-1])], product(SHAPES, DOTS))
)
def test_prompts_and_ragged_steps_equal_torch(shape: tuple[int, int, int], dot: bool) -> None:
    layer = Layer(*shape, dot)
    texts = [row % 6 for row in range(len(LENGTHS))]
    counts = [(1, 2, 5, 7, 16, 33)[row * 5 % 6] for row in range(len(LENGTHS))]
    cache = layer.cache(len(LENGTHS))
    results = layer.feed(cache, texts, [0] * len(LENGTHS), LENGTHS)
    for text, length, out in zip(texts, LENGTHS, results, strict=True):
        if length:
            layer.assert_close(out, layer.expected(text, 0, length))
    results = layer.feed(cache, texts, LENGTHS, counts)
    for text, length, count, out in zip(texts, LENGTHS, counts, results, strict=True):
        layer.assert_close(out, layer.expected(text, length, count))


@pytest.mark.parametrize("threads", slow_but([1], [1, 2, 5]))
def test_a_row_has_the_same_bits_with_and_without_a_shared_prefix(layer: Layer, threads: int) -> None:
    """The rows have one of three prefixes or none. They get 0 to 40 tokens, some directly after their prefix."""
    torch.set_num_threads(threads)
    ends = [560, 272, 560]
    prefix = layer.cache(3, 560)
    layer.feed(prefix, [0, 1, 2], [0, 0, 0], ends)
    # For each row: its prefix, its length, and the number of tokens that it is fed.
    rows = [(0, 560, 1), (1, 300, 3), (None, 777, 2), (0, 561, 5), (1, 272, 1), (0, 900, 40), (1, 520, 5),
            (None, 0, 4), (0, 600, 0), (2, 566, 2), (0, 1290, 6), (2, 560, 1)]  # fmt: skip
    texts = [4 if group is None else group for group, _, _ in rows]
    lengths, counts = [length for _, length, _ in rows], [count for _, _, count in rows]
    cache = layer.cache(len(rows), LENGTH, prefix)
    for row, (group, _, _) in enumerate(rows):
        cache.attach(row, group or 0, 0 if group is None else ends[group])
    starts = list(cache.starts)
    before = prefix.buffer.clone()
    layer.feed(cache, texts, starts, [a - b for a, b in zip(lengths, starts, strict=True)])
    results = layer.feed(cache, texts, lengths, counts)
    assert torch.equal(prefix.buffer, before)
    torch.set_num_threads(1)
    for text, length, count, out in zip(texts, lengths, counts, results, strict=True):
        alone = layer.cache(1)
        layer.feed(alone, [text], [0], [length])
        assert torch.equal(layer.feed(alone, [text], [length], [count])[0], out), (text, length, count)
        for at in range(count):
            single = layer.feed(alone, [text], [length + at], [1])[0]
            assert torch.equal(single, out[at : at + 1]), (text, length, at)


def test_rows_of_a_prefix_share_work_items_and_long_rows_have_several() -> None:
    firsts, skip = np.arange(6), np.zeros(5, np.int64)
    starts, groups = np.array([560, 560, 0, 272, 560]), np.array([1, 1, 0, 0, 1])
    items, tokens, order, partial_results = planned(
        firsts, np.array([600, 560, 900, 300, 570]), starts, groups, skip, *NO_TREE, 3, 1, 2
    )
    assert order.tolist() == [0, 1, 4, 2, 3]
    assert [row for row in items.tolist() if row[5] == SHARED] == [
        [0, 0, 3, 0, 1, SHARED],
        [0, 0, 3, 1, 2, SHARED],
    ]
    # Row 0 reads the rest of its prefix and its own columns in separate items. If only one row has a prefix, the
    # prefix is read like the row's own columns.
    assert [row[3] for row in items.tolist() if row[0] == 0 and row[5] == APART] == [2]
    assert [row[3] for row in items.tolist() if row[0] == 2] == [0, 1, 2, 3]
    assert [row[3] for row in items.tolist() if row[0] == 3] == [0, 1]
    assert partial_results == 3 + 3 + 4 + 2 + 3 and tokens[:, 2].tolist() == [0, 3, 6, 10, 12]
    none = skip[:1]
    items, *_, partial_results = planned(np.array([0, 1]), np.array([130]), none, none, none, *NO_TREE, 3, 1, 2)
    assert items.tolist() == [[0, 0, 1, 0, 1, DIRECT]] and partial_results == 0


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_a_prompt_has_the_same_bits_in_chunks_of_any_width(layer: Layer, threads: int) -> None:
    torch.set_num_threads(threads)
    whole = layer.cache(1)
    expected = layer.feed(whole, [0], [0], [LENGTH])[0]
    for width in (7, 33, 64, 100, 257, 600):
        cache = layer.cache(3)
        parts = []
        for start in range(0, LENGTH, width):
            count = min(width, LENGTH - start)
            parts.append(layer.feed(cache, [1, 0, 2], [start] * 3, [count] * 3)[1])
        assert torch.equal(torch.cat(parts), expected)
        assert torch.equal(cache.buffer[:, :, 1], whole.buffer[:, :, 0])


@pytest.mark.parametrize("length", slow_but([255], [33, 34, 255, 256, 300]))
def test_earlier_cache_contents_never_matter(layer: Layer, length: int) -> None:
    """The results are the same even if rejected drafts and earlier texts left NaN in the cache."""
    new, old = layer.cache(2), fill_with_nan(layer.cache(2), layer)
    layer.feed(new, [0, 1], [0, 0], [length, 5])
    layer.feed(old, [0, 1], [0, 0], [length, 5])
    original = layer.texts.clone()
    layer.texts[:, length:] = torch.nan
    layer.feed(old, [0, 1], [length, length], [6, 3])
    layer.texts.copy_(original)
    for count in (1, 2, 4):
        results = [layer.feed(cache, [0, 1], [length, 5], [count, count]) for cache in (old, new)]
        assert same(*results) and all(out.isfinite().all() for out in results[0])


@pytest.mark.parametrize("window", slow_but([100], [0, 64, 100, 256, 5000]))
def test_a_window_equals_the_reference(layer: Layer, window: int) -> None:
    prefix = layer.cache(1, 560)
    layer.feed(prefix, [0], [0], [560])
    lengths, counts, texts = [30, 64, 200, 1290, 900, 700], [1, 3, 5, 2, 1, 40], [0, 1, 2, 3, 0, 0]
    cache = layer.cache(6, LENGTH, prefix)
    for row in (4, 5):
        cache.attach(row, 0, 560)
    layer.feed(cache, texts, cache.starts, [a - b for a, b in zip(lengths, cache.starts, strict=True)])
    results = layer.feed(cache, texts, lengths, counts, window)
    for text, length, count, out in zip(texts, lengths, counts, results, strict=True):
        layer.assert_close(out, layer.expected(text, length, count, window))
        alone = layer.cache(1)
        layer.feed(alone, [text], [0], [length])
        assert torch.equal(layer.feed(alone, [text], [length], [count], window)[0], out)


@pytest.mark.parametrize("column", slow_but([290], [23, 290]))
@pytest.mark.parametrize(
    ("place", "value"), [("query", torch.inf), ("key", torch.nan), ("value", torch.nan), ("value", torch.inf)]
)
def test_unsound_numbers_stay_visible(layer: Layer, place: str, value: float, column: int) -> None:
    attention = layer.attention
    at = {"query": 0, "key": attention.heads, "value": attention.heads + attention.kv_heads}[place] * attention.dim
    layer.texts[0, column, at + 3] = value
    cache = layer.cache(2)
    results = layer.feed(cache, [0, 1], [0, 0], [300, 300])
    seen = (
        results[0][column]
        if place == "query"
        else results[0][column:, : attention.heads // attention.kv_heads * attention.dim]
    )
    assert not seen.isfinite().all(-1).any()
    # In float32, the unsound number may also make results of tokens just before it in the same block unsound. That
    # does no harm, because the row is refused anyway.
    assert results[0][: column if attention.dot else column - 6].isfinite().all() and results[1].isfinite().all()
