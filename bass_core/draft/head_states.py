"""The states that a draft head reads: slot t of a row's text reads the state of token t - 1.

Contract: both kinds hold the states of a batch's rows, 0..B-1. `SettledStates` has the target's alone, each until
it is read, once. `StandInStates` keeps all states of a row: the target's where `observe` has brought them, the
head's own until then.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..machine.transfer import to_device
from ..sample.rows import cat


class SettledStates:
    """The target's states of settled tokens, in the order in which the slots that read them are fed.

    finish: makes states of raw ones [..., more than hidden] when they are read (HiddenStateTap.finish).
    """

    def __init__(
        self, rows: int, hidden: int, device: torch.device, finish: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.hidden, self.device, self.finish = hidden, device, finish
        # Nothing stands before the first token.
        self._waiting = [[torch.zeros(1, hidden, dtype=torch.float32, device=device)] for _ in range(rows)]

    def observe(self, states: list[Tensor]) -> None:
        """states[r] [k, hidden] of the next k tokens of row r; copied: the target's next step writes over them."""
        kept = cat(states).split([len(new) for new in states])
        for waiting, new in zip(self._waiting[: len(states)], kept, strict=True):
            waiting.append(new)

    def read(self, counts: list[int]) -> Tensor:
        """The states [B, max(counts), hidden] for each row's next counts[r] slots; zeros after them."""
        return self._padded(self.take(counts), counts)

    def take(self, counts: list[int]) -> list[list[Tensor]]:
        """Of each row the pieces of its next counts[r] slots, as they were observed."""
        pieces = []
        for r, count in enumerate(counts):
            taken, self._waiting[r] = _split(self._waiting[r], count)
            pieces.append(taken)
        return pieces

    def _padded(self, pieces: list[list[Tensor]], counts: list[int]) -> Tensor:
        found = iter(self._finished([piece for row in pieces for piece in row]))
        read = torch.zeros(len(counts), max(counts), self.hidden, dtype=torch.float32, device=self.device)
        for r, row in enumerate(pieces):
            at = 0
            for piece in row:
                read[r, at : at + len(piece)] = next(found)
                at += len(piece)
        return read

    def next(self, row: int, count: int) -> list[Tensor]:
        """The pieces of a row's next `count` slots, as they were observed, which may be read again."""
        return _split(self._waiting[row], count)[0]

    def finished(self, pieces: list[Tensor]) -> Tensor:
        """The states [N, hidden] of such pieces."""
        return cat(self._finished(pieces))

    def skip(self, row: int, count: int) -> None:
        """A row's next `count` slots need no states: another row has fed them."""
        self._waiting[row] = _split(self._waiting[row], count)[1]

    def rewind(self, row: int, count: int) -> None:
        """Of a row's waiting states only the first `count` are of text that was accepted."""
        self._waiting[row] = _split(self._waiting[row], count)[0]

    def move_row(self, source: int, target: int) -> None:
        """Row `source` takes the place of row `target`."""
        self._waiting[target] = self._waiting[source]

    def _finished(self, pieces: list[Tensor]) -> list[Tensor]:
        """The pieces, raw ones finished, all in one go."""
        raw = [piece for piece in pieces if piece.shape[-1] != self.hidden]
        if not raw:
            return pieces
        assert self.finish is not None
        made = iter(self.finish(cat(raw)).split([len(piece) for piece in raw]))
        return [piece if piece.shape[-1] == self.hidden else next(made) for piece in pieces]


def _split(waiting: list[Tensor], count: int) -> tuple[list[Tensor], list[Tensor]]:
    """The first `count` states of a row, and those after them."""
    first, rest = list[Tensor](), list[Tensor]()
    for piece in waiting:
        few = min(count, len(piece))
        count -= few
        first += [piece[:few]] if few else []
        rest += [piece[few:]] if few < len(piece) else []
    assert count == 0, "each slot has the state before it"
    return first, rest


class StandInStates:
    """States [length, hidden] of each row's text: the target's of its first tokens, after them the head's own."""

    def __init__(self, rows: int, length: int, hidden: int, device: torch.device) -> None:
        self.values = torch.zeros(rows, length, hidden, dtype=torch.float32, device=device)
        # By row: where its states lie, of how many leading tokens the target's are here, and of how many any are.
        self._places = list(range(rows))
        self._observed = [0] * rows
        self._known = [0] * rows

    def observe(self, states: list[Tensor]) -> dict[int, int]:
        """states[r] [k, hidden] of the next k tokens of row r replace the head's own.

        Returns, for each row with k > 0, the first slot that has to be fed again.
        """
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
            # Slot 0 reads no state, but before anything was observed it has not been fed either.
            changed[r] = first + 1 if first else 0
        if places:
            self._store(places, columns, cat(states))
        return changed

    def complete(self, row: int, length: int) -> bool:
        """Whether each of the first `length` slots of a row has a state to read."""
        return length - 1 <= self._known[row]

    def read(self, starts: list[int], width: int) -> Tensor:
        """The states [B, width, hidden] for the slots from starts[r] on; zeros before the first token."""
        device, last = self.values.device, self.values.shape[1]
        columns = to_device([[min(start + i, last) - 1 for i in range(width)] for start in starts], device)
        places = to_device(self._places[: len(starts)], device)
        before = self.values[places[:, None], columns.clamp(min=0)]
        return before.masked_fill((columns < 0)[..., None], 0.0) if 0 in starts else before

    def keep(self, rows: list[int], lengths: list[int], states: Tensor) -> None:
        """The head's own states [len(rows), hidden] of the last of each row's lengths[i] tokens stand in."""
        self._store([self._places[r] for r in rows], [length - 1 for length in lengths], states)
        for r, length in zip(rows, lengths, strict=True):
            self._known[r] = length

    def rewind(self, row: int, length: int) -> None:
        """The states of the tokens from `length` on are of a text that was taken back."""
        self._known[row] = min(self._known[row], length)
        self._observed[row] = min(self._observed[row], length)

    def move_row(self, source: int, target: int) -> None:
        """Row `source` takes the place of row `target`, whose memory it leaves in exchange."""
        places = self._places
        places[source], places[target] = places[target], places[source]
        self._observed[target], self._known[target] = self._observed[source], self._known[source]

    def _store(self, places: list[int], columns: list[int], states: Tensor) -> None:
        device = self.values.device
        self.values[to_device(places, device), to_device(columns, device)] = states.float()
