"""Drafters that copy from text instead of asking a model; what they propose is a point mass.

Contract: as in drafting/base.py; none of them runs a forward. `PromptLookupDrafter` reads the row's own text,
`SiblingLookupDrafter` also that of the rows beside it, `NgramDrafter` a table counted beforehand. `Cascade` puts
one in front of a model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..engine.runner import PrefillSteps
from ..machine.transfer import to_device
from ..models.ngram import NgramTable
from ..sampling.noise import NoiseKeys
from ..sequence import Sequence
from .base import Proposal, observes_states


class PromptLookupDrafter:
    """Copies what followed the latest earlier occurrence of the row's last tokens (`shortest` to `longest`).

    The longest match wins. Shines where the answer repeats the prompt, or itself.
    """

    def __init__(self, device: torch.device, longest: int = 4, shortest: int = 2) -> None:
        self.device, self.longest, self.shortest = device, longest, shortest
        self.calls = 0
        self._tables: list[dict[tuple[int, ...], tuple[list[int], int]]] = []
        # By row, of each run behind the prompt: where it ended, and what its place in the table was before.
        self._replaced: list[list[tuple[int, tuple[int, ...], tuple[list[int], int] | None]]] = []
        self._prompts: list[int] = []
        self._indexed: list[int] = []

    def start(self, rows: list[Sequence]) -> PrefillSteps | None:
        self._tables = [{} for _ in rows]
        self._replaced = [[] for _ in rows]
        self._prompts = [len(row.prompt) for row in rows]
        self._indexed = [0 for _ in rows]
        return None

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        for r, row in enumerate(rows):
            self._index(r, row.tokens)
        return _points(
            [self._lookup(r, row.tokens, cap) for r, (row, cap) in enumerate(zip(rows, max_drafts, strict=True))]
        )

    def _index(self, row: int, tokens: list[int]) -> None:
        """Remember where each run of tokens ended last; the run at the very end is what will be looked up."""
        table, end = self._tables[row], len(tokens)
        replaced, prompt = self._replaced[row], self._prompts[row]
        for stop in range(max(self._indexed[row], 1), end):
            for size in range(self.shortest, min(self.longest, stop) + 1):
                run = tuple(tokens[stop - size : stop])
                if stop >= prompt:
                    replaced.append((stop, run, table.get(run)))
                table[run] = (tokens, stop)
        self._indexed[row] = end

    def _lookup(self, row: int, tokens: list[int], count: int) -> list[int]:
        """`count` tokens from after the latest match, or none. A match that overlaps the end repeats itself."""
        end = len(tokens)
        for size in range(min(self.longest, end), self.shortest - 1, -1):
            found = self._tables[row].get(tuple(tokens[end - size :]))
            if found is not None:
                text, at = found
                return [text[at + i % (len(text) - at)] for i in range(count)]
        return []

    def on_verified(self, rows: list[Sequence], proposal: Proposal, accepted: list[int]) -> None:
        return None

    def rewind(self, row: int, length: int) -> None:
        """Forget the runs that ended from `length` on: their places are again those of before."""
        table, replaced = self._tables[row], self._replaced[row]
        while replaced and replaced[-1][0] >= length:
            _, run, before = replaced.pop()
            if before is None:
                del table[run]
            else:
                table[run] = before
        self._indexed[row] = min(self._indexed[row], length)

    def move_row(self, source: int, target: int) -> None:
        self._tables[target], self._indexed[target] = self._tables[source], self._indexed[source]
        self._replaced[target], self._prompts[target] = self._replaced[source], self._prompts[source]


class SiblingLookupDrafter(PromptLookupDrafter):
    """Prompt lookup in the texts of all rows of the batch: whoever wrote a run of tokens last is copied.

    Sampled texts may then differ with a row's neighbours, as with any drafter that reads other rows.
    """

    def start(self, rows: list[Sequence]) -> PrefillSteps | None:
        super().start(rows)
        self._tables = [{}] * len(rows)
        return None

    def rewind(self, row: int, length: int) -> None:
        """Rows have replaced each other's places: all are noted anew, from the texts as they are then."""
        self._tables = [{}] * len(self._tables)
        self._replaced = [[] for _ in self._tables]
        self._indexed = [0] * len(self._tables)


class NgramDrafter:
    """Proposes the likeliest next token of the longest known context, again and again."""

    def __init__(self, table: NgramTable, device: torch.device, shortest: int = 1) -> None:
        self.table, self.device, self.shortest = table, device, shortest
        self.calls = 0

    def start(self, rows: list[Sequence]) -> PrefillSteps | None:
        return None

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        return _points([self._chain(row.tokens, cap) for row, cap in zip(rows, max_drafts, strict=True)])

    def _chain(self, tokens: list[int], count: int) -> list[int]:
        context, found = tokens[-self.table.longest :], []
        for _ in range(count):
            token = self.table.next_token(context, self.shortest)
            if token is None:
                break
            found.append(token)
            context = [*context, token][-self.table.longest :]
        return found

    def on_verified(self, rows: list[Sequence], proposal: Proposal, accepted: list[int]) -> None:
        return None

    def rewind(self, row: int, length: int) -> None:
        return None

    def move_row(self, source: int, target: int) -> None:
        return None


