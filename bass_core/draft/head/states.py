"""The states that a draft head reads: position t of a row's text reads the state of token t - 1.

`SettledStates` stores only the target's states, each until it is read once. `StandInStates` stores all states of
a row: the target's if `observe` has delivered them, else the head's own.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from ...machine.transfer import to_device
from ...model.graphs import GraphRunner
from ...sample.rows import cat
from ..base import CommittedStates
from ..chain_graph import MAX_UNREAD

# Columns of the buffer for states of unread tokens. A round with the largest tree fills them all.
COLUMNS = 64


class SettledStates:
    """The target's states of written tokens, in the order in which they will be read.

    Args:
        hidden: size of a state.
        finish: turns raw states [..., more than hidden] into states when they are read (HiddenStateTap.finish).
    """

    def __init__(
        self, rows: int, hidden: int, device: torch.device, finish: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.hidden, self.device, self.finish = hidden, device, finish
        # There is no state before the first token of a text, so that token reads zeros.
        self._waiting = [[torch.zeros(1, hidden, dtype=torch.float32, device=device)] for _ in range(rows)]

    def observe(self, states: Seq[Tensor]) -> None:
        """Copy the states of the next k tokens of row r, states[r] [k, hidden].

        Copying is needed because the target's next step overwrites these states.
        """
        if isinstance(states, CommittedStates):
            copies = states.by_row
        else:
            copies = cat(list(states)).split([len(new) for new in states])
        for waiting, new in zip(self._waiting[: len(copies)], copies, strict=True):
            waiting.append(new)

    def waiting(self, rows: int) -> list[int]:
        """Return the number of states that each of the first rows has to read."""
        return [sum(map(len, pieces)) for pieces in self._waiting[:rows]]

    def take(self, counts: list[int]) -> list[list[Tensor]]:
        """Remove and return the states for the next counts[r] tokens of each row, in pieces as observed."""
        return [self._take(r, count) for r, count in enumerate(counts)]

    def padded(self, pieces: list[list[Tensor]], counts: list[int]) -> Tensor:
        """Return the finished states [B, max(counts), hidden] of pieces from `take` or `next`, then zeros."""
        finished = iter(self._finish_all([piece for row in pieces for piece in row]))
        read = torch.zeros(len(counts), max(counts), self.hidden, dtype=torch.float32, device=self.device)
        for r, row in enumerate(pieces):
            at = 0
            for piece in row:
                read[r, at : at + len(piece)] = next(finished)
                at += len(piece)
        return read

    def next(self, row: int, count: int) -> list[Tensor]:
        """Return the states for a row's next `count` tokens, in pieces as observed, without removing them."""
        return _split(self._waiting[row], count)[0]

    def skip(self, row: int, count: int) -> None:
        """Drop the states for a row's next `count` tokens, which the head was fed in another row."""
        self._take(row, count)

    def rewind(self, row: int, count: int) -> None:
        """Keep only a row's first `count` unread states, because the tokens after them were rolled back."""
        self._waiting[row] = _split(self._waiting[row], count)[0]

    def move_row(self, source: int, target: int) -> None:
        """Let row `source` take the place of row `target`."""
        self._waiting[target] = self._waiting[source]

    def _take(self, row: int, count: int) -> list[Tensor]:
        first, rest = _split(self._waiting[row], count)
        # Copy a part of a piece, because it would keep the memory of the whole piece: that of all rows' prompts.
        self._waiting[row] = [rest[0].clone(), *rest[1:]] if count and rest else rest
        return first

    def _finish_all(self, pieces: list[Tensor]) -> list[Tensor]:
        """Return the pieces with all raw ones finished, in one call."""
        raw = [piece for piece in pieces if piece.shape[-1] != self.hidden]
        if not raw:
            return pieces
        assert self.finish is not None
        finished = iter(self.finish(cat(raw)).split([len(piece) for piece in raw]))
        return [piece if piece.shape[-1] == self.hidden else next(finished) for piece in pieces]


