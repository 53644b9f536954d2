"""Drafts copied from the row's own text.

`PromptLookupDrafter` copies and runs no model. `Cascade` combines it with a drafter that runs one.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..length.base import Offer
from ..machine.transfer import to_device
from ..model.prefill import PrefillSteps
from ..model.static_step import GraphDrafts
from ..sample.distribution import ColumnProbs, Probs, compiled
from ..sample.noise import NoiseKeys
from ..sequence import Sequence
from .base import COPY, Drafter, Proposal, point_masses

# LONG_RUN: if at least this many tokens before a copy match, the copy is more likely to be accepted. LONG_COPY:
# the source of such copies, so that length policies can count them separately.
LONG_RUN, LONG_COPY = 8, "long copy"


class PromptLookupDrafter(Drafter):
    """Copies the tokens that followed the latest earlier occurrence of the row's last tokens.

    It tries the last `longest` tokens first, down to the last `shortest`. Copies are accepted most often if the
    answer repeats the prompt or itself. For example, in "a b c d a b" it proposes "c", "d", "a", ...
    """

    source = COPY
    reads_others = False

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self.longest, self.shortest = longest, shortest
        # Per row: the position after the last occurrence of each run of tokens.
        self._tables: list[dict[tuple[int, ...], int]] = []
        # Per row, for each run that ends after the prompt: the position after the run, the run, and the earlier
        # position in the run's table entry, or None.
        self._replaced: list[list[tuple[int, tuple[int, ...], int | None]]] = []
        self._prompts: list[int] = []
        self._indexed: list[int] = []

    def start(self, rows: list[Sequence]) -> PrefillSteps | None:
        self._tables = [{} for _ in rows]
        self._replaced = [[] for _ in rows]
        self._prompts = [len(row.prompt) for row in rows]
        self._indexed = [0 for _ in rows]
        return None

    def offers(self, rows: list[Sequence]) -> list[Offer]:
        """Offer copies to rows with a match; `source` is LONG_COPY if the match is long."""
        offers = []
        for r, row in enumerate(rows):
            at = self._match(r, row.tokens)
            source = LONG_COPY if at is not None and _is_long(row.tokens, at) else self.source
            offers.append(Offer(0 if at is None else row.remaining - 1, source, False, row=row.id))
        return offers

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        return point_masses(
            [self._copy(r, row.tokens, most) for r, (row, most) in enumerate(zip(rows, max_drafts, strict=True))]
        )

    def _copy(self, row: int, tokens: list[int], count: int) -> list[int]:
        """Return the `count` tokens after the latest match, repeated if the text ends earlier; [] without one."""
        at = self._match(row, tokens)
        return [] if at is None else [tokens[at + i % (len(tokens) - at)] for i in range(count)]

    def _match(self, row: int, tokens: list[int]) -> int | None:
        """Find the longest run at the text's end that occurred before. Return the position after it, or None."""
        self._index(row, tokens)
        end = len(tokens)
        for size in range(min(self.longest, end), self.shortest - 1, -1):
            if (at := self._tables[row].get(tuple(tokens[end - size :]))) is not None:
                return at
        return None

    def _index(self, row: int, tokens: list[int]) -> None:
        """Note where each run of tokens last ended. Skip the runs at the text's end, which `_match` looks up."""
        table, end = self._tables[row], len(tokens)
        replaced, prompt = self._replaced[row], self._prompts[row]
        for stop in range(max(self._indexed[row], 1), end):
            for size in range(self.shortest, min(self.longest, stop) + 1):
                run = tuple(tokens[stop - size : stop])
                if stop >= prompt:
                    replaced.append((stop, run, table.get(run)))
                table[run] = stop
        self._indexed[row] = end

    def rewind(self, row: int, length: int) -> None:
        """Forget the runs that ended at `length` or later, and restore the positions that they replaced."""
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


def _is_long(tokens: list[int], at: int) -> bool:
    """Return whether the LONG_RUN tokens before `at` are the same as those at the end."""
    return at >= LONG_RUN and tokens[at - LONG_RUN : at] == tokens[-LONG_RUN:]


