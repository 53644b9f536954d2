"""The fused attention kernel: segments of columns, blocks of query rows, trees and the bits of a row.

The bits of a row do not depend on prefixes, other rows or the number of launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import TensorHandle, interpreter_builder

from kernels.plan import MAX_TREE_TOKENS, Rotation
from kernels.triton import attention as fused_attention
from kernels.triton import cache_write
from kernels.triton.attention import fused
from tests.support.models import slow_but

from .steps import HUGE, Step, make_step, make_tree_step


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make segments so short that a few hundred columns have several."""
    monkeypatch.setattr(fused_attention, "SEGMENT", 64)
    monkeypatch.setattr(fused_attention, "_MERGED_NUMBERS", 2 * 16 * 16)


@pytest.fixture
def exact_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum products in the same order for every row, as a GPU does. In numpy, the order depends on the row."""

    def dot(a: Any, b: Any, d: Any, *_: Any) -> TensorHandle:
        sums = d.data.copy()
        for column, row in zip(a.data.T.astype(np.float32), b.data.astype(np.float32), strict=True):
            sums += column[:, None] * row
        return TensorHandle(sums, d.dtype.scalar)

    monkeypatch.setattr(interpreter_builder, "create_dot", dot)


@pytest.mark.parametrize(("window", "parts"), slow_but([(20, True)], [(20, True), (None, False), (1, True)]))
def test_a_prefill_in_blocks_equals_the_reference(window: int | None, parts: bool) -> None:
    """39 queries x 3 heads make eight blocks of query rows, after 0 and 70 cached tokens."""
    step, options = make_step([(0, 0, 0), (70, 0, 0)], 39, heads=(3, 1)), {"window": window, "softcap": 9.0}
    step.check(step.run_whole(fused, scaling=0.3, parts=parts, **options), scaling=0.3, **options)


# (length, prefix length, prefix index). Segments lie inside a prefix or a row, or cross a prefix's end.
ROWS = [(300, 208, 0), (210, 208, 0), (90, 64, 2), (190, 0, 0), (5, 0, 1)]


def single_row(step: Step, row: int) -> Step:
    """Return the step of one row and its prefix."""
    shared, rows = step.plan.shared, slice(row, row + 1)
    assert shared is not None
    start, group = shared.host_starts[row], shared.host_groups[row]
    part = replace(
        shared, starts=shared.starts[rows], groups=torch.tensor([0]), host_starts=[start], host_groups=[0],
        extent=start, _order=None,
    )  # fmt: skip
    lengths = {"lengths": step.plan.lengths[rows], "host": step.plan.host[rows]}
    suffix, whole = ((keys[rows], values[rows]) for keys, values in (step.suffix, step.whole))
    prefix = tuple(caches[group : group + 1] for caches in step.prefix)
    plan = replace(step.plan, **lengths, shared=part, _cached={})
    return Step(step.query[rows], suffix, prefix, whole, plan)


@pytest.mark.parametrize(
    ("dtype", "masks"),
    slow_but(
        [],
        [
            (torch.bfloat16, {}),
            (torch.float32, {"window": 100}),
            (torch.float16, {"gap": 20}),
            (torch.float32, {"gap": 20, "window": 250, "softcap": 2.0}),
        ],
    ),
)
@pytest.mark.usefixtures("exact_order")
def test_the_bits_of_a_row_depend_only_on_that_row(dtype: torch.dtype, masks: dict) -> None:
    step = make_step(ROWS, 3, heads=(6, 2), dim=20, gap=masks.get("gap"), dtype=dtype)
    options = {"scaling": 0.2, **{name: masks[name] for name in masks if name != "gap"}}
    out = step.run(fused, parts=True, **options)
    for other in (step.run(fused, parts=False, **options), step.captured().run(fused, **options)):
        assert torch.equal(other, out)
    for parts in (False, True):
        assert torch.equal(step.run_whole(fused, parts=parts, **options), out)
    for row in (1, 2):
        assert torch.equal(single_row(step, row).run(fused, **options)[0], out[row])
        assert torch.equal(single_row(step, row).run_whole(fused, **options)[0], out[row])


@pytest.mark.slow
@pytest.mark.usefixtures("exact_order")
def test_a_query_has_the_same_bits_in_a_longer_step() -> None:
    step = make_step(ROWS, 3, heads=(6, 2), dim=20)
    out = step.run(fused, parts=True, scaling=0.2)
    lengths = [length + 2 for length in step.plan.host]
    plan = replace(step.plan, lengths=torch.tensor(lengths), host=lengths, queries=1, _cached={})
    last = replace(step, query=step.query[:, :, 2:], plan=plan)
    assert torch.equal(last.run(fused, scaling=0.2)[:, 0], out[:, 2])


@pytest.mark.slow
@pytest.mark.usefixtures("exact_order")
def test_a_block_handles_rows_of_several_prefixes() -> None:
    """A block of 16 query rows has the heads of eight rows, which have four different prefixes."""
    rows = [(130 + row, (128, 64, 16, 192)[row % 4], (3, 0, 4, 1)[row % 4]) for row in range(8)]
    rows = [(max(length, start), start, group) for length, start, group in rows]
    step = make_step(rows, 1, heads=(2, 1))
    out = step.run(fused, parts=True, scaling=0.3)
    assert torch.equal(out, step.run_whole(fused, parts=True, scaling=0.3))


def test_a_prefix_whose_scores_overflow_has_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefix's scores are -inf. If unwritten memory were read, the result would be NaN."""
    step = make_step([(70, 64, 0), (66, 64, 0)], 1, spare=0)
    step.query.fill_(1e25)
    step.suffix[0].zero_()
    step.prefix[0].fill_(-1e25)
    step.whole[0].zero_()[:, :, :64] = -1e25
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: torch.full(shape, torch.nan, **options))
    out = step.run(fused, parts=True, scaling=1.0)
    assert out.isfinite().all() and torch.equal(out, step.run_whole(fused, parts=True, scaling=1.0))


