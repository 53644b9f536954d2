"""Penalties, biases, bad words and grammars: the part of a distribution that depends on the text only.

`shaped` changes the logits of each position by the text before it: the prompt, the written tokens, and the drafts
that lead there, accepted or not. The logits of the target and of a draft model are changed once, before
temperature, top-k, top-p and min-p. So p is the same function of the text with and without drafts, and every proof
about p and q holds. Other drafters, e.g. a draft head, draft without these changes: the text is just as exact, but
fewer drafts are accepted.

The order is that of transformers: biases, then the repetition penalty, then presence and frequency penalties
(which transformers lacks), then bad words, then the tokens that a row's grammar forbids (grammar.py).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.support import is_accelerator

from ..machine.transfer import to_device
from ..sequence import Sequence
from .distribution import argmax, compiled
from .grammar import Bits
from .params import SamplingParams
from .rows import RaggedRows, copied


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
        rows: the sequences, with their grammars.
        drafts: int64 [B, N], N >= S - 1.
        parents: parents[b][i] is the draft that draft i follows, or -1, as in a TreeProposal; None for a chain.
    """
    if not changes(params, rows):
        return logits
    count = logits.shape[1] - 1
    none = torch.empty(len(rows), 0, dtype=torch.long, device=logits.device)
    drafts = none if drafts is None else drafts[:, :count]
    changed = _penalised(logits, params, rows, drafts, parents) if params.shapes else copied(logits)
    forbid(changed, rows, drafts.tolist(), parents)
    return changed


def changes(params: SamplingParams, rows: Seq[Sequence]) -> bool:
    """Return whether the parameters or the rows' grammars change logits."""
    for row in rows:
        if row.grammar is not None:
            return True
    return params.shapes


def forbid(
    scores: Tensor | RaggedRows,
    rows: Seq[Sequence],
    drafts: list[list[int]],
    parents: Seq[Seq[int]] | None = None,
    greedy: bool = False,
) -> None:
    """Set the logits of tokens that the rows' grammars forbid to -inf, in place.

    Args:
        scores: float [B, S, V], or ragged rows of them.
        drafts: each row's drafts; padding may follow them.
        parents: as in `shaped`.
        greedy: whether only the largest logit of each position counts. On a CPU, positions where it is allowed are
            left as they are.
    """
    values = scores.rows if isinstance(scores, RaggedRows) else scores
    likeliest = _likeliest(scores) if greedy and not is_accelerator(values.device) else None
    masks = {}
    for r, row in enumerate(rows):
        if row.grammar is not None:
            row_parents = None if parents is None else parents[r]
            if likeliest is None:
                masks[r] = row.grammar.masks(drafts[r], row_parents)
            else:
                masks[r] = row.grammar.masks(drafts[r][: len(likeliest[r]) - 1], row_parents, likeliest[r])
    _apply_masks(scores, masks)


def _likeliest(scores: Tensor | RaggedRows) -> list[list[int]]:
    """Return the token with the largest logit at each position, one list per row (ragged: without padding)."""
    if not isinstance(scores, RaggedRows):
        tokens: list[list[int]] = argmax(scores).tolist()
        return tokens
    flat = argmax(scores.rows).tolist()
    return [flat[first:last] for first, last in pairwise(scores.firsts)]


def write_masks(
    out: Bits, rows: Seq[Sequence], drafts: Seq[Seq[int]], parents: Seq[Seq[int]] | None = None
) -> None:
    """Write the masks of a round to int32 [R, S, V / 32], as GraphDrafts.write_masks does.

    Args:
        drafts: each row's drafts, without padding.
        parents: as in `shaped`.
    """
    out.fill(-1)
    for r, row in enumerate(rows):
        if row.grammar is None:
            continue
        masks = row.grammar.masks(drafts[r], None if parents is None else parents[r])
        for place, bits in zip(out[r], masks, strict=False):
            if bits is not None:
                place[:] = _of_width(bits[None], out.shape[2])


