"""The rounds of a lane as plain data, for inspection.

Contract: `add` takes each Round once, completes what only the lane knows (its number, where each row's tokens
begin, the texts of tokens), and keeps its record (sequence.py), which never changes afterwards. Non-goals:
counting (metrics.py), the generated text (decode/text.py).
"""

from __future__ import annotations

from typing import Any

from ..sequence import Record, Round, RowRound


class Trace:
    """What happened in each round of one lane; if `tokenizer` is None, the texts of tokens are left out."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.records: list[Record] = []
        self._rounds = 0
        self._written: dict[int, int] = {}
        self._spelled: dict[int, str] = {}

    def add(self, round_: Round) -> None:
        """Record one round; a prefill chunk that appended no token is left out."""
        self._rounds += round_.kind != "prefill"
        if not round_.rows:
            return
        round_.round = 0 if round_.kind == "prefill" else self._rounds
        for row in round_.rows:
            self._complete(row)
        self.records.append(round_.record())

    def view(self) -> list[Record]:
        """A new list of all records so far."""
        return list(self.records)

    def _complete(self, row: RowRound) -> None:
        row.start = self._written.get(row.sequence, 0)
        self._written[row.sequence] = row.start + len(row.tokens)
        if self.tokenizer is None:
            return
        row.drafted_text = [self._spell(token) for token in row.drafted]
        if row.detail is not None and row.detail.ending is not None:
            for candidate in row.detail.ending.top:
                candidate.text = self._spell(candidate.token)

    def _spell(self, token: int) -> str:
        """The text of a single token; part of a character decodes to the replacement character."""
        if token not in self._spelled:
            self._spelled[token] = str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))
        return self._spelled[token]
