"""Log-probabilities of the tokens that a round wrote, under the target.

Contract: `note` gives each record, and its row, two numbers a token: the natural logarithm of the token's
probability by the plain softmax of the model's own logits, and by the distribution that is sampled, after
penalties, temperature, top-k, top-p and min-p, which of a greedy text is 0. Both are functions of the text alone,
so that they are the same with and without drafts, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from ..machine.transfer import to_device, to_host
from ..sample.distribution import probabilities
from ..sample.params import SamplingParams
from ..sequence import RowRound, Sequence


def note(
    rows: Seq[Sequence],
    records: Seq[RowRound],
    paths: Seq[Seq[int]],
    own: Tensor,
    shaped: Tensor,
    params: SamplingParams,
) -> None:
    """own, shaped [B, 1 + N, V]: the model's logits, and the same after penalties; paths: the accepted drafts.

    Column 0 says what follows a row's newest token, column i + 1 what follows draft i. One more copy to the host.
    """
    places = [
        (r, column, token)
        for r, (record, path) in enumerate(zip(records, paths, strict=True))
        for column, token in zip([0, *(draft + 1 for draft in path)], record.tokens, strict=False)
    ]
    if not places:
        return
    row, column, token = to_device(places, own.device).unbind(1)
    plain = own[row, column].float().log_softmax(-1).gather(1, token[:, None])
    drawn = probabilities(shaped[row, column], params).gather(1, token[:, None]).log()
    found = iter(to_host(torch.cat((plain, drawn), dim=1).double()).tolist())
    for sequence, record in zip(rows, records, strict=True):
        pairs = [next(found) for _ in record.tokens]
        record.logprobs, record.sampled_logprobs = [a for a, _ in pairs], [b for _, b in pairs]
        sequence.logprobs += record.logprobs
        sequence.sampled_logprobs += record.sampled_logprobs
