"""Feeds a draft head the tokens of each row that it has not read, with the states before them (`HeadFeed`).

Position t of a row's text reads token t and the target's state of token t - 1. The head is fed drafts with its own
states (chain.py), and accepted drafts again with the target's states.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from ...machine.transfer import to_device
from ...model.draft_head import CompiledInputs, DraftHead
from ...model.runner import ModelRunner
from ...sample.rows import pad
from ...sequence import Sequence
from ..pending import feed_pending
from .states import SettledStates
from .texts import NoTexts, Texts


class HeadFeed:
    """Reads written tokens with the target's states, as soon as these have arrived.

    Attributes:
        states: the states that the head's body has not read.
        texts: the rows' texts, in which the head's pointer searches.
        began: whether the prefixes that prompts share have been read.
    """

    def __init__(self, head: DraftHead, runner: ModelRunner) -> None:
        self.head, self.runner = head, runner
        self.start(0)

    def start(self, rows: int) -> None:
        """Begin with that many rows."""
        head, self.began = self.head, False
        self.texts = (NoTexts if getattr(head, "pointer", None) is None else Texts)(head, rows)
        self.states = SettledStates(rows, head.config.hidden, self.runner.device, head.readout().finish)

    def observe(self, states: Seq[Tensor]) -> None:
        """Keep copies of the target's states [k, hidden] of the next k tokens of each row."""
        self.states.observe(states)

    def read_prefixes(self, rows: list[Sequence]) -> None:
        """Read each prefix that several prompts share once, unless the runner has it already."""
        if self.began:
            return
        self.began, runner, states = True, self.runner, self.states
        prefixes = [runner.shared.of(row.prompt) for row in rows]
        needed = sorted({prefix for prefix in prefixes if prefix})
        if needed and not runner.has_prefixes(needed, with_states=False):
            x = self.inputs(needed, [states.next(prefixes.index(prefix), len(prefix)) for prefix in needed])
            zeros, counts = [0] * len(needed), list(map(len, needed))
            logits, _, _ = feed_pending(runner.prefix_runner(), x, zeros, counts, eager=True)
            runner.store_prefixes(needed, dict(enumerate(logits)), [torch.empty(0)] * len(needed))
        for r, prefix in enumerate(prefixes):
            runner.attach(r, prefix)
            states.skip(r, len(prefix))

    def catch_up(
        self, rows: list[Sequence], max_drafts: list[int], ends: list[int] | None = None
    ) -> tuple[Tensor, Tensor, int]:
        """Read the tokens since the last proposal, up to ends[r], in the rows that draft.

        Returns:
            Logits [B, V'] and states [B, hidden] of each row's last position, and the number of forwards.
        """
        texts, starts = self.unread(rows, max_drafts, ends)
        x, counts = self.next_inputs(texts, starts), list(map(len, texts))
        # With `ends` these are prompts, whose widths occur only once.
        logits, states, forwards = feed_pending(self.runner, x, starts, counts, True, eager=ends is not None)
        assert states is not None
        self.commit(starts, counts)
        return logits, states, forwards

    def next_inputs(self, texts: list[list[int]], starts: list[int]) -> Tensor:
        """Return the inputs [B, W, hidden] of the texts to read, which begin at `starts`."""
        return self.inputs(texts, self.states.take(list(map(len, texts))))

    def unread(
        self, rows: list[Sequence], max_drafts: list[int], ends: list[int] | None = None
    ) -> tuple[list[list[int]], list[int]]:
        """Return the tokens to read, none of rows that don't draft, and where each row's begin."""
        starts = list(self.runner.lengths[: len(rows)])
        parts = zip(rows, starts, ends or [len(row.tokens) for row in rows], max_drafts, strict=True)
        return [row.tokens[start:end] if most else [] for row, start, end, most in parts], starts

    def commit(self, starts: list[int], counts: list[int]) -> None:
        """Note that the body has read counts[r] tokens from starts[r] on."""
        for r, (start, count) in enumerate(zip(starts, counts, strict=True)):
            if count:
                self.runner.commit(r, start + count)

    def inputs(self, texts: Seq[Collection[int]], pieces: list[list[Tensor]]) -> Tensor:
        """Return the inputs [B, W, hidden] of these tokens; `pieces` has the states before them, as observed."""
        ids = padded_ids(texts, self.runner.device)
        return self.head.inputs(ids, self.states.padded(pieces, list(map(len, texts))))

    def rewind(self, row: int, length: int) -> None:
        """Go back to `length` tokens of a row: later positions will be read again, with states to come."""
        length_kept = min(self.runner.lengths[row], length)
        self.runner.commit(row, length_kept)
        self.texts.rewind(row, length)
        self.states.rewind(row, length - length_kept)

    def move_row(self, source: int, target: int) -> None:
        """Let row `source` take the place of row `target`."""
        self.runner.move_row(source, target)
        self.states.move_row(source, target)
        self.texts.move_row(source, target)


class CompiledFeed(HeadFeed):
    """A feed whose inputs are made by our own kernels; they depend only on the token and the state before it."""

    def __init__(self, head: DraftHead, runner: ModelRunner, compiled: CompiledInputs) -> None:
        self.compiled = compiled
        super().__init__(head, runner)

    def inputs(self, texts: Seq[Collection[int]], pieces: list[list[Tensor]]) -> Tensor:
        return pad(list(self.flat_inputs(texts, pieces).split(list(map(len, texts)))))

    def flat_inputs(self, texts: Seq[Collection[int]], pieces: list[list[Tensor]]) -> Tensor:
        """Return `inputs` without padding, [N, hidden]."""
        ids = torch.tensor([token for text in texts for token in text])
        raw, finished, at = np.zeros((len(ids), self.head.raw_size), np.float32), list[tuple[int, Tensor]](), 0
        for piece in (piece for row in pieces for piece in row):
            if piece.shape[-1] == raw.shape[1]:
                raw[at : at + len(piece)] = piece.float().numpy()
            else:
                # The state before the first token of a text is already finished (zeros).
                finished.append((at, piece))
            at += len(piece)
        x = self.compiled(ids, torch.from_numpy(raw))
        for at, piece in finished:
            x[at : at + len(piece)] = self.head.inputs(ids[at : at + len(piece)], piece)
        return x


def padded_ids(texts: Seq[Collection[int]], device: torch.device) -> Tensor:
    """Return the tokens with zeros after each text: int64 [B, W]."""
    width = max(map(len, texts))
    return to_device([[*text, *[0] * (width - len(text))] for text in texts], device)
