"""What a round's verification becomes: tokens at the end of a row's text, and the record of the round.

Contract: `write_round` appends to the sequence and changes nothing else. The same for chains and trees of drafts.
"""

from __future__ import annotations

import math

from ..sequence import RowRound, Sequence
from ..verify.acceptance import RowOutcome
from ..verify.detail import recorded_drafts


def write_round(
    row: Sequence,
    outcome: RowOutcome,
    count: int = 0,
    parents: list[int] | None = None,
    ends: bool = True,
) -> RowRound:
    """Append the accepted drafts and, if the round ends with it, the next token.

    count: the row's drafts in this round; parents: see Proposal.
    """
    path = outcome.accepted_drafts
    drafts = [test.token for test in outcome.tests[:count]]
    last = "sampled" if not drafts else ("bonus" if _at_end(path, count, parents) else "recovered")
    last = "accepted" if outcome.next_drafted else last
    own = [outcome.next_token] if ends else []
    tokens = [*(drafts[i] for i in path), *own]
    origins = ["accepted"] * len(path) + [last] * len(own)
    taken = row.write(tokens, origins)
    kept = recorded_drafts(path, count, parents, taken)
    path = path[:taken]
    tests = [outcome.tests[i] for i in kept]
    record = RowRound(
        row.index,
        [test.token for test in tests],
        [test.p for test in tests],
        [test.q for test in tests],
        [test.u for test in tests],
        len(path),
        tokens[:taken],
        origins[:taken],
        row.finish_reason,
        outcome.next_p if ends else math.nan,
        [test.chance for test in tests],
    )
    if parents is not None:
        places = {-1: -1} | {draft: place for place, draft in enumerate(kept)}
        record.parents, record.path = [places[parents[i]] for i in kept], [places[i] for i in path]
    return record


def _at_end(path: list[int], count: int, parents: list[int] | None) -> bool:
    """Whether no draft follows the accepted ones."""
    if parents is None:
        return len(path) == count
    return (path[-1] if path else -1) not in parents