@pytest.mark.slow
def test_columns_in_a_gap_are_not_read() -> None:
    """Values in the gap are NaN: a block that read them would return NaN, since 0 x NaN is NaN."""
    step = make_step([(500, 320, 0), (400, 0, 0)], 2, gap=100)
    clean = step.run(fused, scaling=0.3)
    assert step.plan.window_starts(100).tolist() == [384, 256]
    step.prefix[1][0, :, 64:320] = torch.nan
    step.suffix[1][0, :, : 384 - 320] = torch.nan
    step.suffix[1][1, :, 64:256] = torch.nan
    assert torch.equal(step.run(fused, scaling=0.3), clean)
    step.suffix[1][1, :, 256] = torch.nan
    assert step.run(fused, scaling=0.3)[1].isnan().any()


@pytest.mark.parametrize("parts", [False, True])
def test_no_block_reads_columns_hidden_from_all_its_rows(parts: bool) -> None:
    """One head with 64 queries makes four blocks; each reads tiles of 32 columns from the first visible one on."""
    step, options = make_step([(100, 0, 0)], 64, heads=(1, 1), dim=16), {"scaling": 0.3, "parts": parts}
    clean, value = step.run_whole(fused, **options), step.whole[1]
    value[0, 0, 116:] = torch.nan
    out = step.run_whole(fused, **options)
    assert torch.equal(out[0, :16], clean[0, :16]) and out[0, 16:].isnan().any()
    value[0, 0, 116:], value[0, 0, :96] = 0.0, torch.nan
    # With a window of 20, row 48 sees columns 129..148: its block starts at column 128.
    out = step.run_whole(fused, **options, window=20)
    assert out[0, 48:].isfinite().all() and out[0, :16].isnan().any()


