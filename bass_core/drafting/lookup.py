"""Drafts copied from text that the batch has already written or been given.

Contract: drafters (drafting/base.py) that run no forward; their drafts are point masses. `PromptLookupDrafter`
reads the row's own text, `SiblingLookupDrafter` also that of the rows beside it.
"""

from __future__ import annotations

import torch

from ..budget.base import Offer
from ..engine.prefill import PrefillSteps
from ..sampling.noise import NoiseKeys
from ..sequence import Sequence
from .base import COPY, Drafter, Proposal, point_masses


class PromptLookupDrafter(Drafter):
    """Copies what followed the latest earlier occurrence of the row's last tokens (`shortest` to `longest`).

    The longest match wins. It is right most often where the answer repeats the prompt, or itself.
    """

    source = COPY
    reads_others = False

    def __init__(self, device: torch.device, longest: int = 4, shortest: int = 2) -> None:
        self.device, self.longest, self.shortest = device, longest, shortest
        self._tables: list[dict[tuple[int, ...], tuple[list[int], int]]] = []
        # By row, of each run behind the prompt: where it ended, and what its place in the table was before.
        self._replaced: list[list[tuple[int, tuple[int, ...], tuple[list[int], int] | None]]] = []
        self._prompts: list[int] = []
        self._indexed: list[int] = []

    def start(self, rows: list[Sequence]) -> PrefillSteps | None:
        self._tables = [{} for _ in rows]
        self._replaced = [[] for _ in rows]
        self._prompts = [len(row.prompt) for row in rows]
        self._indexed = [0 for _ in rows]
        return None

    def offers(self, rows: list[Sequence]) -> list[Offer]:
        """A copy where the text knows how to go on, else nothing."""
        for r, row in enumerate(rows):
            self._index(r, row.tokens)
        known = [self._match(r, row.tokens) is not None for r, row in enumerate(rows)]
        return [
            Offer((row.remaining - 1) * found, self.source, False) for row, found in zip(rows, known, strict=True)
        ]

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        for r, row in enumerate(rows):
            self._index(r, row.tokens)
        return point_masses(
            [self._lookup(r, row.tokens, most) for r, (row, most) in enumerate(zip(rows, max_drafts, strict=True))]
        )

    def _index(self, row: int, tokens: list[int]) -> None:
        """Remember where each run of tokens ended last, but for the run at the very end: that is looked up."""
        table, end = self._tables[row], len(tokens)
        replaced, prompt = self._replaced[row], self._prompts[row]
        for stop in range(max(self._indexed[row], 1), end):
            for size in range(self.shortest, min(self.longest, stop) + 1):
                run = tuple(tokens[stop - size : stop])
                if stop >= prompt:
                    replaced.append((stop, run, table.get(run)))
                table[run] = (tokens, stop)
        self._indexed[row] = end

    def _match(self, row: int, tokens: list[int]) -> tuple[list[int], int] | None:
        """The text of the latest match of the longest run at the end, and where it goes on there."""
        end = len(tokens)
        for size in range(min(self.longest, end), self.shortest - 1, -1):
            if (found := self._tables[row].get(tuple(tokens[end - size :]))) is not None:
                return found
        return None

    def _lookup(self, row: int, tokens: list[int], count: int) -> list[int]:
        """`count` tokens from after the latest match, or none. A match that overlaps the end repeats itself."""
        text, at = self._match(row, tokens) or ([], 0)
        return [text[at + i % (len(text) - at)] for i in range(count if text else 0)]

    def rewind(self, row: int, length: int) -> None:
        """Forget the runs that ended from `length` on: their places are again those of before."""
        table, replaced = self._tables[row], self._replaced[row]
        while replaced and replaced[-1][0] >= length:
            _, run, before = replaced.pop()
            if before is None:
                del table[run]
            else:
                table[run] = before
        self._indexed[row] = min(self._indexed[row], length)

    def move_row(self, source: int, target: int) -> None:
        self._tables[target], self._indexed[target] = self._tables[source], self._indexed[source]
        self._replaced[target], self._prompts[target] = self._replaced[source], self._prompts[source]


class SiblingLookupDrafter(PromptLookupDrafter):
    """Prompt lookup in the texts of all rows: copies from the row that wrote a run of tokens last.

    Its drafts, and so a sampled text, depend on a row's neighbours, as with any drafter that reads other rows.
    """

    reads_others = True

    def start(self, rows: list[Sequence]) -> PrefillSteps | None:
        super().start(rows)
        self._tables = [{}] * len(rows)
        return None

    def rewind(self, row: int, length: int) -> None:
        """Rows have replaced each other's places: all are noted anew, from the texts as they are then."""
        self._tables = [{}] * len(self._tables)
        self._replaced = [[] for _ in self._tables]
        self._indexed = [0] * len(self._tables)
