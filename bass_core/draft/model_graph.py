"""A draft model's captured chains (chain_graph.py): `ModelChains`."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from ..model.device_text import DeviceText
from ..model.graphs import GraphRunner
from ..sample.noise import Role, RowKeys
from ..sample.params import SamplingParams
from ..sample.shaping import Shaper
from ..sequence import Sequence
from .chain_graph import ChainGraphs, Drafted, Unread


class ModelChains:
    """Drafts chains of one request with a draft model.

    Args:
        runner: runs the draft model.
        params: how drafts are sampled, with penalties.
        role: their noise.
        reports: whether greedy drafts come with their probabilities.
    """

    def __init__(self, runner: GraphRunner, params: SamplingParams, role: Role, reports: bool) -> None:
        self.runner = runner
        self._text = DeviceText(runner) if params.reads_text else None
        model = _Model(params, None if self._text is None else self._text.tokens, runner.device)
        self._graphs = ChainGraphs(runner, model, runner.vocab, params, role, reports)

    def draft(self, rows: list[Sequence], max_drafts: list[int], keys: RowKeys) -> Drafted | None:
        """Feed the unread tokens of the rows that draft, and draft as many tokens in each as in the longest chain.

        Returns:
            The drafts, valid until the next call; None if one graph can't hold them, or can't be captured.
        """
        levels, lengths = max(max_drafts), self.runner.lengths
        # A row that drafts needs the logits after its newest token, so it feeds that token again if necessary.
        wanted = zip(rows, lengths, max_drafts, strict=False)
        starts = [min(length, len(row.tokens) - (most > 0)) for row, length, most in wanted]
        unread = [
            row.tokens[start:] if most else [] for row, start, most in zip(rows, starts, max_drafts, strict=True)
        ]
        if not self._graphs.fits(starts, list(map(len, unread)), levels):
            return None
        if self._text is not None:
            self._text.upload(rows, starts)
        drafted = self._graphs.replay(levels, starts, unread, [len(row.prompt) for row in rows], keys)
        if drafted is not None and self._text is not None:
            # A row without drafts wrote padding after its start.
            ends = (start + len(tokens) for start, tokens in zip(starts, unread, strict=True))
            self._text.known[: len(rows)] = ends
        return drafted

    def keep(self, row: int) -> None:
        """Note that the row's cached drafts were accepted: the graph wrote them after its text."""
        if self._text is not None:
            self._text.known[row] = self.runner.lengths[row]

    def prepare(self, rows: int, levels: int) -> None:
        """Capture the first round's graph, for rows that have nothing but one unread token."""
        self._graphs.prepare(rows, levels)

    def rewind(self, row: int, length: int) -> None:
        """Go back to `length` tokens of a row."""
        if self._text is not None:
            self._text.known[row] = min(self._text.known[row], length)

    def move_row(self, source: int, target: int) -> None:
        """Let row `source` take the place of row `target`."""
        if self._text is not None:
            self._text.move_row(source, target)


class _Model:
    """A draft model in a captured chain (ChainModel), with penalties that read `text`."""

    vocabulary, reads_states = None, False

    def __init__(self, params: SamplingParams, text: Tensor | None, device: torch.device) -> None:
        self.params, self.text = params, text
        self._constants = Shaper.constants(params, device)

    @property
    def key(self) -> tuple[Any, ...]:
        return ("model",)

    @property
    def tensors(self) -> list[Tensor]:
        return list(self._constants.values())

    def logits(self, unread: Unread) -> Generator[Tensor, Tensor, None]:
        text, ends = None if self.text is None else self.text[: len(unread.starts)], unread.ends
        if text is not None:
            unread.write(text)
        logits = unread.newest(unread.forward(unread.tokens, unread.starts).logits)
        while True:
            drafts = yield self._shaped(logits, text, ends, unread.prompts)
            if text is not None:
                text.scatter_(1, ends[:, None], drafts[:, None])
            logits, ends = unread.forward(drafts[:, None], ends).logits[:, 0], ends + 1

    def _shaped(self, logits: Tensor, text: Tensor | None, ends: Tensor, prompts: Tensor) -> Tensor:
        if not self.params.shapes:
            return logits
        drafts = ends.new_zeros(len(ends), 0)
        shaper = Shaper(self.params, self._constants)
        return shaper.apply(logits[:, None], text, ends, prompts, drafts)[:, 0]