def _penalised(
    logits: Tensor,
    params: SamplingParams,
    rows: Seq[Sequence],
    drafts: Tensor,
    parents: Seq[Seq[int]] | None,
) -> Tensor:
    """Return a copy of logits with penalties, biases and bad words; the arguments are as in `shaped`."""
    batch, count = drafts.shape[0], logits.shape[1] - 1
    if is_accelerator(logits.device):
        return _shaped_on_device(logits, params, rows, drafts, parents)
    changed = copied(logits)
    parents_by_row = parents or [range(-1, count - 1)] * batch
    _bias(changed, params)
    if params.counts:
        leads = [_paths([], list(range(count)), row_parents) for row_parents in parents_by_row]
        _penalise(changed, params, rows, drafts.tolist(), leads)
    _bar(changed, params)
    if tail := _tail(params):
        texts = zip(rows, drafts.tolist(), parents_by_row, strict=True)
        _forbid(changed, params, [_paths(row.tokens[-tail:], *drafted) for row, *drafted in texts])
    return changed


def shaped_next(logits: Tensor, params: SamplingParams, rows: Seq[Sequence], drawn: Seq[Tensor]) -> Tensor:
    """Return the changed logits [B, V] after the rows' texts and the drafts `drawn` so far, int64 [B] per step."""
    if not changes(params, rows):
        return logits
    none = torch.empty(len(rows), 0, dtype=torch.long, device=logits.device)
    drafts = torch.stack(list(drawn), dim=1) if drawn else none
    changed = (_penalised_next(logits, params, rows, drafts) if params.shapes else copied(logits))[:, None]
    texts = zip(rows, drafts.tolist(), strict=True)
    masks = {r: [row.grammar.next_mask(text)] for r, (row, text) in enumerate(texts) if row.grammar is not None}
    _apply_masks(changed, masks)
    return changed[:, 0]


def _penalised_next(logits: Tensor, params: SamplingParams, rows: Seq[Sequence], drafts: Tensor) -> Tensor:
    """Return a copy of logits with penalties, biases and bad words, after drafts int64 [B, n]."""
    if is_accelerator(logits.device):
        texts, ends, prompts = _on_device(rows, logits.device, drafts.shape[1])
        at = ends[:, None] + torch.arange(drafts.shape[1], device=ends.device)
        texts.scatter_(1, at, drafts)
        shaper = Shaper(params, Shaper.constants(params, logits.device))
        return shaper.apply(logits[:, None], texts, ends + drafts.shape[1], prompts, drafts[:, :0])[:, 0]
    changed = copied(logits[:, None])
    _bias(changed, params)
    if params.counts:
        _penalise(changed, params, rows, drafts.tolist(), [[list(range(drafts.shape[1]))]] * len(rows))
    _bar(changed, params)
    if tail := _tail(params):
        _forbid(
            changed,
            params,
            [[row.tokens[-tail:] + drafted] for row, drafted in zip(rows, drafts.tolist(), strict=True)],
        )
    return changed[:, 0]


