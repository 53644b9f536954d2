"""Logits after penalties, biases and bad words: what a text says of its next token beside the model.

Contract: `shaped` changes the logits of each position by the text before it: the prompt, what was written, and the
drafts that lead there, whether they will be accepted or not. It is applied once, to the target's logits and to a
draft model's, before temperature, top-k, top-p and min-p. So p is the same function of a text whether it was
drafted or not, and what is proved of p and q holds. Drafts that are made otherwise, as a head's, have a q without
it: as exact, but fewer are accepted. The order is transformers': biases, then the repetition penalty, then
presence and frequency penalties, which transformers lacks, then bad words.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.support import is_accelerator

from ..machine.transfer import to_device
from ..sequence import Sequence
from .params import SamplingParams
from .rows import copied


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
    batch, positions, size = logits.shape
    count = positions - 1
    drafts = logits.new_zeros(batch, 0, dtype=torch.long) if drafts is None else drafts[:, :count]
    made = copied(logits)
    own = parents or [range(-1, count - 1)] * batch
    _bias(made, params)
    if params.counts and not is_accelerator(made.device):
        _penalise(made, params, rows, drafts.tolist(), [_paths([], list(range(count)), one) for one in own])
    elif params.counts:
        drafted = torch.zeros(*drafts.shape, size, device=made.device).scatter_(2, drafts[..., None], 1.0)
        leads = _leads(batch, count, parents, made.device)
        made = _penalised(made, params, rows, leads.to(made.dtype) @ drafted)
    _bar(made, params)
    if tail := _tail(params):
        texts = zip(rows, drafts.tolist(), own, strict=True)
        _forbid(made, params, [_paths(row.tokens[-tail:], *drafted) for row, *drafted in texts])
    return made


def shaped_next(logits: Tensor, params: SamplingParams, rows: Seq[Sequence], drawn: Seq[Tensor]) -> Tensor:
    """logits [B, V] after the rows' texts and the drafts drawn so far, int64 [B] each; see `shaped`."""
    if not params.shapes:
        return logits
    made = copied(logits[:, None])
    _bias(made, params)
    if params.counts and not is_accelerator(made.device):
        drafts = torch.stack(list(drawn), dim=1).tolist() if drawn else [[]] * len(rows)
        _penalise(made, params, rows, drafts, [[list(range(len(drawn)))]] * len(rows))
    elif params.counts:
        ahead = torch.zeros_like(made[:, 0])
        for token in drawn:
            ahead.scatter_add_(1, token[:, None], torch.ones_like(ahead[:, :1]))
        made = _penalised(made, params, rows, ahead[:, None])
    _bar(made, params)
    if tail := _tail(params):
        # Only what a bad word can hold is read on the host.
        last = list(drawn)[-tail:]
        drafts = torch.stack(last, dim=1).tolist() if last else [[]] * len(rows)
        _forbid(made, params, [[row.tokens[-tail:] + own] for row, own in zip(rows, drafts, strict=True)])
    return made[:, 0]


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


def _penalise(
    logits: Tensor,
    params: SamplingParams,
    rows: Seq[Sequence],
    drafts: list[list[int]],
    leads: list[list[list[int]]],
) -> None:
    """`_penalised` in place, on the host: only tokens of the texts and of the drafts are touched.

    drafts: by row. leads[r][s]: which of them lead to position s.
    """
    penalty, presence, frequency = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    for r, (row, own) in enumerate(zip(rows, drafts, strict=True)):
        tokens, places = np.unique(np.array(row.tokens + own, np.int64), return_inverse=True)
        # Ids that the model has no logit for come last.
        known, read = int(np.searchsorted(tokens, logits.shape[-1])), len(row.tokens)
        tokens, found = tokens[:known], logits[r].numpy()

        def times(part: Any, known: int = known) -> Any:
            return np.bincount(part, minlength=known)[:known]

        ahead = np.array([times(places[read:][path]) for path in leads[r]])
        numbers = found[:, tokens]
        if penalty != 1:
            held = times(places[:read]) + ahead > 0
            numbers = np.where(held, np.where(numbers > 0, numbers / penalty, numbers * penalty), numbers)
        if presence or frequency:
            written = (times(places[len(row.prompt) : read]) + ahead).astype(numbers.dtype)
            numbers = numbers - presence * np.minimum(written, 1) - frequency * written
        found[:, tokens] = numbers


def _penalised(logits: Tensor, params: SamplingParams, rows: Seq[Sequence], ahead: Tensor) -> Tensor:
    """ahead [B, S, V]: how often the drafts that lead to a position hold each token."""
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


def _bias(logits: Tensor, params: SamplingParams) -> None:
    """Add the biases, in place."""
    if added := dict(params.biases):
        ids = to_device(list(added), logits.device)
        logits[..., ids] += to_device(list(added.values()), logits.device)


def _bar(logits: Tensor, params: SamplingParams) -> None:
    """-inf, in place, for bad words of one token."""
    if barred := [word[0] for word in params.bad_words if not isinstance(word, str) and len(word) == 1]:
        logits[..., to_device(barred, logits.device)] = float("-inf")


def _longer(params: SamplingParams) -> list[tuple[int, ...]]:
    return [word for word in params.bad_words if not isinstance(word, str) and len(word) > 1]


def _tail(params: SamplingParams) -> int:
    """How many tokens before a position decide which bad words end there."""
    return max(map(len, _longer(params)), default=1) - 1


def _paths(text: list[int], drafts: list[int], parents: Seq[int]) -> list[list[int]]:
    """The text before each position; a row's padding follows the newest token."""
    paths = [text]
    for i, token in enumerate(drafts):
        paths.append([*paths[parents[i] + 1 if i < len(parents) else 0], token])
    return paths


def _forbid(logits: Tensor, params: SamplingParams, paths: list[list[list[int]]]) -> None:
    """-inf, in place, for the last token of each bad word whose others end the text before a position, by row."""
    places = [
        [r, s, word[-1]]
        for r, row in enumerate(paths)
        for s, path in enumerate(row)
        for word in _longer(params)
        if tuple(path[1 - len(word) :]) == word[:-1]
    ]
    if places:
        logits[to_device(places, logits.device).unbind(1)] = float("-inf")
