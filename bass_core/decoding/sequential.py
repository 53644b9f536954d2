"""Sequences decoded one after another, each as a batch of one.

Contract: a decoder (base.py); the caches of a sequence are freed before the next one's are made.
"""

from __future__ import annotations

from collections.abc import Callable

from ..sequence import Round, Sequence
from .base import Timeline
from .batch import BatchDecoder


class SequentialDecoder:
    """Sequences decoded one after another, each as a batch of one; the caches of the last are freed first."""

    def __init__(self, sequences: list[Sequence], make: Callable[[Sequence], BatchDecoder]) -> None:
        self._waiting, self._make = list(sequences), make
        self._current: BatchDecoder | None = None
        self._done_forwards = 0

    @property
    def target_forwards(self) -> int:
        return self._done_forwards + (self._current.target_forwards if self._current else 0)

    @property
    def finished(self) -> bool:
        return not self._waiting and (self._current is None or self._current.finished)

    @property
    def timeline(self) -> Timeline | None:
        """None: nothing overlaps."""
        return None

    def pause(self) -> None:
        """Nothing works on between steps."""

    def close(self) -> None:
        """Nothing is held beyond the decoder's own memory."""

    def prepare(self) -> None:
        """`BatchDecoder.prepare` for the first sequence; the others find what was captured for it."""
        if self._current is None and self._waiting:
            self._current = self._make(self._waiting.pop(0))
            self._current.prepare()

    def step(self) -> Round:
        if self._current is None or self._current.finished:
            self._done_forwards = self.target_forwards
            self._current = None
            self._current = self._make(self._waiting.pop(0))
        return self._current.step()
