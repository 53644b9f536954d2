"""Log-probabilities of the tokens that a round wrote, under the target.

`record_logprobs` adds two natural logarithms per token to each record and to its row. The first is of the token's
probability under the plain softmax of the model's own logits. The second is of its probability under the
distribution that is sampled (after penalties, temperature, top-k, top-p and min-p); it is 0 for greedy text. Both
depend only on the text, so they are the same with and without drafts, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from ..machine.transfer import to_device, to_host
from ..sample.distribution import probabilities
from ..sample.params import SamplingParams
from ..sequence import RowRound, Sequence


def record_logprobs(
    rows: Seq[Sequence],
    records: Seq[RowRound],
    paths: Seq[Seq[int]],
    raw: Tensor,
    shaped: Tensor,
    params: SamplingParams,
) -> None:
    """Record the log-probabilities of each row's new tokens. Copies to the host once.

    Args:
        rows: the sequences.
        records: the round's record of each row.
        paths: the accepted drafts of each row.
        raw: [B, 1 + N, V], the model's logits: column 0 after a row's newest token, column i + 1 after draft i.
        shaped: the same after penalties.
        params: how tokens are sampled.
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
