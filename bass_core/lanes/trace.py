"""The rounds of a lane as plain data, for inspection.

`Trace.add` takes each Round once, and fills in what only the lane knows: the round's number, where each row's
tokens begin, and the texts of tokens. The round never changes afterwards. Its record (sequence.py) is made when it
is first read, so that the next round needn't wait for it.
"""

from __future__ import annotations

from typing import Any

from ..errors import ask_tokenizer
from ..sequence import Record, Round, RowRound


class Trace:
    """The records of one lane's rounds. Without a tokenizer, they lack the texts of tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._records: list[Record] = []
        self._new: list[Round] = []
        self._rounds = 0
        self._written: dict[int, int] = {}
        self._token_texts: dict[int, str] = {}

    def add(self, round_: Round) -> None:
        """Record one round. Skip a prefill chunk that wrote no token."""
        self._rounds += round_.kind != "prefill"
        if not round_.rows:
            return
        round_.round = 0 if round_.kind == "prefill" else self._rounds
        for row in round_.rows:
            self._complete(row)
        self._new.append(round_)

    @property
    def records(self) -> list[Record]:
        """The records of all rounds so far."""
        new, self._new = self._new, []
        self._records += [round_.record() for round_ in new]
        return self._records

    def view(self) -> list[Record]:
        """Return a new list of all records so far."""
        return list(self.records)

    def _complete(self, row: RowRound) -> None:
        row.start = self._written.get(row.sequence, 0)
        self._written[row.sequence] = row.start + len(row.tokens)
        if self.tokenizer is None:
            return
        row.drafted_text = [self._text_of(token) for token in row.drafted]
        if row.detail is not None and row.detail.ending is not None:
            for candidate in row.detail.ending.top:
                candidate.text = self._text_of(candidate.token)

    def _text_of(self, token: int) -> str:
        """Return the text of a single token. Part of a character decodes to the replacement character."""
        if token not in self._token_texts:
            text = ask_tokenizer(self.tokenizer.decode, [token], clean_up_tokenization_spaces=False)
            self._token_texts[token] = str(text)
        return self._token_texts[token]