def _split(waiting: list[Tensor], count: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the first `count` states of a row, and the states after them."""
    first, rest = list[Tensor](), list[Tensor]()
    for piece in waiting:
        # A tensor's len() takes several times as long.
        size = piece.shape[0]
        few = min(count, size)
        count -= few
        if 0 < few < size:
            first.append(piece[:few])
            rest.append(piece[few:])
        elif size:
            (first if few else rest).append(piece)
    assert count == 0, "each slot has the state before it"
    return first, rest


class StandInStates:
    """States [length, hidden] of each row's text: the target's for the first tokens, then the head's own."""

    def __init__(self, rows: int, length: int, hidden: int, device: torch.device) -> None:
        self.values = torch.zeros(rows, length, hidden, dtype=torch.float32, device=device)
        # Per row: its index in `values`, its number of states from the target, and its number of states in all,
        # with the head's own.
        self._places = list(range(rows))
        self._observed = [0] * rows
        self._known = [0] * rows

    def observe(self, states: Seq[Tensor]) -> dict[int, int]:
        """Replace the head's own states by the target's, states[r] [k, hidden] for the next k tokens of row r.

        Returns:
            The first position that has to be fed again, for each row with k > 0.
        """
        states = list(states)
        places: list[int] = []
        columns: list[int] = []
        changed = {}
        for r, new in enumerate(states):
            if not len(new):
                continue
            first = self._observed[r]
            self._observed[r] = first + len(new)
            self._known[r] = max(self._known[r], self._observed[r])
            places += [self._places[r]] * len(new)
            columns += range(first, first + len(new))
            # Feed again from the position after the first replaced state. The first time, nothing has been fed
            # yet, so begin at position 0.
            changed[r] = first + 1 if first else 0
        if places:
            self._store(places, columns, cat(states))
        return changed

    def complete(self, row: int, length: int) -> bool:
        """Return whether each of a row's first `length` positions has a state to read."""
        return length - 1 <= self._known[row]

    def read(self, starts: list[int], width: int) -> Tensor:
        """Return the states [B, width, hidden] for the positions from starts[r] on; position 0 reads zeros."""
        device, last = self.values.device, self.values.shape[1]
        columns = to_device([[min(start + i, last) - 1 for i in range(width)] for start in starts], device)
        places = to_device(self._places[: len(starts)], device)
        before = self.values[places[:, None], columns.clamp(min=0)]
        return before.masked_fill((columns < 0)[..., None], 0.0) if 0 in starts else before

    def keep(self, rows: list[int], lengths: list[int], states: Tensor) -> None:
        """Store the head's own states [len(rows), hidden] for the last of each row's lengths[i] tokens."""
        self._store([self._places[r] for r in rows], [length - 1 for length in lengths], states)
        for r, length in zip(rows, lengths, strict=True):
            self._known[r] = length

    def rewind(self, row: int, length: int) -> None:
        """Drop the states of the tokens from `length` on, because those tokens were rolled back."""
        self._known[row] = min(self._known[row], length)
        self._observed[row] = min(self._observed[row], length)

    def move_row(self, source: int, target: int) -> None:
        """Let row `source` take the place of row `target`, and swap their memory."""
        places = self._places
        places[source], places[target] = places[target], places[source]
        self._observed[target], self._known[target] = self._observed[source], self._known[source]

    def _store(self, places: list[int], columns: list[int], states: Tensor) -> None:
        device = self.values.device
        self.values[to_device(places, device), to_device(columns, device)] = states.float()


class UnreadStates:
    """The states before each row's unread tokens, on the device.

    They come from the target's rounds, whose states are copied whole, with those of rejected drafts. SettledStates
    has the states of the prompts.

    Attributes:
        states: [rows, COLUMNS, hidden].
        state_slots: for each row, the columns of its unread tokens' states.
    """

    def __init__(self, runner: GraphRunner, hidden: int, dtype: torch.dtype, rows: int) -> None:
        self.states = runner.buffer("unread", runner.cache.max_batch, COLUMNS, hidden, dtype=dtype)
        self.state_slots: list[list[int]] = [[] for _ in range(rows)]
        self._filled = 0

    @property
    def counts(self) -> list[int]:
        """How many unread tokens of each row have their states here."""
        return list(map(len, self.state_slots))

    def takes(self, states: CommittedStates) -> bool:
        """Return whether there is room for the states of a round's tokens."""
        counts = (len(a) + len(b) for a, b in zip(self.state_slots, states.columns, strict=False))
        return max(counts) <= MAX_UNREAD and self._filled + states.states.shape[1] <= COLUMNS

    def append(self, states: CommittedStates) -> None:
        """Copy the states of a round's tokens, if `takes` allows it."""
        batch, width = states.states.shape[:2]
        first = self._filled
        self.states[:batch, first : first + width].copy_(states.states)
        for slots, columns in zip(self.state_slots, states.columns, strict=False):
            slots += [first + column for column in columns]
        self._filled += width

    def fill(self, pieces: list[list[Tensor]]) -> None:
        """Copy each row's states from pieces [k, hidden]."""
        for r, row in enumerate(pieces):
            at = 0
            for piece in row:
                self.states[r, at : at + len(piece)].copy_(piece)
                at += len(piece)
            self.state_slots[r] = list(range(at))
            self._filled = max(self._filled, at)

    def pieces(self, rows: int) -> list[Tensor]:
        """Forget all states, and return those of the first rows."""
        pieces = [
            torch.cat([row[:0], *(row[slot : slot + 1] for slot in slots)])
            for row, slots in zip(self.states, self.state_slots[:rows], strict=False)
        ]
        self.clear()
        return pieces

    def clear(self) -> None:
        """Forget all states, also those of rows that have left."""
        self.state_slots, self._filled = [[] for _ in self.state_slots], 0

    def move_row(self, source: int, target: int) -> None:
        """Let row `source` take the place of row `target`."""
        if self.state_slots[source]:
            self.states[target].copy_(self.states[source])
        self.state_slots[target], self.state_slots[source] = self.state_slots[source], []