class Shaper:
    """Changes logits on an accelerator, from texts that are there. A graph can capture `apply`.

    Args:
        params: the penalties, biases and bad words.
        constants: from `Shaper.constants`.
    """

    def __init__(self, params: SamplingParams, constants: dict[str, Tensor]) -> None:
        self.params, self._constants = params, constants

    @staticmethod
    def constants(params: SamplingParams, device: torch.device) -> dict[str, Tensor]:
        """Copy biases and bad words to the device: tensors by name, none without penalties."""
        lists: dict[str, Any] = {}
        if params.biases:
            lists |= {"biased": [token for token, _ in params.biases], "bias": [bias for _, bias in params.biases]}
        if params.barred:
            lists["barred"] = list(params.barred)
        for word in params.longer_words:
            lists.setdefault(f"words of {len(word)}", []).append(list(word))
        return {name: to_device(values, device) for name, values in lists.items()}

    def apply(
        self,
        logits: Tensor,
        text: Tensor | None,
        ends: Tensor,
        prompts: Tensor,
        drafts: Tensor,
        leads: Tensor | None = None,
    ) -> Tensor:
        """Return the changed logits, float32.

        Args:
            logits: [B, 1 + N, V].
            text: int64 [B, T]; None if `SamplingParams.reads_text` is false.
            ends: int64 [B], the lengths of the texts.
            prompts: int64 [B], the lengths of their prompts.
            drafts: int64 [B, N].
            leads: bool [B, 1 + N, N], whether draft n leads to position s. None: chains.
        """
        params, constants = self.params, self._constants
        changed = logits.float().clone()
        if "biased" in constants:
            bias = constants["bias"].to(changed.dtype).expand(*changed.shape[:-1], -1)
            changed.index_add_(-1, constants["biased"], bias)
        if text is not None and params.counts:
            changed = self._penalised(changed, text, ends, prompts, _ahead(drafts, leads, changed))
        if "barred" in constants:
            changed.index_fill_(-1, constants["barred"], float("-inf"))
        if text is not None and params.longer_words:
            self._forbid(changed, _last_tokens(text, ends, drafts, leads, _tail(params)))
        return changed

    def _penalised(self, logits: Tensor, text: Tensor, ends: Tensor, prompts: Tensor, ahead: Tensor) -> Tensor:
        params = self.params
        if params.repetition_penalty != 1:
            seen = _counts(text, torch.zeros_like(ends), ends, logits)[:, None] + ahead > 0
            penalty = params.repetition_penalty
            logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        if params.presence_penalty or params.frequency_penalty:
            times = _counts(text, prompts, ends, logits)[:, None] + ahead
            logits = logits - params.presence_penalty * (times > 0) - params.frequency_penalty * times
        return logits

    def _forbid(self, logits: Tensor, last: Tensor) -> None:
        """Set a longer bad word's last token to -inf, in place, after its other tokens: last [B, S, tail]."""
        ended = torch.zeros_like(logits)
        for name, words in self._constants.items():
            if not name.startswith("words"):
                continue
            begun = (last[:, :, None, 1 - words.shape[1] :] == words[:, :-1]).all(-1)
            ended.scatter_add_(-1, words[:, -1].expand(*begun.shape), begun.to(ended.dtype))
        logits.masked_fill_(ended > 0, float("-inf"))


