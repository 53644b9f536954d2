"""The levels of a chain of drafts inside one compiled call: choose each row's token, and feed it.

Contract: `inputs` makes the first level's inputs, in a call of its own. `choose` is a phase that takes one token
of each row from its newest logits, and says which rows go on; `feed` are two phases that make the body's next
inputs. Tokens, distributions and inputs have the same bits as those that bass_core/draft/head.py makes level by
level of the same logits. A level is left out for all rows where none goes on, and every thread finds that in
`alive`, which is written once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .calls import pool
from .calls.jit import helper, kernel
from .calls.threads import claim, done, wait
from .elements import copy, norm, pack, place
from .kinds import PANEL, STEP
from .packing import NO_LINE, Line, Packed
from .products import PLAIN, blocks_of, product, scratch
from .sampling.calls import Filters
from .sampling.distribution import distribution_row, first_largest, room_for
from .sampling.draws import BLOCK, draw_row

Array = np.ndarray[Any, Any]
_NONE = np.empty(0, np.int64)
# Bits of `alive`: whether a row has its draft of a level, and whether it goes on after it.
HAS_DRAFT, GOES_ON = 1, 2
# Items, tokens and their order.
NO_PLAN = np.empty((0, 6), np.int64), np.empty((0, 5), np.int64), _NONE


class Pointing(NamedTuple):
    """A head's pointer (bass_core/model/pointer.py): what it searches, and by how much it raises a logit.

    text int64 [rows, T], lengths int64 [B]: the rows' texts. columns int64 [V]: the head's columns of the target's
    ids, -1 for those that it does not have. weight float32 [hidden]: of a state. by_size float32: of matches of
    `shortest` tokens and more; longer ones than the last are not told from it.
    """

    text: Array
    lengths: Array
    columns: Array
    weight: Array
    by_size: Array
    shortest: int


@dataclass(frozen=True)
class Chain:
    """What a head that reads its own states drafts.

    most int64 [B], the largest above 0: how many drafts a row may have. fuse: makes inputs of [embedding, state].
    embedded float32 [V', hidden]: the embeddings of its vocabulary. ids int64 [V']: what its columns stand for,
    which the noise goes by. words int64 [2, levels, B]: of the noise's keys. filters: temperature, top_k, top_p
    and min_p (`Filters`), or None to draft greedily.
    confidence, headroom: HeadDrafter's, 0 for none; soft: whether distributions are wanted; keep: whether all
    levels' logits are.
    """

    most: Array
    fuse: Packed
    embedded: Array
    ids: Array
    words: Array
    filters: tuple[float, int, float, float] | None
    confidence: float
    headroom: float
    soft: bool
    keep: bool
    pointing: Pointing

    @property
    def levels(self) -> int:
        """The most drafts of any row."""
        return int(self.most.max())


@dataclass(frozen=True)
class Drafted:
    """What a chain drafted.

    Attributes:
        columns: int64 [levels, B], the drafts as columns of the head's vocabulary.
        probs: float32 [levels, B, V'], what each was drawn from; empty, [0, B, V'], unless `soft`.
        alive: int64 [levels, B], the bits HAS_DRAFT and GOES_ON.
    """

    columns: Array
    probs: Array
    alive: Array

    @property
    def counts(self) -> list[int]:
        """How many drafts each row has."""
        counts: list[int] = (self.alive & HAS_DRAFT).sum(0).tolist()
        return counts

    @property
    def forwards(self) -> int:
        """How many forwards were made."""
        return 1 + int((self.alive[:-1] & GOES_ON).any(1).sum())


class Draws(NamedTuple):
    """How a token is chosen: the numbers of `Filters`, and the confidence that a draft needs (HeadDrafter's)."""

    factor: Any
    top_k: Any
    top_p: Any
    min_p: Any
    confidence: Any
    headroom: Any


class Plans(NamedTuple):
    """The attention plans of all levels after the first, one after the other (attention/plan.py).

    Attributes:
        items, tokens, orders: as `planned` makes them.
        ends: int64 [levels]; the items of plan i are items[ends[i] : ends[i + 1]].
    """

    items: Array
    tokens: Array
    orders: Array
    ends: Array


class Levels(NamedTuple):
    """A Chain for the kernels: its fields, the arrays of its result, and scratch.

    Attributes:
        most, embedded, ids, words, soft, pointing: the Chain's.
        fuse: the Line of the fusing layer.
        draws: how tokens are chosen.
        greedy: whether the likeliest token is taken.
        columns, probs, alive: the arrays of the Drafted.
        lengths: int64 [levels, B], the rows' lengths before each level.
        firsts: int64 [B + 1], the first token of each row where each has one.
        starts: int64 [blocks + 1], the blocks of these tokens (products.py).
        sure: float32 [B], how likely a row's drafts so far are, 1 at first.
        inputs: float32 [B x 2 hidden], scratch for [embedding, state].
        plans: the attention of later levels.
    """

    most: Array
    fuse: Line
    embedded: Array
    ids: Array
    words: Array
    draws: Draws
    greedy: bool
    soft: bool
    columns: Array
    probs: Array
    alive: Array
    lengths: Array
    firsts: Array
    starts: Array
    sure: Array
    inputs: Array
    plans: Plans
    pointing: Pointing


def arguments(
    chain: Chain, lengths: Array, hidden: int, plans: list[tuple[Array, ...]], starts: Array
) -> tuple[Levels, Drafted]:
    """The kernel's argument, and what it writes.

    Args:
        chain: what to draft.
        lengths: int64 [B], of the rows, their newest tokens included.
        hidden: numbers of a state.
        plans: attention/plan.py's of all levels but the last.
        starts: the blocks of one token per row (products.py).
    """
    rows, levels, size = len(chain.most), chain.levels, len(chain.ids)
    filters = Filters(1.0) if chain.filters is None else Filters(*chain.filters)
    drafted = Drafted(
        columns=np.zeros((levels, rows), np.int64),
        probs=np.empty((levels if chain.soft else 0, rows, size), np.float32),
        alive=np.zeros((levels, rows), np.int64),
    )
    items, tokens, orders = (np.concatenate(parts) for parts in zip(NO_PLAN, *plans, strict=True))
    ends = np.cumsum([0, *(len(plan[0]) for plan in plans)])
    return Levels(
        most=chain.most,
        fuse=chain.fuse.line(),
        embedded=chain.embedded.ravel(),
        ids=chain.ids,
        words=chain.words,
        draws=Draws(*filters.numbers(), np.float32(chain.confidence), np.float32(chain.headroom)),
        greedy=chain.filters is None,
        soft=chain.soft,
        columns=drafted.columns,
        probs=drafted.probs.ravel(),
        alive=drafted.alive,
        lengths=lengths + np.arange(levels, dtype=np.int64)[:, None],
        firsts=np.arange(rows + 1),
        starts=starts,
        sure=np.ones(rows, np.float32),
        inputs=np.empty(rows * 2 * hidden, np.float32),
        plans=Plans(items, tokens, orders, ends),
        pointing=chain.pointing,
    ), drafted


def _no_levels() -> Levels:
    table, flat = np.empty((0, 0), np.int64), np.empty(0, np.float32)
    return Levels(
        most=_NONE,
        fuse=NO_LINE,
        embedded=flat,
        ids=_NONE,
        words=np.empty((2, 0, 0), np.int64),
        draws=Draws(*Filters(1.0).numbers(), np.float32(0), np.float32(0)),
        greedy=True,
        soft=False,
        columns=table,
        probs=flat,
        alive=table,
        lengths=table,
        firsts=_NONE,
        starts=_NONE,
        sure=flat,
        inputs=flat,
        plans=Plans(*NO_PLAN, _NONE),
        pointing=Pointing(table, _NONE, _NONE, flat, flat, 0),
    )


# The argument of a call without a chain.
NO_CHAIN = _no_levels()


@helper
def choose(state, phase, level, chain, logits, stride, states, wanted, hidden):
    """A phase: a column of each row of logits [B, stride], the newest ones; returns whether any row goes on.

    The pointer raises the logits first. states, wanted: as for `feed`.
    """
    rows, size, draws = len(chain.most), len(chain.ids), chain.draws
    probs, sure, uniforms, memory = chain.probs, chain.sure, np.empty(BLOCK, np.float32), room_for(size)
    while True:
        row = claim(state, phase)
        if row >= rows:
            break
        at = (level * rows + row) * size
        goes = chain.most[row] > level and (level == 0 or chain.alive[level - 1, row] & GOES_ON != 0)
        _raise(chain, level, row, logits, row * stride, states, wanted[row] * hidden)
        if chain.soft:
            filters = draws.factor, draws.top_k, draws.top_p, draws.min_p
            distribution_row(logits, row * stride, size, filters, probs, at, memory)
        column = first_largest(logits, row * stride, size, memory[0])
        if draws.confidence > 0:
            goes = goes and sure[row] * probs[at + column] >= draws.confidence
        if not chain.greedy:
            first, second = chain.words[0, level, row], chain.words[1, level, row]
            column = draw_row(probs, at, size, chain.ids, True, first, second, uniforms)
        chain.columns[level, row] = column
        if draws.confidence > 0:
            sure[row] *= probs[at + column]
        more = goes and chain.most[row] > level + 1 and (draws.confidence == 0 or sure[row] >= draws.headroom)
        chain.alive[level, row] = (HAS_DRAFT if goes else 0) + (GOES_ON if more else 0)
        done(state, phase)
    wait(state, phase, rows)
    return chain.alive[level].max() >= GOES_ON


@helper
def _raise(chain, level, row, logits, start, states, at):
    """Raise what followed the longest earlier match of the row's last tokens, of several the newest."""
    text, lengths, column_of, weight, by_size, shortest = chain.pointing
    end, longest = lengths[row], shortest + len(by_size) - 1
    newest, best, behind = _token(chain, end, level, row, 0), 0, 0
    for stop in range(end - 2, -1, -1):
        if text[row, stop] == newest:
            size = 1
            while size < min(longest, stop + 1, end + level) and text[row, stop - size] == _token(
                chain, end, level, row, size
            ):
                size += 1
            if size > best:
                best, behind = size, text[row, stop + 1]
            if best == longest:
                break
    if best < shortest or column_of[behind] < 0:
        return
    total = 0.0
    for i in range(len(weight)):
        total += np.float64(states[at + i]) * np.float64(weight[i])
    logits[start + column_of[behind]] += np.float32(total) + by_size[best - shortest]


@helper
def _token(chain, end, level, row, back):
    """The row's last token but `back`, after `level` drafts."""
    if back < level:
        return chain.ids[chain.columns[level - 1 - back, row]]
    return chain.pointing.text[row, end - 1 - (back - level)]


@helper
def feed(state, phase, threads, level, chain, states, wanted, hidden, short, wide, x, other, another):
    """Two phases: the body's inputs x [B, hidden] of each row's newest token and of the state before it.

    states [N, hidden]: the body's, of which row b's newest is wanted[b].
    """
    rows, line, starts, inputs = len(chain.most), chain.fuse, chain.starts, chain.inputs
    while True:
        row = claim(state, phase)
        if row >= rows:
            break
        at = 2 * hidden * row
        copy(chain.embedded, chain.columns[level, row] * hidden, inputs, at, hidden)
        copy(states, wanted[row] * hidden, inputs, at + hidden, hidden)
        to, width = place(row, starts, line.steps)
        pack(inputs, at, 2 * hidden, short, wide, line.form, to, width)
        done(state, phase)
    wait(state, phase, rows)
    product(state, phase + 1, threads, line, starts, short, wide, x, PLAIN, x, other, another, 0)


@helper
def further(chain, level, plan):
    """The plan of the attention after level `level`; plan: of the step before, for its types."""
    rows, plans, none = len(chain.most), chain.plans, plan[4][:0]
    at, end = level * rows, (level + 1) * rows
    items = plans.items[plans.ends[level] : plans.ends[level + 1]]
    return items, plans.tokens[at:end], plans.orders[at:end], none, none


@kernel
def _inputs(state, threads, raw, hidden, ones, embedded, project, fuse, starts, vectors, states, room, x):
    short, wide, other, another = vectors
    tokens = starts[-1]
    parts = len(raw) // (tokens * hidden)
    # Without a projection the states are the raw ones.
    for first in range(0 if project.data else 1, 2):
        line = fuse if first else project
        while True:
            token = claim(state, 2 * first)
            if token >= tokens:
                break
            to, width = place(token, starts, line.steps)
            if first == 0:
                for part in range(parts - 1):
                    at = (token * parts + part) * hidden
                    norm(raw, at, hidden, ones, 0, np.float32(1e-6), raw, at)
                pack(raw, token * parts * hidden, parts * hidden, short, wide, line.form, to, width)
            else:
                at = token * 2 * hidden
                copy(embedded, token * hidden, room, at, hidden)
                copy(states, token * hidden, room, at + hidden, hidden)
                pack(room, at, 2 * hidden, short, wide, line.form, to, width)
            done(state, 2 * first)
        wait(state, 2 * first, tokens)
        out = x if first else states
        product(state, 2 * first + 1, threads, line, starts, short, wide, out, PLAIN, out, other, another, 0)


def inputs(raw: Tensor, embedded: Tensor, project: Packed | None, fuse: Packed) -> Tensor:
    """The body's inputs [N, hidden], of raw states [N, (layers + 1) x hidden] and embeddings [N, hidden], float32.

    raw, which is overwritten: of each layer the residual stream, then the last state (HiddenStateTap.finish in
    bass_core/model/base.py).
    """
    tokens, hidden = embedded.shape
    steps = max(one.line().steps for one in (project, fuse) if one is not None)
    states = raw if project is None else torch.empty(tokens, hidden)
    x, room = torch.empty(tokens, hidden), np.empty(2 * tokens * hidden, np.float32)
    lines = [NO_LINE if one is None else one.line() for one in (project, fuse)]
    columns = min(one.columns for one in (project, fuse) if one is not None)
    pool.run(
        _inputs, 4, raw.view(-1).numpy(), hidden, np.ones(hidden, np.float32), embedded.reshape(-1).numpy(),
        *lines, blocks_of(tokens, columns), (*scratch(tokens * steps * STEP), *scratch(STEP)),
        states.view(-1).numpy(), room, x.view(-1).numpy(),
    )  # fmt: skip
    return x


def fits(fuse: Packed, hidden: int, vectors: int) -> bool:
    """Whether a layer's inputs and outputs lie as `feed` writes them; vectors: numbers that a vector may have."""
    return fuse.inputs == 2 * hidden <= vectors and fuse.rows == hidden and hidden % PANEL == 0
