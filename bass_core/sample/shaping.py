"""Penalties, biases and bad words: the part of a distribution that depends on the text, not on the model.

`shaped` changes the logits of each position by the text before it: the prompt, the written tokens, and the drafts
that lead there, accepted or not. The logits of the target and of a draft model are changed once, before
temperature, top-k, top-p and min-p. So p is the same function of the text with and without drafts, and every proof
about p and q holds. Other drafters, e.g. a draft head, draft without these changes: the text is just as exact, but
fewer drafts are accepted.

The order is that of transformers: biases, then the repetition penalty, then presence and frequency penalties
(which transformers lacks), then bad words.
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
    """Return the changed logits, or `logits` itself if nothing changes them.

    Args:
        logits: [B, S, V], after each row's text and after each of S - 1 drafts. Logits of a row's padding get
            values that mean nothing.
        params: the penalties, biases and bad words.
        rows: the sequences.
        drafts: int64 [B, N], N >= S - 1.
        parents: parents[b][i] is the draft that draft i follows, or -1, as in a TreeProposal; None for a chain.
    """
    if not params.shapes:
        return logits
    batch, positions, size = logits.shape
    count = positions - 1
    drafts = logits.new_zeros(batch, 0, dtype=torch.long) if drafts is None else drafts[:, :count]
    changed = copied(logits)
    parents_by_row = parents or [range(-1, count - 1)] * batch
    _bias(changed, params)
    if params.counts and not is_accelerator(changed.device):
        _penalise(
            changed,
            params,
            rows,
            drafts.tolist(),
            [_paths([], list(range(count)), row_parents) for row_parents in parents_by_row],
        )
    elif params.counts:
        drafted = torch.zeros(*drafts.shape, size, device=changed.device).scatter_(2, drafts[..., None], 1.0)
        leads = _leads(batch, count, parents, changed.device)
        changed = _penalised(changed, params, rows, leads.to(changed.dtype) @ drafted)
    _bar(changed, params)
    if tail := _tail(params):
        texts = zip(rows, drafts.tolist(), parents_by_row, strict=True)
        _forbid(changed, params, [_paths(row.tokens[-tail:], *drafted) for row, *drafted in texts])
    return changed


def shaped_next(logits: Tensor, params: SamplingParams, rows: Seq[Sequence], drawn: Seq[Tensor]) -> Tensor:
    """Return the changed logits [B, V] after the rows' texts and the drafts `drawn` so far, int64 [B] per step."""
    if not params.shapes:
        return logits
    changed = copied(logits[:, None])
    _bias(changed, params)
    if params.counts and not is_accelerator(changed.device):
        drafts = torch.stack(list(drawn), dim=1).tolist() if drawn else [[]] * len(rows)
        _penalise(changed, params, rows, drafts, [[list(range(len(drawn)))]] * len(rows))
    elif params.counts:
        ahead = torch.zeros_like(changed[:, 0])
        for token in drawn:
            ahead.scatter_add_(1, token[:, None], torch.ones_like(ahead[:, :1]))
        changed = _penalised(changed, params, rows, ahead[:, None])
    _bar(changed, params)
    if tail := _tail(params):
        # Read only as many drafts on the host as a bad word can match.
        last = list(drawn)[-tail:]
        drafts = torch.stack(last, dim=1).tolist() if last else [[]] * len(rows)
        _forbid(
            changed, params, [[row.tokens[-tail:] + drafted] for row, drafted in zip(rows, drafts, strict=True)]
        )
    return changed[:, 0]


def _leads(batch: int, count: int, parents: Seq[Seq[int]] | None, device: torch.device) -> Tensor:
    """Return whether draft n leads to position s: bool [B, 1 + N, N]."""
    if parents is None:
        chain = torch.ones(count + 1, count, dtype=torch.bool, device=device).tril(-1)
        return chain.expand(batch, -1, -1)
    leads = [[[False] * count for _ in range(count + 1)] for _ in range(batch)]
    for row, row_parents in zip(leads, parents, strict=True):
        for draft, parent in enumerate(row_parents):
            row[draft + 1] = list(row[parent + 1])
            row[draft + 1][draft] = True
    return torch.tensor(leads, dtype=torch.bool, device=device).view(batch, count + 1, count)


