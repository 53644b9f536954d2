"""Write the result of a round's verification: tokens at the end of a row's text, and the record of the round.

`add_details` explains a round for the step-by-step view. All functions handle chains and trees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from ..machine.transfer import to_device, to_host
from ..sample.distribution import probabilities
from ..sample.params import SamplingParams
from ..sequence import RowRound, Sequence
from ..verify.acceptance import DraftTest, RowOutcome
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
    path, tests = outcome.accepted_drafts, outcome.tests[:count]
    last_origin = "sampled" if not tests else ("bonus" if _at_end(path, count, parents) else "recovered")
    last_origin = "accepted" if outcome.next_drafted else last_origin
    next_tokens = [outcome.next_token] if outcome.ends else []
    tokens = [tests[i].token for i in path] + next_tokens
    origins = ["accepted"] * len(path) + [last_origin] * len(next_tokens)
    num_written = row.write(tokens, origins)
    recorded = recorded_drafts(path, count, parents, num_written)
    path = path[:num_written]
    columns = zip(*(tests[i] for i in recorded), strict=True) if recorded else [()] * len(DraftTest._fields)
    # In the order of DraftTest's fields.
    p, q, u, drafted, chance = map(list, columns)
    record = RowRound(
        row.index, drafted, p, q, u, len(path), tokens[:num_written], origins[:num_written], row.finish_reason,
        outcome.next_p if outcome.ends else math.nan, chance,
    )  # fmt: skip
    if parents is not None:
        places = {-1: -1} | {draft: place for place, draft in enumerate(recorded)}
        record.parents, record.path = [places[parents[i]] for i in recorded], [places[i] for i in path]
    return record


def add_details(records: list[RowRound], verdict: VerifiedRound, source: str, params: DecodingParams) -> None:
    """Add details to the records of a round while its tensors are valid; `source` made its drafts."""
    drafts = verdict.proposal.explained(source)
    rule = rule_name(params.verification, params.sampling, params.synthetic, drafts.parents is not None)
    explain(records, verdict.outcomes, verdict.output.logits, drafts, params.sampling, rule)


def record_logprobs(
    rows: Seq[Sequence],
    records: Seq[RowRound],
    paths: Seq[Seq[int]],
    raw: Tensor,
    shaped: Tensor,
    params: SamplingParams,
) -> None:
    """Record two natural logarithms per new token, in its row and its record. Copies to the host once.

    The first is of the token's probability under the plain softmax of the model's own logits. The second is of its
    probability under the distribution that is sampled (after penalties, temperature, top-k, top-p and min-p), or 0
    for greedy text. Up to rounding, both are the same with and without drafts.

    Args:
        records: the round's record of each row.
        paths: the accepted drafts of each row.
        raw: [B, 1 + N, V], the model's logits: column 0 after a row's newest token, column i + 1 after draft i.
        shaped: the same after penalties.
    """
    places = [
        (r, column, token)
        for r, (record, path) in enumerate(zip(records, paths, strict=True))
        for column, token in zip([0, *(draft + 1 for draft in path)], record.tokens, strict=False)
    ]
    if not places:
        return
    row, column, token = to_device(places, raw.device).unbind(1)
    plain = raw[row, column].float().log_softmax(-1).gather(1, token[:, None])
    sampled = probabilities(shaped[row, column], params).gather(1, token[:, None]).log()
    logprob_pairs = iter(to_host(torch.cat((plain, sampled), dim=1).double()).tolist())
    for sequence, record in zip(rows, records, strict=True):
        pairs = [next(logprob_pairs) for _ in record.tokens]
        record.logprobs, record.sampled_logprobs = [a for a, _ in pairs], [b for _, b in pairs]
        sequence.logprobs += record.logprobs
        sequence.sampled_logprobs += record.sampled_logprobs


def _at_end(path: list[int], count: int, parents: list[int] | None) -> bool:
    """Return whether no draft of the row follows the last accepted draft."""
    if parents is None:
        return len(path) == count
    return (path[-1] if path else -1) not in parents
