"""The rounds of a lane as plain data, for inspection.

Contract: `add` takes each Round once and keeps it as a JSON-ready record that never changes afterwards; `view`
returns the whole log so far; lanes/snapshot.py says what a record holds. Non-goals: counting (lanes/metrics.py),
the generated text (lanes/text.py).
"""

from __future__ import annotations

import math
from typing import Any

from ..sequence import Ending, Round, RowDetail, RowRound
from .snapshot import CandidateRecord, DetailRecord, EndingRecord, RoundRecord, RowRecord

# Of the parts of a round's time, which are shown with two or three.
DECIMALS = 4


class Trace:
    """What happened in each round of one lane; if `tokenizer` is None, the drafts' texts are left out."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.records: list[RoundRecord] = []
        self._rounds = 0
        self._written: dict[int, int] = {}
        self._spelled: dict[int, str] = {}

    def add(self, round_: Round) -> None:
        """Record one round; a prefill chunk that appended no token is left out."""
        self._rounds += round_.kind != "prefill"
        if not round_.rows:
            return
        spent = round_.spent
        self.records.append(
            {
                "round": 0 if round_.kind == "prefill" else self._rounds,
                "kind": round_.kind,
                "draft_length": round_.draft_length,
                "lengths": list(round_.lengths),
                "time_ms": round_.time_ms,
                "draft_ms": None if spent is None else round(spent.draft_ms, DECIMALS),
                "verify_ms": None if spent is None else round(spent.verify_ms, DECIMALS),
                "rows": [self._row(row) for row in round_.rows],
            }
        )

    def view(self) -> list[RoundRecord]:
        """A new list of all records so far."""
        return list(self.records)

    def _row(self, row: RowRound) -> RowRecord:
        start = self._written.get(row.sequence, 0)
        self._written[row.sequence] = start + len(row.tokens)
        texts = None if self.tokenizer is None else [self._spell(token) for token in row.drafted]
        return {
            "sequence": row.sequence,
            "start": start,
            "drafted": list(row.drafted),
            "drafted_text": texts,
            "p": [_known(value) for value in row.p],
            "q": [_known(value) for value in row.q],
            "u": [_known(value) for value in row.u],
            "chance": [_known(value) for value in row.chance],
            "accepted": row.accepted,
            "one_by_one": row.one_by_one,
            "written": len(row.tokens),
            "next_p": _known(row.next_p),
            "parents": None if row.parents is None else list(row.parents),
            "path": None if row.path is None else list(row.path),
            "detail": None if row.detail is None else self._detail(row.detail),
        }

    def _detail(self, detail: RowDetail) -> DetailRecord:
        ending = detail.ending
        return {
            "rule": detail.rule,
            "sources": list(detail.sources),
            "own_p": detail.own_p,
            "own_q": detail.own_q,
            "ending": None if ending is None else self._ending(ending),
        }

    def _ending(self, ending: Ending) -> EndingRecord:
        top: list[CandidateRecord] = [
            {
                "token": one.token,
                "text": None if self.tokenizer is None else self._spell(one.token),
                "p": one.p,
                "q": one.q,
                "residual": one.residual,
            }
            for one in ending.top
        ]
        return {
            "after": ending.after,
            "draft": ending.draft,
            "mass": ending.mass,
            "reach": ending.reach,
            "top": top,
        }

    def _spell(self, token: int) -> str:
        """The text of a single token; part of a character decodes to the replacement character."""
        if token not in self._spelled:
            self._spelled[token] = str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))
        return self._spelled[token]


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
