"""The whole batch stops at its first rejection: what BASS does without, kept to be compared with.

Contract: lengths stay alike, and acceptance a turns into a^batch. The text is distributed as ever: a row that had
accepted more keeps the next of these drafts in the place of the target's own token.
"""

from __future__ import annotations

from .acceptance import RowOutcome


def stop_together(outcomes: list[RowOutcome]) -> list[RowOutcome]:
    """The outcomes of a round, each shortened to the shortest."""
    least = min(outcome.accepted for outcome in outcomes)
    return [outcome if outcome.accepted == least else _cut(outcome, least) for outcome in outcomes]


def _cut(outcome: RowOutcome, accepted: int) -> RowOutcome:
    test = outcome.tests[accepted]
    return outcome._replace(accepted=accepted, next_token=test.token, next_p=test.p, next_drafted=True)
