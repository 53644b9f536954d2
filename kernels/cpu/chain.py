"""The levels of a chain of drafts inside one compiled call: choose each row's token, and feed it.

`inputs` makes the first level's inputs, in a separate call. `choose` is a phase that takes one token of each row
from its newest logits and decides which rows go on. `feed` is two phases that make the body's next inputs. Tokens,
distributions and inputs have the same bits as those that HeadDrafter makes from the same logits, level by level.
If no row goes on, the remaining levels are skipped; every thread reads this from `alive`, which is written once
per level.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .calls import pool
from .calls.jit import helper, kernel
from .calls.threads import claim, done, wait
from .elements import copy, norm, pack, vector_position
from .kinds import PANEL, STEP
from .packing import NO_LINE, Line, Packed
from .products import PLAIN, blocks_of, product, vector_buffers
from .sampling.calls import Filters
from .sampling.distribution import address_of_row, call_row, first_largest, scratch_for
from .sampling.draws import BLOCK, draw_row
from .sampling.noise import key_words

Array = np.ndarray[Any, Any]
_NO_IDS = np.empty(0, np.int64)
# Bits of `alive`: whether a row has a draft at a level, and whether it goes on after it.
HAS_DRAFT, GOES_ON = 1, 2
# An empty attention plan: no items, no tokens, an empty order.
NO_PLAN = np.empty((0, 6), np.int64), np.empty((0, 5), np.int64), _NO_IDS


class Pointing(NamedTuple):
    """A head's pointer (bass_core/model/pointer.py): the text that it searches, and how much it raises a logit.

    Attributes:
        text: int64 [rows, T], the rows' texts.
        lengths: int64 [B], their lengths.
        columns: int64 [V], for each of the target's ids its column in the head's vocabulary, or -1 if it is not in
            it.
        weight: float32 [hidden]; its product with a state is added to the logit.
        by_size: float32, also added to the logit. Entry i is for a match of `shortest` + i tokens, and the last
            entry also for all longer matches.
        shortest: number of tokens of the shortest match that counts.
    """

    text: Array
    lengths: Array
    columns: Array
    weight: Array
    by_size: Array
    shortest: int


class Keys(NamedTuple):
    """The noise keys of the drafts of a round (bass_core/sample/noise.py).

    Attributes:
        seed: int64, the bits of the seed.
        sequences, positions, streams: int64 [B], those of each row's first draft; later drafts have the following
            positions. They may be empty if drafts are greedy.
    """

    seed: int
    sequences: Array
    positions: Array
    streams: Array


@dataclass(frozen=True)
class Chain:
    """A request for a chain of drafts, from a head that reads its own states.

    Attributes:
        most: int64 [B], the maximum number of drafts of each row; at least one row has more than 0.
        fuse: the layer that turns [embedding, state] into the body's input.
        embedded: float32 [V', hidden], the embeddings of the head's vocabulary.
        ids: int64 [V'], the token id of each of its columns, which the noise depends on.
        keys: the rows' noise keys.
        filters: temperature, top_k, top_p and min_p (`Filters`), or None to draft greedily.
        confidence, headroom: `confidence` and HEADROOM of a chain (bass_core/draft/chain.py); 0 for none.
        soft: whether distributions are wanted.
        keep: whether the logits of all levels are kept.
        pointing: the head's pointer.
    """

    most: Array
    fuse: Packed
    embedded: Array
    ids: Array
    keys: Keys
    filters: tuple[float, int, float, float] | None
    confidence: float
    headroom: float
    soft: bool
    keep: bool
    pointing: Pointing

    @cached_property
    def levels(self) -> int:
        """The largest entry of `most`."""
        return int(self.most.max())


@dataclass(frozen=True)
class Drafted:
    """The drafts of a chain.

    Attributes:
        columns: int64 [levels, B], the drafts as columns of the head's vocabulary.
        probs: float32 [levels, B, V'], the distribution of each draft, zeros without a draft; empty, [0, B, V'],
            unless `soft`.
        alive: int64 [levels, B], the bits HAS_DRAFT and GOES_ON.
    """

    columns: Array
    probs: Array
    alive: Array

    @property
    def counts(self) -> list[int]:
        """Return the number of drafts of each row."""
        return [sum(bits & HAS_DRAFT for bits in row) for row in self.alive.T.tolist()]

    @property
    def forwards(self) -> int:
        """Return the number of forwards that the chain took."""
        return 1 + sum(max(level) >= GOES_ON for level in self.alive[:-1].tolist())


class DrawSettings(NamedTuple):
    """How tokens are chosen: the numbers of `Filters`, and the confidence that a draft needs (HeadDrafter's)."""

    factor: Any
    top_k: Any
    top_p: Any
    min_p: Any
    confidence: Any
    headroom: Any


class Plans(NamedTuple):
    """The attention plans of all levels after the first, one after another (attention/plan.py).

    Attributes:
        items, tokens, orders: as `planned` makes them.
        ends: int64 [levels]; the items of plan i are items[ends[i] : ends[i + 1]].
    """

    items: Array
    tokens: Array
    orders: Array
    ends: Array


class ChainArguments(NamedTuple):
    """A Chain for the kernels: its fields, the arrays of its result, and scratch.

    Attributes:
        most, embedded, ids, keys, soft, pointing: the Chain's fields of the same names.
        row: the address of `distribution_row` if soft, else 0.
        fuse: the Line of the fusing layer.
        draws: how tokens are chosen.
        greedy: whether the likeliest token is taken.
        columns, probs, alive: the arrays of the result (Drafted), which the kernel fills in.
        lengths: int64 [levels, B], the rows' lengths before each level.
        firsts: int64 [B + 1], the first token of each row when every row has one token.
        starts: int64 [blocks + 1], the blocks of these tokens (products.py).
        chain_probs: float32 [B], the probability of a row's drafts so far, 1 at first.
        inputs: float32 [B x 2 hidden], scratch for [embedding, state].
        plans: the attention of later levels.
    """

    most: Array
    row: int
    fuse: Line
    embedded: Array
    ids: Array
    keys: Keys
    draws: DrawSettings
    greedy: bool
    soft: bool
    columns: Array
    probs: Array
    alive: Array
    lengths: Array
    firsts: Array
    starts: Array
    chain_probs: Array
    inputs: Array
    plans: Plans
    pointing: Pointing


def chain_arguments(
    chain: Chain, lengths: Array, hidden: int, plans: list[tuple[Array, ...]], starts: Array
) -> tuple[ChainArguments, Drafted]:
    """Return the kernel's argument, and the result that it writes to.

    Args:
        lengths: int64 [B], the rows' lengths with their newest tokens.
        hidden: size of a state.
        plans: the attention plans of all levels but the last.
        starts: the blocks of one token per row (products.py).
    """
    rows, levels, size = len(chain.most), chain.levels, len(chain.ids)
    filters = Filters(1.0) if chain.filters is None else Filters(*chain.filters)
    drafted = Drafted(
        columns=np.zeros((levels, rows), np.int64),
        probs=np.zeros((levels if chain.soft else 0, rows, size), np.float32),
        alive=np.zeros((levels, rows), np.int64),
    )
    items, tokens, orders = (np.concatenate(parts) for parts in zip(NO_PLAN, *plans, strict=True))
    ends = np.cumsum([0, *(len(plan[0]) for plan in plans)])
    return ChainArguments(
        most=chain.most,
        row=address_of_row() if chain.soft else 0,
        fuse=chain.fuse.line,
        embedded=chain.embedded.ravel(),
        ids=chain.ids,
        keys=chain.keys,
        draws=DrawSettings(*filters.numbers(), np.float32(chain.confidence), np.float32(chain.headroom)),
        greedy=chain.filters is None,
        soft=chain.soft,
        columns=drafted.columns,
        probs=drafted.probs.ravel(),
        alive=drafted.alive,
        lengths=lengths + np.arange(levels, dtype=np.int64)[:, None],
        firsts=np.arange(rows + 1),
        starts=starts,
        chain_probs=np.ones(rows, np.float32),
        inputs=np.empty(rows * 2 * hidden, np.float32),
        plans=Plans(items, tokens, orders, ends),
        pointing=chain.pointing,
    ), drafted


# The keys of greedy drafts.
NO_KEYS = Keys(0, _NO_IDS, _NO_IDS, _NO_IDS)


def _no_levels() -> ChainArguments:
    table, flat = np.empty((0, 0), np.int64), np.empty(0, np.float32)
    return ChainArguments(
        most=_NO_IDS, row=0, fuse=NO_LINE, embedded=flat, ids=_NO_IDS, keys=NO_KEYS,
        draws=DrawSettings(*Filters(1.0).numbers(), np.float32(0), np.float32(0)), greedy=True, soft=False,
        columns=table, probs=flat, alive=table, lengths=table, firsts=_NO_IDS, starts=_NO_IDS, chain_probs=flat,
        inputs=flat, plans=Plans(*NO_PLAN, _NO_IDS), pointing=Pointing(table, _NO_IDS, _NO_IDS, flat, flat, 0),
    )  # fmt: skip


# The argument of a call without a chain.
NO_CHAIN = _no_levels()


@helper
def choose(state, phase, level, chain, logits, stride, states, wanted, hidden):
    """Choose a token of each row from its newest logits [B, stride]; return whether any row goes on: one phase.

    The pointer raises the logits first. states, wanted: as for `feed`.
    """
    rows, size, draws = len(chain.most), len(chain.ids), chain.draws
    probs, chain_probs, uniforms, scratch = (
        chain.probs,
        chain.chain_probs,
        np.empty(BLOCK, np.float32),
        scratch_for(size),
    )
    while True:
        row = claim(state, phase)
        if row >= rows:
            break
        at = (level * rows + row) * size
        has_draft = chain.most[row] > level and (level == 0 or chain.alive[level - 1, row] & GOES_ON != 0)
        _raise_pointed(chain, level, row, logits, row * stride, states, wanted[row] * hidden)
        if chain.soft and has_draft:
            filters = draws.factor, draws.top_k, draws.top_p, draws.min_p
            call_row(np.uintp(chain.row), logits, row * stride, size, filters, probs, at, scratch)
        column = first_largest(logits, row * stride, size, scratch[0])
        if draws.confidence > 0:
            has_draft = has_draft and chain_probs[row] * probs[at + column] >= draws.confidence
        if has_draft and not chain.greedy:
            keys = chain.keys
            first, second, _, _ = key_words(
                keys.seed, keys.sequences[row], keys.positions[row] + level, keys.streams[row]
            )
            column = draw_row(probs, at, size, chain.ids, True, first, second, uniforms)
        chain.columns[level, row] = column
        if draws.confidence > 0:
            chain_probs[row] *= probs[at + column]
        goes_on = (
            has_draft
            and chain.most[row] > level + 1
            and (draws.confidence == 0 or chain_probs[row] >= draws.headroom)
        )
        chain.alive[level, row] = (HAS_DRAFT if has_draft else 0) + (GOES_ON if goes_on else 0)
        done(state, phase)
    wait(state, phase, rows)
    return chain.alive[level].max() >= GOES_ON


@helper
def _raise_pointed(chain, level, row, logits, start, states, at):
    """Raise the token after the longest earlier match of the row's last tokens; on ties, the most recent match."""
    text, lengths, column_of, weight, by_size, shortest = chain.pointing
    end, longest = lengths[row], shortest + len(by_size) - 1
    newest, best, following = _token(chain, end, level, row, 0), 0, 0
    for stop in range(end - 2, -1, -1):
        if text[row, stop] == newest:
            size = 1
            while size < min(longest, stop + 1, end + level) and text[row, stop - size] == _token(
                chain, end, level, row, size
            ):
                size += 1
            if size > best:
                best, following = size, text[row, stop + 1]
            if best == longest:
                break
    if best < shortest or column_of[following] < 0:
        return
    total = 0.0
    for i in range(len(weight)):
        total += np.float64(states[at + i]) * np.float64(weight[i])
    logits[start + column_of[following]] += np.float32(total) + by_size[best - shortest]


@helper
def _token(chain, end, level, row, back):
    """Return a row's token `back` places before its last one; the row's first `level` drafts count as tokens."""
    if back < level:
        return chain.ids[chain.columns[level - 1 - back, row]]
    return chain.pointing.text[row, end - 1 - (back - level)]


@helper
def feed(
    state, phase, threads, level, chain, states, wanted, hidden, vectors_u16, vectors_f32, x, next_u16, next_f32
):
    """Make the body's inputs x [B, hidden] from each row's newest token and the state before it: two phases.

    states [N, hidden]: the states that the body has computed; wanted[b] is the index of row b's newest one.
    """
    rows, line, starts, inputs = len(chain.most), chain.fuse, chain.starts, chain.inputs
    while True:
        row = claim(state, phase)
        if row >= rows:
            break
        at = 2 * hidden * row
        copy(chain.embedded, chain.columns[level, row] * hidden, inputs, at, hidden)
        copy(states, wanted[row] * hidden, inputs, at + hidden, hidden)
        to, width = vector_position(row, starts, line.steps)
        pack(inputs, at, 2 * hidden, vectors_u16, vectors_f32, line.form, to, width)
        done(state, phase)
    wait(state, phase, rows)
    form = line.form
    product(
        state, phase + 1, threads, line, starts, vectors_u16, vectors_f32, x, PLAIN, x, next_u16, next_f32, form
    )


@helper
def later_plan(chain, level, plan):
    """Return the attention plan after level `level`; of `plan`, we use only an empty array."""
    rows, plans, no_tree = len(chain.most), chain.plans, plan[4][:0]
    at, end = level * rows, (level + 1) * rows
    items = plans.items[plans.ends[level] : plans.ends[level + 1]]
    return items, plans.tokens[at:end], plans.orders[at:end], no_tree, no_tree


@kernel
def _inputs(state, threads, raw, hidden, ones, embedded, project, fuse, starts, vectors, states, scratch, x):
    vectors_u16, vectors_f32, next_u16, next_f32 = vectors
    tokens = starts[-1]
    parts = len(raw) // (tokens * hidden)
    # Project the raw states first, unless the head reads them as they are. Then fuse.
    for first in range(0 if project.data else 1, 2):
        line = fuse if first else project
        while True:
            token = claim(state, 2 * first)
            if token >= tokens:
                break
            to, width = vector_position(token, starts, line.steps)
            if first == 0:
                for part in range(parts - 1):
                    at = (token * parts + part) * hidden
                    norm(raw, at, hidden, ones, 0, np.float32(1e-6), raw, at)
                pack(raw, token * parts * hidden, parts * hidden, vectors_u16, vectors_f32, line.form, to, width)
            else:
                at = token * 2 * hidden
                copy(embedded, token * hidden, scratch, at, hidden)
                copy(states, token * hidden, scratch, at + hidden, hidden)
                pack(scratch, at, 2 * hidden, vectors_u16, vectors_f32, line.form, to, width)
            done(state, 2 * first)
        wait(state, 2 * first, tokens)
        out = x if first else states
        product(
            state, 2 * first + 1, threads, line, starts, vectors_u16, vectors_f32, out, PLAIN, out, next_u16,
            next_f32, line.form,
        )  # fmt: skip


def inputs(raw: Array, embedded: Array, project: Packed | None, fuse: Packed) -> Array:
    """Return the body's inputs [N, hidden], float32.

    Args:
        raw: float32 [N, (layers + 1) x hidden], the residual stream of each layer, then the last state
            (HiddenStateTap.finish in bass_core/model/base.py). It is overwritten.
        embedded: float32 [N, hidden], the embeddings.
        project: the layer that projects raw states, or None if they need none.
    """
    tokens, hidden = embedded.shape
    layers = [fuse] if project is None else [project, fuse]
    numbers = tokens * STEP * max(layer.line.steps for layer in layers)
    states = raw if project is None else np.empty_like(embedded)
    x, scratch = np.empty_like(embedded), np.empty(2 * embedded.size, np.float32)
    pool.run(
        _inputs, 4, raw.ravel(), hidden, np.ones(hidden, np.float32), embedded.ravel(),
        NO_LINE if project is None else project.line, fuse.line,
        blocks_of(tokens, min(layer.columns for layer in layers)),
        (*vector_buffers(numbers), *vector_buffers(STEP)), states.ravel(), scratch, x.ravel(),
    )  # fmt: skip
    return x


def can_feed(fuse: Packed, hidden: int, vectors: int) -> bool:
    """Return whether `feed` can write this layer's inputs and outputs.

    vectors: the size of the largest vector that the buffers can hold.
    """
    return fuse.inputs == 2 * hidden <= vectors and fuse.rows == hidden and hidden % PANEL == 0