class Cascade(Drafter):
    """Copies in rows with a match, and drafts with a model in the others.

    The model doesn't run in a round in which every row copies.

    Args:
        lookup: the drafter that copies.
        model: a ModelDrafter or HeadDrafter that drafts chains.
        most_drawn: the maximum number of tokens that the model drafts per row and proposal. None: no limit.
        no_drafts: makes the model's part of a proposal in which every row copies, for a number of rows. If given,
            every proposal is a MergedProposal, so that all rounds are captured in one form.
    """

    def __init__(
        self,
        lookup: Drafter,
        model: Drafter,
        most_drawn: int | None = None,
        no_drafts: Callable[[int], Proposal] | None = None,
    ) -> None:
        self.lookup, self.model, self.most_drawn = lookup, model, most_drawn
        self._no_drafts, self.merges = no_drafts, no_drafts is not None
        self._modelled: Proposal | None = None
        self.observes_states, self.source = model.observes_states, model.source
        self.raw_states, self.reads_early = model.raw_states, model.reads_early

    def start(self, rows: list[Sequence]) -> PrefillSteps | None:
        self.lookup.start(rows)
        return self.model.start(rows)

    def prepare(self, rows: int) -> None:
        """Let the model prepare the first rounds."""
        self.model.prepare(rows)

    def prepare_chains(self, rows: int, longest: int) -> None:
        """Let the model prepare chains."""
        self.model.prepare_chains(rows, longest)

    def read(self, rows: list[Sequence]) -> None:
        """Let the model read the prompts."""
        self.model.read(rows)

    def observe_states(self, rows: list[Sequence], states: Seq[Tensor]) -> None:
        """Pass the target's states to the model."""
        self.model.observe_states(rows, states)

    def offers(self, rows: list[Sequence]) -> list[Offer]:
        """Offer a copy if there is one, else the model's drafts."""
        both = zip(self.lookup.offers(rows), self.model.offers(rows), strict=True)
        return [copied if copied.most > 0 else modelled for copied, modelled in both]

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        copied = self.lookup.propose(rows, max_drafts, keys)
        copied.sources = [self.lookup.source if count else self.source for count in copied.num_drafted]
        left = [0 if count else most for count, most in zip(copied.num_drafted, max_drafts, strict=True)]
        if self.most_drawn is not None:
            left = [min(most, self.most_drawn) for most in left]
        self._modelled = None
        if max(left) == 0:
            return copied if self._no_drafts is None else MergedProposal(copied, self._no_drafts(len(rows)))
        self._modelled = self.model.propose(rows, left, keys)
        self.calls, self.drafted = self.model.calls, self.model.drafted
        if not any(copied.num_drafted) and not self.merges:
            self._modelled.sources = copied.sources
            return self._modelled
        return MergedProposal(copied, self._modelled)

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


class MergedProposal(Proposal):
    """Copies in some rows and a model's drafts in the others, merged on the model's device when they are read.

    A copied draft has q = 1 at its token.

    Attributes:
        modelled: the model's drafts.
        copied_drafts: each row's copies, on the host; [] if the model drafted for the row.
    """

    def __init__(self, copied: Proposal, modelled: Proposal) -> None:
        self.modelled = modelled
        self.copied_drafts = [row[:n] for row, n in zip(copied.tokens.tolist(), copied.num_drafted, strict=True)]
        self.num_drafted = [a or b for a, b in zip(copied.num_drafted, modelled.num_drafted, strict=True)]
        self.sources, self.greedy_probs = copied.sources, _merged_getter(modelled, copied)
        self.windowed = modelled.windowed

    @property
    def width(self) -> int:
        return max(self.modelled.width, *map(len, self.copied_drafts))

    def in_graph(self) -> GraphDrafts | None:
        """Leave it to the graph to merge copies and the model's drafts, so that no other operator has to."""
        drafts = self.modelled.in_graph()
        return None if drafts is None else drafts._replace(copies=self.copied_drafts)

    @cached_property
    def _copies(self) -> Tensor:
        """bool [B, 1], whether a row was copied."""
        return to_device([[len(row) > 0] for row in self.copied_drafts], self.modelled.tokens.device)

    @cached_property
    def tokens(self) -> Tensor:  # type: ignore[override]
        """As in Proposal."""
        width, drafts = self.width, self.modelled.tokens
        copies = to_device([row + [0] * (width - len(row)) for row in self.copied_drafts], drafts.device)
        return torch.where(self._copies, copies, _widen(drafts, width))

    @cached_property
    def probs(self) -> Probs | None:  # type: ignore[override]
        """As in Proposal."""
        probs = self.modelled.probs
        return None if probs is None else _with_points(probs, self.tokens, self._copies)

    @cached_property
    def max_probs(self) -> Tensor | None:  # type: ignore[override]
        """As in Proposal."""
        return self._certain(self.modelled.max_probs)

    @cached_property
    def token_probs(self) -> Tensor | None:  # type: ignore[override]
        """As in Proposal."""
        return self._certain(self.modelled.token_probs)

    def _certain(self, values: Tensor | None) -> Tensor | None:
        """Return values [B, N] widened, and 1 in the copied rows."""
        return None if values is None else _widen(values, self.width, 1.0).masked_fill(self._copies, 1.0)


def _with_points(probs: Probs, tokens: Tensor, copies: Tensor) -> Probs:
    """Return probs [B, N, V] widened to [B, W, V], with point masses at `tokens` in the rows `copies` [B, 1]."""
    if isinstance(probs, ColumnProbs):
        return probs.with_points(tokens.where(copies, -1))
    width, size = tokens.shape[1], probs.shape[2]
    if not compiled(probs):
        wide = probs.new_zeros(len(probs), width, size)
        wide[:, : probs.shape[1]] = probs
        points = torch.zeros_like(wide).scatter_(2, tokens[..., None], 1.0)
        return torch.where(copies[..., None], points, wide)
    full, drawn = np.zeros((len(probs), width, size), np.float32), (~copies[:, 0]).nonzero()[:, 0].numpy()
    full[drawn, : probs.shape[1]] = probs.numpy()[drawn]
    for row in copies[:, 0].nonzero()[:, 0].tolist():
        full[row, np.arange(width), tokens[row].numpy()] = 1
    return torch.from_numpy(full)


def _merged_getter(modelled: Proposal, copied: Proposal) -> Callable[[], list[list[float | None]]] | None:
    """Return a getter of the model's draft probabilities, with None for each copied draft."""
    get_probs = modelled.greedy_probs
    if get_probs is None:
        return None
    return lambda: [[None] * n or row for n, row in zip(copied.num_drafted, get_probs(), strict=True)]


def _widen(values: Tensor, width: int, padding: float = 0) -> Tensor:
    return torch.nn.functional.pad(values, (0, width - values.shape[1]), value=padding)