def test_parts_take_one_launch_and_leave_their_counters_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits, the result is written from float32 sums, with the same bits from one program or several.

    A captured step has programs for all columns of the cache. One row fills a single segment, so its other
    programs neither store nor count anything.
    """
    launched: list[Any] = []
    run: Callable[..., None] = fused_attention.launch

    def recording(kernel: Any, *arguments: Any, **options: Any) -> None:
        launched.append(kernel)
        run(kernel, *arguments, **options)

    monkeypatch.setattr(fused_attention, "launch", recording)
    for dtype in (torch.float16, torch.bfloat16):
        step = make_step([(3, 0, 0), (150, 0, 0)], 20, heads=(4, 1), dtype=dtype)
        whole = step.run_whole(fused, scaling=0.3, parts=False)
        spare = replace(step, whole=tuple(torch.cat((cache, cache), 2) for cache in step.whole))
        plan = replace(step.plan, shared=None, host=[], captured_extent=spare.whole[0].shape[2], _cached={})
        counted = plan.zeros(64)
        for _ in range(2):
            parts = fused(spare.query, *spare.whole, plan, scaling=0.3, parts=True)
            assert parts.dtype == dtype and torch.equal(whole, parts)
            assert plan.zeros(8) is counted and not counted.any()
    assert launched == [fused_attention.attend] * 6


def test_a_program_takes_all_segments_if_the_rows_fill_the_device() -> None:
    """A CPU is treated as a GPU of four multiprocessors, which 12 programs fill."""
    device = torch.device("cpu")
    assert fused_attention.in_parts(device, programs=11, rows=12, segments=2, shares=False)
    assert not fused_attention.in_parts(device, programs=12, rows=12, segments=2, shares=False)
    assert fused_attention.in_parts(device, programs=12, rows=12, segments=2, shares=True)
    assert not fused_attention.in_parts(device, programs=1, rows=257, segments=2, shares=True)


# TREE_ROWS: (length before the tree, prefix length, prefix index). BEFORE: the number of tree columns fed earlier.
# One tree crosses the end of a segment, and one row begins with its tree. Segments lie inside a prefix or a row,
# or cross a prefix's end.
TREE_ROWS, BEFORE = [(140, 80, 0), (84, 80, 0), (30, 0, 2), (0, 0, 1)], [0, 7, 30, 57]


@pytest.mark.parametrize(
    ("window", "softcap", "queries", "heads", "capture", "parts"),
    slow_but(
        [(3, None, 5, (1, 1), True, True)],
        [
            (None, None, 5, (4, 2), False, True),
            (None, 1.5, 1, (4, 1), True, False),
            (1, None, 3, (3, 1), False, False),
            (3, None, 5, (1, 1), True, True),
            (70, 1.5, 5, (3, 1), True, True),
            (70, 1.5, 5, (3, 1), False, False),
        ],
    ),
)
def test_trees_equal_the_reference(
    window: int | None, softcap: float | None, queries: int, heads: tuple[int, int], capture: bool, parts: bool
) -> None:
    options = {"scaling": 0.3, "window": window, "softcap": softcap}
    for seed, rows in enumerate((slice(0, 4), slice(1, 2))):
        real = [1 + (row + seed) % queries for row in range(len(TREE_ROWS[rows]))]
        step = make_tree_step(TREE_ROWS[rows], BEFORE[rows], queries, seed, real, heads=heads)
        step = step.captured() if capture else step
        step.check(step.run(fused, **options, parts=parts), **options)


@pytest.mark.parametrize("parts", [False, True])
def test_the_deepest_and_the_widest_tree_equal_the_reference(parts: bool) -> None:
    """Rows of 63 tokens use all 63 bits of the number that lists a token's ancestors."""
    step = make_tree_step([(70, 64, 0)], [0], MAX_TREE_TOKENS, 1, heads=(1, 1))
    chain = [list(range(column + 1)) for column in range(MAX_TREE_TOKENS)]
    flat = [[column] for column in range(MAX_TREE_TOKENS)]
    for tree_step in (step, step.with_tree([chain], [0]), step.with_tree([flat], [0])):
        tree_step.check(tree_step.run(fused, scaling=0.3, parts=parts), scaling=0.3)


@pytest.mark.parametrize("parts", [False, True])
def test_hidden_tree_tokens_never_change_a_bit(parts: bool) -> None:
    step = make_tree_step(TREE_ROWS[1:], BEFORE[1:], 3, 3, heads=(2, 1))
    clean = step.run_whole(fused, scaling=0.3, parts=parts)
    assert step.paths is not None
    for s in range(3):
        changed = [cache.clone() for cache in step.whole]
        for b, length in enumerate(step.plan.host):
            first = BEFORE[1 + b]
            hidden = [length - first + column for column in range(first + 3) if column not in step.paths[b][s]]
            changed[0][b, :, hidden], changed[1][b, :, hidden] = 7.0, HUGE
        out = replace(step, whole=tuple(changed)).run_whole(fused, scaling=0.3, parts=parts)
        assert torch.equal(out[:, s], clean[:, s])


