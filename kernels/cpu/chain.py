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
from .packing import NO_LINE, Packed
from .products import PLAIN, blocks_of, product, scratch
from .sampling.calls import Filters
from .sampling.distribution import distribution_row, room_for
from .sampling.draws import BLOCK, draw_row

Array = np.ndarray[Any, Any]
_NONE = np.empty(0, np.int64)
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
    """columns int64 [levels, B] of the vocabulary; probs float32 [levels, B, V'] where they are wanted; alive
    int64 [levels, B]: whether a row has its draft of a level (1), and goes on after it (2 more)."""

    columns: Array
    probs: Array
    alive: Array

    @property
    def counts(self) -> list[int]:
        """How many drafts each row has."""
        counts: list[int] = (self.alive & 1).sum(0).tolist()
        return counts

    @property
    def forwards(self) -> int:
        """How many forwards were made."""
        return 1 + int((self.alive[:-1].max(1) == 3).sum())


def arguments(
    chain: Chain, lengths: Array, hidden: int, plans: list[tuple[Array, ...]], starts: Array
) -> tuple[tuple[Any, ...], Drafted]:
    """The kernel's argument, and what it writes.

    lengths int64 [B]: of the rows, their newest tokens included. plans: attention/plan.py's of all levels but the
    last. starts: the blocks of one token per row (products.py).
    """
    rows, levels, size = len(chain.most), chain.levels, len(chain.ids)
    greedy, how = chain.filters is None, Filters(1.0) if chain.filters is None else Filters(*chain.filters)
    numbers = (*how.numbers(), np.float32(chain.confidence), np.float32(chain.headroom))
    out = Drafted(
        np.zeros((levels, rows), np.int64),
        np.empty((levels if chain.soft else 0, rows, size), np.float32),
        np.zeros((levels, rows), np.int64),
    )
    after = lengths + np.arange(levels, dtype=np.int64)[:, None]
    items, places, orders = (np.concatenate(parts) for parts in zip(NO_PLAN, *plans, strict=True))
    ends = np.cumsum([0, *(len(plan[0]) for plan in plans)])
    room = np.empty(rows * (2 * hidden + 1), np.float32)
    room[:rows] = 1.0
    return (
        chain.most, chain.fuse.line(), chain.embedded.ravel(), chain.ids, chain.words, numbers, greedy,
        chain.soft, out.columns, out.probs.ravel(), out.alive, after, np.arange(rows + 1), starts, room,
        (items, places, orders, ends), tuple(chain.pointing),
    ), out  # fmt: skip


def _nothing() -> tuple[Any, ...]:
    table, flat = np.empty((0, 0), np.int64), np.empty(0, np.float32)
    words, numbers = np.empty((2, 0, 0), np.int64), (*Filters(1.0).numbers(), np.float32(0), np.float32(0))
    return (
        _NONE, NO_LINE, flat, _NONE, words, numbers, True, False, table, flat, table, table, _NONE, _NONE, flat,
        (*NO_PLAN, _NONE), (table, _NONE, _NONE, flat, flat, 0),
    )  # fmt: skip


# The argument of a call without a chain.
NO_CHAIN = _nothing()