def _penalise(
    logits: Tensor,
    params: SamplingParams,
    rows: Seq[Sequence],
    drafts: list[list[int]],
    leads: list[list[list[int]]],
) -> None:
    """Apply `_penalised` in place on the host, to the logits of tokens in the texts and drafts only.

    leads[r][s] lists the drafts of row r that lead to position s.
    """
    penalty, presence, frequency = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    for r, (row, drafted) in enumerate(zip(rows, drafts, strict=True)):
        tokens, columns = np.unique(np.array(row.tokens + drafted, np.int64), return_inverse=True)
        # The ids are sorted, so those without a logit come last.
        num_known, text_len = int(np.searchsorted(tokens, logits.shape[-1])), len(row.tokens)
        tokens, row_logits = tokens[:num_known], logits[r].numpy()

        def count(part: Any, num_known: int = num_known) -> Any:
            return np.bincount(part, minlength=num_known)[:num_known]

        ahead = np.array([count(columns[text_len:][path]) for path in leads[r]])
        numbers = row_logits[:, tokens]
        if penalty != 1:
            seen = count(columns[:text_len]) + ahead > 0
            numbers = np.where(seen, np.where(numbers > 0, numbers / penalty, numbers * penalty), numbers)
        if presence or frequency:
            times = (count(columns[len(row.prompt) : text_len]) + ahead).astype(numbers.dtype)
            numbers = numbers - presence * np.minimum(times, 1) - frequency * times
        row_logits[:, tokens] = numbers


def _penalised(logits: Tensor, params: SamplingParams, rows: Seq[Sequence], ahead: Tensor) -> Tensor:
    """Return the penalised logits; ahead [B, S, V] counts each token in the drafts that lead to a position."""
    if params.repetition_penalty != 1:
        seen = _counts([row.tokens for row in rows], logits)[:, None] + ahead > 0
        penalty = params.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if params.presence_penalty or params.frequency_penalty:
        times = _counts([row.tokens[len(row.prompt) :] for row in rows], logits)[:, None] + ahead
        logits = logits - params.presence_penalty * (times > 0) - params.frequency_penalty * times
    return logits


def _counts(texts: list[list[int]], like: Tensor) -> Tensor:
    """Return how often each text contains each token: [B, V]."""
    size, longest = like.shape[-1], max(map(len, texts), default=0)
    # Padding is counted in an extra column.
    padded = to_device([text + [size] * (longest - len(text)) for text in texts], like.device)
    counts = torch.zeros(len(texts), size + 1, dtype=like.dtype, device=like.device)
    return counts.scatter_add_(1, padded.view(len(texts), longest), torch.ones_like(padded, dtype=like.dtype))[
        :, :size
    ]


def _bias(logits: Tensor, params: SamplingParams) -> None:
    if added := dict(params.biases):
        ids = to_device(list(added), logits.device)
        logits[..., ids] += to_device(list(added.values()), logits.device)


def _bar(logits: Tensor, params: SamplingParams) -> None:
    """Set the logits of one-token bad words to -inf, in place."""
    if barred := [word[0] for word in params.bad_words if not isinstance(word, str) and len(word) == 1]:
        logits[..., to_device(barred, logits.device)] = float("-inf")


def _longer(params: SamplingParams) -> list[tuple[int, ...]]:
    return [word for word in params.bad_words if not isinstance(word, str) and len(word) > 1]


def _tail(params: SamplingParams) -> int:
    """Return how many tokens before a position have to be read to know which bad words would end there."""
    return max(map(len, _longer(params)), default=1) - 1


def _paths(text: list[int], drafts: list[int], parents: Seq[int]) -> list[list[int]]:
    """Return the text before each position; a row's padding follows the newest token."""
    paths = [text]
    for i, token in enumerate(drafts):
        paths.append([*paths[parents[i] + 1 if i < len(parents) else 0], token])
    return paths


def _forbid(logits: Tensor, params: SamplingParams, paths: list[list[list[int]]]) -> None:
    """Set a longer bad word's last token to -inf, in place, if the text ends with the tokens before it."""
    places = [
        [r, s, word[-1]]
        for r, row in enumerate(paths)
        for s, path in enumerate(row)
        for word in _longer(params)
        if tuple(path[1 - len(word) :]) == word[:-1]
    ]
    if places:
        logits[to_device(places, logits.device).unbind(1)] = float("-inf")