@pytest.mark.parametrize("masks", [{}, {"window": 30}])
def test_a_tree_that_is_a_chain_equals_a_plain_step(masks: dict) -> None:
    """This also holds if earlier steps fed the first tokens of the tree."""
    step = make_step([(base + 4, start, group) for base, start, group in TREE_ROWS[1:]], 3, heads=(2, 1), dim=20)
    plain = step.run(fused, scaling=0.2, **masks)
    for before in (0, 4):
        paths = [[list(range(before + s + 1)) for s in range(3)] for _ in TREE_ROWS[1:]]
        out = step.with_tree(paths, [before] * len(paths)).run(fused, scaling=0.2, **masks)
        torch.testing.assert_close(out, plain, atol=1e-6, rtol=1e-6)


def test_a_step_without_trees_prepares_no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(fused_attention, "_tree", refuse)
    make_step(TREE_ROWS[:1], 1, heads=(1, 1)).run(fused, scaling=0.3)


def test_trees_with_a_gap_or_of_another_width_are_refused() -> None:
    step = make_tree_step(TREE_ROWS, BEFORE, 5, 3)
    assert step.paths is not None
    with pytest.raises(ValueError, match="gap"):
        replace(step, plan=replace(step.plan, gap=64, _cached={})).run(fused, scaling=0.3)
    with pytest.raises(ValueError, match="4"):
        step.with_tree([row[:4] for row in step.paths], BEFORE).run(fused, scaling=0.3)


@pytest.mark.parametrize(
    ("kind", "norm", "dtype", "parts"),
    slow_but(
        [("tree", False, torch.bfloat16, False)],
        [
            ("chain", True, torch.bfloat16, True),
            ("chain", False, torch.float32, False),
            ("tree", True, torch.float32, True),
            ("tree", False, torch.bfloat16, False),
            ("gap", True, torch.float16, True),
            ("window", False, torch.float32, True),
        ],
    ),
)
def test_attention_that_rotates_equals_rotation_before_it(
    kind: str, norm: bool, dtype: torch.dtype, parts: bool
) -> None:
    """The result and the cache have the same bits. Rows have prefixes, and new tokens lie in one segment or two.

    With 11 queries of 3 heads, several blocks of query rows write the same columns.
    """
    options: dict[str, Any] = {"heads": (6, 2), "dim": 20, "dtype": dtype}
    if kind == "tree":
        step = make_tree_step(TREE_ROWS, BEFORE, 6, 1, **options)
    else:
        step = make_step(ROWS[1:4], 11, gap=20 if kind == "gap" else None, **options)
    batch, queries = step.plan.lengths.shape[0], step.plan.queries
    shared = step.plan.shared
    assert shared is not None
    qkv = torch.randn(batch, queries, 10, 20).to(dtype)
    # Padding past the last position is rotated like the last position.
    angles = torch.outer(torch.arange(215.0), torch.rand(10))
    norms = (torch.rand(20).to(dtype), torch.rand(20).to(dtype)) if norm else None
    prefix = tuple(cache[:, :, : shared.extent] for cache in step.prefix)
    results = []
    for inside in (True, False):
        cache, states = torch.stack(step.suffix), qkv.clone()
        rotation = Rotation(states, cache, angles.cos(), angles.sin(), norms, 1e-6)
        if not inside:
            rotation.apply(cache_write.rotate_write, step.plan)
        query = states[:, :, :6].transpose(1, 2)
        out = fused(
            query, *cache, step.plan, scaling=0.2, window=100 if kind == "window" else None, prefix=prefix,
            rotation=rotation if inside else None, parts=parts,
        )  # fmt: skip
        results.append((out, cache))
    for inside, before in zip(*results, strict=True):
        assert torch.equal(inside, before)
    assert results[0][0].isfinite().all() and not torch.equal(results[0][1], torch.stack(step.suffix))


def test_a_rotation_of_many_queries_or_of_another_cache_is_refused() -> None:
    angles = torch.ones(300, 4)
    for queries, moved in ((257, False), (3, True)):
        step = make_step([(5, 0, 0)], queries, heads=(1, 1))
        qkv, cache = torch.randn(1, queries, 3, 8), torch.stack(step.whole)
        rotation = Rotation(qkv, cache.clone() if moved else cache, angles, angles)
        plan = replace(step.plan, shared=None, _cached={})
        with pytest.raises(ValueError, match="rotation"):
            fused(qkv[:, :, :1].transpose(1, 2), *cache, plan, scaling=0.3, rotation=rotation)