def _apply_masks(scores: Tensor | RaggedRows, masks: dict[int, list[Bits | None]]) -> None:
    """Set the logits of forbidden tokens to -inf, in place; masks[r][s] has one bit per token id, or is None."""
    values = scores.rows if isinstance(scores, RaggedRows) else scores
    width = 0 if isinstance(scores, RaggedRows) else scores.shape[1]
    firsts = scores.firsts if isinstance(scores, RaggedRows) else range(0, len(scores) * width + 1, width)
    found = [
        (first, bits)
        for r, row_masks in masks.items()
        for first, bits in zip(range(firsts[r], firsts[r + 1]), row_masks, strict=False)
        if bits is not None
    ]
    if not found:
        return
    places, bits = [place for place, _ in found], np.stack([bits for _, bits in found])
    if compiled(values):
        from kernels.cpu.sampling import calls  # imports numba

        calls.keep_allowed(values, places, bits)
        return
    words = np.full((*values.shape[:-1], -(-values.shape[-1] // 32)), -1, np.int32)
    words.reshape(-1, words.shape[-1])[places] = _of_width(bits, words.shape[-1])
    values.copy_(allowed_logits(values, to_device(torch.from_numpy(words), values.device)))


def _of_width(bits: Bits, words: int) -> Bits:
    """Return masks with this number of words; tokens after the last have no bit."""
    return np.pad(bits, ((0, 0), (0, max(0, words - bits.shape[1]))))[:, :words]


def allowed_logits(logits: Tensor, bits: Tensor) -> Tensor:
    """Return logits [..., V] with -inf for tokens without a bit in int32 [..., V / 32]; a graph can capture it."""
    bit = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (bits[..., None] >> bit & 1).flatten(-2)[..., : logits.shape[-1]]
    return logits.masked_fill(allowed == 0, float("-inf"))


def _shaped_on_device(
    logits: Tensor,
    params: SamplingParams,
    rows: Seq[Sequence],
    drafts: Tensor,
    parents: Seq[Seq[int]] | None,
) -> Tensor:
    texts, ends, prompts = _on_device(rows, logits.device, 0)
    leads = None if parents is None else _leads(drafts.shape[1], parents, logits.device)
    shaper = Shaper(params, Shaper.constants(params, logits.device))
    return shaper.apply(logits, texts, ends, prompts, drafts, leads)


def _on_device(rows: Seq[Sequence], device: torch.device, spare: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the texts int64 [B, T] with `spare` columns, their lengths [B] and those of their prompts [B]."""
    longest = max(len(row.tokens) for row in rows) + spare
    padded = [row.tokens + [0] * (longest - len(row.tokens)) for row in rows]
    texts = zip(rows, padded, strict=True)
    packed = to_device([[len(row.tokens), len(row.prompt), *text] for row, text in texts], device)
    return packed[:, 2:], packed[:, 0], packed[:, 1]


def _ahead(drafts: Tensor, leads: Tensor | None, like: Tensor) -> Tensor:
    """Return how often each token is among the drafts [B, N] that lead to a position: [B, 1 + N, V]."""
    batch, count = drafts.shape
    # Integers, since cumsum of floats has no deterministic form on a GPU.
    drafted = torch.zeros(batch, count, like.shape[-1], dtype=torch.int32, device=like.device)
    drafted.scatter_(2, drafts[..., None], 1)
    if leads is None:
        return torch.nn.functional.pad(drafted.cumsum(1, dtype=torch.int32), (0, 0, 1, 0)).to(like.dtype)
    return leads.to(like.dtype) @ drafted.to(like.dtype)


def _last_tokens(text: Tensor, ends: Tensor, drafts: Tensor, leads: Tensor | None, tail: int) -> Tensor:
    """Return the last `tail` tokens before each position, newest last: [B, S, tail], -1 before a text begins."""
    steps = torch.arange(tail, device=text.device)
    at = ends[:, None] - tail + steps
    both = torch.cat((text.gather(1, at.clamp(min=0)).where(at >= 0, -1), drafts), dim=1)
    if leads is None:
        return both.unfold(1, tail, 1)
    # Number the drafts of each path from 1; numbers up to 0 are tokens of the text, which ends with number 0.
    numbers = leads.long().cumsum(-1)
    wanted = leads.sum(-1, keepdim=True) - tail + 1 + steps
    chosen = leads[:, :, None] & (numbers[:, :, None] == wanted[..., None])
    columns = torch.arange(drafts.shape[1], device=text.device)
    places = torch.where(wanted > 0, tail + (chosen * columns).sum(-1), tail - 1 + wanted)
    return both[:, None].expand(-1, places.shape[1], -1).gather(2, places)


def _leads(count: int, parents: Seq[Seq[int]], device: torch.device) -> Tensor:
    """Return whether draft n leads to position s: bool [B, 1 + N, N]."""
    leads = [[[False] * count for _ in range(count + 1)] for _ in parents]
    for row, row_parents in zip(leads, parents, strict=True):
        for draft, parent in enumerate(row_parents):
            row[draft + 1] = list(row[parent + 1])
            row[draft + 1][draft] = True
    return to_device(torch.tensor(leads, dtype=torch.bool), device).view(len(parents), count + 1, count)


def _counts(text: Tensor, begins: Tensor, ends: Tensor, like: Tensor) -> Tensor:
    """Return how often each token is in text[r, begins[r] : ends[r]]: [B, V]."""
    size, at = like.shape[-1], torch.arange(text.shape[1], device=text.device)
    counted = (at >= begins[:, None]) & (at < ends[:, None]) & (text < size)
    # The other tokens are counted in an extra column.
    counts = torch.zeros(len(text), size + 1, dtype=like.dtype, device=like.device)
    ones = torch.ones_like(text, dtype=like.dtype)
    return counts.scatter_add_(1, text.where(counted, size), ones)[:, :size]


def _penalise(
    logits: Tensor,
    params: SamplingParams,
    rows: Seq[Sequence],
    drafts: list[list[int]],
    leads: list[list[list[int]]],
) -> None:
    """Apply the penalties in place; leads[r][s] lists the drafts of row r that lead to position s."""
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


def _bias(logits: Tensor, params: SamplingParams) -> None:
    if added := dict(params.biases):
        logits[..., list(added)] += torch.tensor(list(added.values()))


def _bar(logits: Tensor, params: SamplingParams) -> None:
    """Set the logits of one-token bad words to -inf, in place."""
    if params.barred:
        logits[..., list(params.barred)] = float("-inf")


def _tail(params: SamplingParams) -> int:
    """Return how many tokens before a position have to be read to know which bad words would end there."""
    return max(map(len, params.longer_words), default=1) - 1


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
        for word in params.longer_words
        if tuple(path[1 - len(word) :]) == word[:-1]
    ]
    if places:
        logits[torch.tensor(places).unbind(1)] = float("-inf")
