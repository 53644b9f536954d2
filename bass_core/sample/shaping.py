"""Logits after penalties, biases and bad words: what a text says of its next token beside the model.

Contract: `shaped` changes the logits of each position by the text before it: the prompt, what was written, and the
drafts that lead there, whether they will be accepted or not. It is applied once, to the target's logits and to a
draft model's, before temperature, top-k, top-p and min-p. So p is the same function of a text whether it was
drafted or not, and what is proved of p and q holds. Drafts that are made otherwise, as a head's, have a q without
it: as exact, but fewer are accepted. The order is transformers': the repetition penalty, then presence and
frequency, then biases and bad words.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from ..machine.transfer import to_device
from ..sequence import Sequence
from .params import SamplingParams


def shaped(
    logits: Tensor,
    params: SamplingParams,
    rows: Seq[Sequence],
    drafts: Tensor | None = None,
    parents: Seq[Seq[int]] | None = None,
) -> Tensor:
    """logits [B, S, V] with the first position after the rows' texts, and one more after each of S - 1 drafts.

    drafts: int64 [B, N], N >= S - 1. parents[b][i]: the draft that draft i follows, or -1, as in a TreeProposal;
    None: each follows the one before it. A row's padding gives logits that mean nothing. Returns new logits, or
    these where nothing changes them.
    """
    if not params.shapes:
        return logits
    batch, positions, _ = logits.shape
    count = positions - 1
    drafts = logits.new_zeros(batch, 0, dtype=torch.long) if drafts is None else drafts[:, :count]
    leads = _leads(batch, count, parents, logits.device)
    made = logits.float().clone()
    if params.counts:
        made = _penalised(made, params, rows, drafts, leads)
    for token, bias in params.biases:
        made[..., token] += bias
    _forbid(made, params, rows, drafts, parents)
    return made


def shaped_next(logits: Tensor, params: SamplingParams, rows: Seq[Sequence], drawn: Seq[Tensor]) -> Tensor:
    """logits [B, V] after the rows' texts and the drafts drawn so far, int64 [B] each; see `shaped`."""
    # The positions before the last are made alike and thrown away: drafts are few.
    repeated = logits[:, None].expand(-1, len(drawn) + 1, -1)
    return shaped(repeated, params, rows, torch.stack(list(drawn), dim=1) if drawn else None)[:, -1]


def _leads(batch: int, count: int, parents: Seq[Seq[int]] | None, device: torch.device) -> Tensor:
    """bool [B, 1 + N, N]: whether draft n leads to position s."""
    if parents is None:
        chain = torch.ones(count + 1, count, dtype=torch.bool, device=device).tril(-1)
        return chain.expand(batch, -1, -1)
    made = [[[False] * count for _ in range(count + 1)] for _ in range(batch)]
    for row, own in zip(made, parents, strict=True):
        for draft, parent in enumerate(own):
            row[draft + 1] = list(row[parent + 1])
            row[draft + 1][draft] = True
    return torch.tensor(made, dtype=torch.bool, device=device).view(batch, count + 1, count)


def _penalised(
    logits: Tensor, params: SamplingParams, rows: Seq[Sequence], drafts: Tensor, leads: Tensor
) -> Tensor:
    size = logits.shape[-1]
    drafted = torch.zeros(*drafts.shape, size, dtype=logits.dtype, device=logits.device)
    drafted.scatter_(2, drafts[..., None], 1.0)
    ahead = leads.to(logits.dtype) @ drafted
    if params.repetition_penalty != 1:
        held = _counts([row.tokens for row in rows], logits)[:, None] + ahead > 0
        penalty = params.repetition_penalty
        logits = torch.where(held, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if params.presence_penalty or params.frequency_penalty:
        times = _counts([row.tokens[len(row.prompt) :] for row in rows], logits)[:, None] + ahead
        logits = logits - params.presence_penalty * (times > 0) - params.frequency_penalty * times
    return logits


def _counts(texts: list[list[int]], like: Tensor) -> Tensor:
    """[B, V]: how often each text holds each token."""
    size, longest = like.shape[-1], max(map(len, texts), default=0)
    # Padding counts in a column of its own.
    padded = to_device([text + [size] * (longest - len(text)) for text in texts], like.device)
    made = torch.zeros(len(texts), size + 1, dtype=like.dtype, device=like.device)
    return made.scatter_add_(1, padded.view(len(texts), longest), torch.ones_like(padded, dtype=like.dtype))[
        :, :size
    ]


def _forbid(
    logits: Tensor,
    params: SamplingParams,
    rows: Seq[Sequence],
    drafts: Tensor,
    parents: Seq[Seq[int]] | None,
) -> None:
    """-inf, in place, for the last token of each bad word whose others end the text. Reads drafts on the host."""
    words = [word for word in params.bad_words if not isinstance(word, str)]
    single = [word[0] for word in words if len(word) == 1]
    if single:
        logits[..., single] = float("-inf")
    longer = [word for word in words if len(word) > 1]
    if not longer:
        return
    places: list[list[int]] = []
    tail = max(map(len, longer)) - 1
    for r, (row, own) in enumerate(zip(rows, drafts.tolist(), strict=True)):
        paths: list[list[int]] = [row.tokens[-tail:]]
        for i, token in enumerate(own):
            before = i - 1 if parents is None else parents[r][i] if i < len(parents[r]) else -1
            paths.append([*paths[before + 1], token])
        places += [
            [r, s, word[-1]]
            for s, path in enumerate(paths)
            for word in longer
            if tuple(path[1 - len(word) :]) == word[:-1]
        ]
    if places:
        logits[to_device(places, logits.device).unbind(1)] = float("-inf")
