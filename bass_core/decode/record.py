"""Write the result of a round's verification: tokens at the end of a row's text, and the record of the round.

`add_details` explains a round for the step-by-step view. All functions handle chains and trees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from ..machine.transfer import to_device, to_host
from ..sample.distribution import probabilities
from ..sample.params import SamplingParams
from ..sequence import RowRound, Sequence
from ..verify.acceptance import Outcomes
from ..verify.detail import explain, recorded_drafts, rule_name
from .base import DecodingParams
from .verifier import VerifiedRound


def write_round(
    rows: Seq[Sequence], outcomes: Outcomes, counts: Seq[int], parents: Seq[list[int]] | None = None
) -> list[RowRound]:
    """Append the accepted drafts and next tokens to the rows' texts; return the record of the round, by row.

    Args:
        rows: the rows of the round.
        outcomes: those of the rows.
        counts: number of drafts per row.
        parents: for trees, as in TreeProposal.
    """
    records = list[RowRound]()
    for r, row in enumerate(rows):
        path, drafts, tree = outcomes.path(r), outcomes.drafts[r], None if parents is None else parents[r]
        count, ends = min(counts[r], len(drafts)), outcomes.ends is None or outcomes.ends[r]
        tokens, origins = [drafts[i] for i in path], ["accepted"] * len(path)
        if ends:
            last_origin = "sampled" if not count else "bonus" if _at_end(path, count, tree) else "recovered"
            tokens.append(outcomes.next_tokens[r])
            one_more = outcomes.next_drafted is not None and outcomes.next_drafted[r]
            origins.append("accepted" if one_more else last_origin)
        num_written = row.write(tokens, origins)
        recorded = recorded_drafts(path, count, tree, num_written)
        columns: Any = (drafts, outcomes.p[r], outcomes.q[r], outcomes.u[r], outcomes.chance[r])
        if tree is not None:
            columns = [[column[i] for i in recorded] for column in columns]
        elif len(recorded) < len(drafts):
            columns = [column[: len(recorded)] for column in columns]
        drafted, p, q, u, chance = columns
        record = RowRound(
            row.index, drafted, p, q, u, min(len(path), num_written), tokens[:num_written], origins[:num_written],
            row.finish_reason, outcomes.next_p[r] if ends else math.nan, chance,
        )  # fmt: skip
        if tree is not None:
            places = {-1: -1} | {draft: place for place, draft in enumerate(recorded)}
            record.parents = [places[tree[i]] for i in recorded]
            record.path = [places[i] for i in path[:num_written]]
        records.append(record)
    return records


def add_details(records: list[RowRound], verdict: VerifiedRound, source: str, params: DecodingParams) -> None:
    """Add details to the records of a round while its tensors are valid; `source` made its drafts."""
    drafts = verdict.proposal.explained(source)
    rule = rule_name(params.verification, params.sampling, params.synthetic, drafts.parents is not None)
    explain(records, verdict.outcomes, verdict.output.logits, drafts, params.sampling, rule)


def record_logprobs(
    rows: Seq[Sequence],
    records: Seq[RowRound],
    columns: Seq[Seq[int]],
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
        columns: those of each row's newest token and accepted drafts.
        raw: [B, 1 + N, V], the model's logits: column 0 after a row's newest token, column i + 1 after draft i.
        shaped: the same after penalties.
    """
    places = [
        (r, column, token)
        for r, (record, path) in enumerate(zip(records, columns, strict=True))
        for column, token in zip(path, record.tokens, strict=False)
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


def _at_end(path: Seq[int], count: int, parents: list[int] | None) -> bool:
    """Return whether no draft of the row follows the last accepted draft."""
    if parents is None:
        return len(path) == count
    return (path[-1] if path else -1) not in parents