class LookupChain:
    """Several copying drafters: each row takes the first that proposes anything."""

    def __init__(self, *drafters: Any) -> None:
        self.drafters = drafters
        self.calls = 0

    def start(self, rows: list[Sequence]) -> PrefillSteps | None:
        for drafter in self.drafters:
            drafter.start(rows)
        return None

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        proposals = [drafter.propose(rows, max_drafts, keys) for drafter in self.drafters]
        chosen: list[list[int]] = [[] for _ in rows]
        for proposal in reversed(proposals):
            for r, (tokens, count) in enumerate(zip(proposal.tokens.tolist(), proposal.counts, strict=True)):
                chosen[r] = tokens[:count] or chosen[r]
        return _points(chosen)

    def on_verified(self, rows: list[Sequence], proposal: Proposal, accepted: list[int]) -> None:
        for drafter in self.drafters:
            drafter.on_verified(rows, proposal, accepted)

    def rewind(self, row: int, length: int) -> None:
        for drafter in self.drafters:
            drafter.rewind(row, length)

    def move_row(self, source: int, target: int) -> None:
        for drafter in self.drafters:
            drafter.move_row(source, target)


class Cascade:
    """Copies where the text so far knows how to go on, and asks the model for the other rows.

    In a round in which every row copies, the model is not run at all.
    """

    def __init__(self, lookup: Any, model: Any, size: int, most_drawn: int | None = None) -> None:
        """size: the target's V. The model, a ModelDrafter or a HeadDrafter, drafts at most `most_drawn` a row."""
        self.lookup, self.model, self.size, self.most_drawn = lookup, model, size, most_drawn
        self._modelled: Proposal | None = None
        self.observes_states = observes_states(model)

    def prepare(self, rows: int) -> None:
        """Before the first step: the model's own preparation."""
        self.model.prepare(rows)

    def observe_states(self, rows: list[Sequence], states: list[Tensor]) -> None:
        """Hand the target's states on to the model that reads them."""
        self.model.observe_states(rows, states)

    @property
    def calls(self) -> int:
        return int(self.model.calls)

    def start(self, rows: list[Sequence]) -> PrefillSteps | None:
        self.lookup.start(rows)
        prefill: PrefillSteps | None = self.model.start(rows)
        return prefill

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        copied: Proposal = self.lookup.propose(rows, max_drafts, keys)
        copied.copied = [count > 0 for count in copied.counts]
        most = max(max_drafts) if self.most_drawn is None else self.most_drawn
        left = [0 if count else min(cap, most) for count, cap in zip(copied.counts, max_drafts, strict=True)]
        self._modelled = None
        if max(left) == 0:
            return copied
        modelled: Proposal = self.model.propose(rows, left, keys)
        self._modelled = modelled
        return self._merge(copied, modelled)

    def _merge(self, copied: Proposal, modelled: Proposal) -> Proposal:
        width = max(copied.tokens.shape[1], modelled.tokens.shape[1])
        device = modelled.tokens.device
        # What is copied stands on the host, what the model drafted on its device.
        copies = to_device(copied.counts, device) > 0
        copied_tokens = _widen(to_device(copied.tokens, device), width)
        tokens = torch.where(copies[:, None], copied_tokens, _widen(modelled.tokens, width))
        counts = [a or b for a, b in zip(copied.counts, modelled.counts, strict=True)]
        merged = Proposal(tokens, counts, copied=copied.copied)
        if modelled.max_probs is not None and modelled.token_probs is not None:
            merged.max_probs = _sure(modelled.max_probs, copies, width)
            merged.token_probs = _sure(modelled.token_probs, copies, width)
        if modelled.probs is None:
            return merged
        probs = torch.zeros(len(counts), width, self.size, device=device)
        probs[:, : modelled.probs.shape[1]] = modelled.probs
        points = torch.zeros_like(probs).scatter_(2, tokens[..., None], 1.0)
        merged.probs = torch.where(copies[:, None, None], points, probs)
        return merged

    def on_verified(self, rows: list[Sequence], proposal: Proposal, accepted: list[int]) -> None:
        self.lookup.on_verified(rows, proposal, accepted)
        if self._modelled is not None:
            self.model.on_verified(rows, self._modelled, accepted)
            self._modelled = None

    def rewind(self, row: int, length: int) -> None:
        self.lookup.rewind(row, length)
        self.model.rewind(row, length)

    def move_row(self, source: int, target: int) -> None:
        self.lookup.move_row(source, target)
        self.model.move_row(source, target)


def _widen(tokens: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(tokens, (0, width - tokens.shape[1]))


def _sure(probs: Tensor, copies: Tensor, width: int) -> Tensor:
    """The drafts' probabilities [B, width]; 1 for copies, and for padding."""
    wide = torch.nn.functional.pad(probs, (0, width - probs.shape[1]), value=1.0)
    return wide.masked_fill(copies[:, None], 1.0)


def _points(found: list[list[int]]) -> Proposal:
    counts = [len(tokens) for tokens in found]
    width = max(counts)
    padded = [tokens + [0] * (width - len(tokens)) for tokens in found]
    return Proposal(torch.tensor(padded, dtype=torch.long).view(len(found), width), counts)