@helper
def choose(state, phase, level, chain, logits, stride, states, wanted, hidden):
    """A phase: a column of each row of logits [B, stride], the newest ones; returns whether any row goes on.

    The pointer raises the logits first. states, wanted: as for `feed`.
    """
    most, _, _, ids, words, numbers, greedy, soft, columns, probs, alive, _, _, _, sure, _, pointing = chain
    rows, size = len(most), len(ids)
    (factor, top_k, top_p, min_p, confidence, headroom), uniforms = numbers, np.empty(BLOCK, np.float32)
    memory = room_for(size)
    while True:
        row = claim(state, phase)
        if row >= rows:
            break
        at = (level * rows + row) * size
        goes = most[row] > level and (level == 0 or alive[level - 1, row] == 3)
        _raise(pointing, level, row, ids, columns, logits, row * stride, states, wanted[row] * hidden)
        if soft:
            distribution_row(logits, row * stride, size, (factor, top_k, top_p, min_p), probs, at, memory)
        column = _largest(logits, row * stride, size)
        if confidence > 0:
            goes = goes and sure[row] * probs[at + column] >= confidence
        if not greedy:
            column = draw_row(probs, at, size, ids, True, words[0, level, row], words[1, level, row], uniforms)
        columns[level, row] = column
        if confidence > 0:
            sure[row] *= probs[at + column]
        more = goes and most[row] > level + 1 and (confidence == 0 or sure[row] >= headroom)
        alive[level, row] = (1 if goes else 0) + (2 if more else 0)
        done(state, phase)
    wait(state, phase, rows)
    return alive[level].max() == 3


@helper
def _raise(pointing, level, row, ids, columns, logits, start, states, at):
    """Raise what followed the longest earlier match of the row's last tokens, of several the newest."""
    text, lengths, column_of, weight, by_size, shortest = pointing
    end, longest = lengths[row], shortest + len(by_size) - 1
    newest, best, behind = _token(text, end, ids, columns, level, row, 0), 0, 0
    for stop in range(end - 2, -1, -1):
        if text[row, stop] == newest:
            size = 1
            while size < min(longest, stop + 1, end + level) and text[row, stop - size] == _token(
                text, end, ids, columns, level, row, size
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
def _token(text, end, ids, columns, level, row, back):
    """The row's last token but `back`, after `level` drafts."""
    if back < level:
        return ids[columns[level - 1 - back, row]]
    return text[row, end - 1 - (back - level)]


@helper
def _largest(x, start, size):
    """The first index of the largest of x[start : start + size]; NaN is passed over."""
    best, place, at = np.float32(-np.inf), 0, np.uintp(start)
    for i in range(size):
        if x[at + np.uintp(i)] > best:
            best, place = x[at + np.uintp(i)], i
    return place


@helper
def feed(state, phase, threads, level, chain, states, wanted, hidden, short, wide, x, other, another):
    """Two phases: the body's inputs x [B, hidden] of each row's newest token and of the state before it.

    states [N, hidden]: the body's, of which row b's newest is wanted[b].
    """
    most, line, embedded, _, _, _, _, _, columns, _, _, _, _, starts, room, _, _ = chain
    rows = len(most)
    while True:
        row = claim(state, phase)
        if row >= rows:
            break
        at = rows + 2 * hidden * row
        copy(embedded, columns[level, row] * hidden, room, at, hidden)
        copy(states, wanted[row] * hidden, room, at + hidden, hidden)
        to, width = place(row, starts, line.steps)
        pack(room, at, 2 * hidden, short, wide, line.form, to, width)
        done(state, phase)
    wait(state, phase, rows)
    product(state, phase + 1, threads, line, starts, short, wide, x, PLAIN, x, other, another, 0)


@helper
def further(chain, level, plan):
    """The plan of the attention after level `level`; plan: of the step before, for its types."""
    rows, (items, places, orders, ends), none = len(chain[0]), chain[15], plan[4][:0]
    at, end = level * rows, (level + 1) * rows
    return items[ends[level] : ends[level + 1]], places[at:end], orders[at:end], none, none


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
        *lines, blocks_of(tokens, columns), (*scratch(tokens * steps * STEP), *scratch(STEP)), states.view(-1).numpy(),
        room, x.view(-1).numpy(),
    )  # fmt: skip
    return x


def fits(fuse: Packed, hidden: int, vectors: int) -> bool:
    """Whether a layer's inputs and outputs lie as `feed` writes them; vectors: numbers that a vector may have."""
    return fuse.inputs == 2 * hidden <= vectors and fuse.rows == hidden and hidden % PANEL == 0
