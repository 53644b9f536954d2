"""Write the result of a round's verification: tokens at the end of a row's text, and the record of the round.

`write_round` appends to the sequence and changes nothing else. `add_details` explains a round for the step-by-step
view. Both handle chains and trees.
"""

from __future__ import annotations

import math

from ..sequence import RowRound, Sequence
from ..verify.acceptance import RowOutcome
from ..verify.detail import explain, recorded_drafts, rule_name
from .base import DecodingParams
from .verifier import VerifiedRound


def write_round(
    row: Sequence,
    outcome: RowOutcome,
    count: int = 0,
    parents: list[int] | None = None,
) -> RowRound:
    """Append the accepted drafts and, if the outcome `ends`, the next token; return the record of the round.

    `count` is the row's number of drafts. `parents` is for trees, as in TreeProposal.
    """
    path = outcome.accepted_drafts
    drafts = [test.token for test in outcome.tests[:count]]
    last_origin = "sampled" if not drafts else ("bonus" if _at_end(path, count, parents) else "recovered")
    last_origin = "accepted" if outcome.next_drafted else last_origin
    next_tokens = [outcome.next_token] if outcome.ends else []
    tokens = [*(drafts[i] for i in path), *next_tokens]
    origins = ["accepted"] * len(path) + [last_origin] * len(next_tokens)
    num_written = row.write(tokens, origins)
    recorded = recorded_drafts(path, count, parents, num_written)
    path = path[:num_written]
    tests = [outcome.tests[i] for i in recorded]
    record = RowRound(
        row.index,
        [test.token for test in tests],
        [test.p for test in tests],
        [test.q for test in tests],
        [test.u for test in tests],
        len(path),
        tokens[:num_written],
        origins[:num_written],
        row.finish_reason,
        outcome.next_p if outcome.ends else math.nan,
        [test.chance for test in tests],
    )
    if parents is not None:
        places = {-1: -1} | {draft: place for place, draft in enumerate(recorded)}
        record.parents, record.path = [places[parents[i]] for i in recorded], [places[i] for i in path]
    return record


def add_details(records: list[RowRound], verdict: VerifiedRound, source: str, params: DecodingParams) -> None:
    """Add details to the records of a round while its tensors are valid; `source` made its drafts."""
    drafts = verdict.proposal.explained(source)
    rule = rule_name(params.verification, params.sampling, params.synthetic, drafts.parents is not None)
    explain(records, verdict.outcomes, verdict.output.logits, drafts, params.sampling, rule)


def _at_end(path: list[int], count: int, parents: list[int] | None) -> bool:
    """Return whether no draft of the row follows the last accepted draft."""
    if parents is None:
        return len(path) == count
    return (path[-1] if path else -1) not in parents
