"""Decode sequences one after another, each as a batch of one.

All use the same caches in turn, so a prefix that a prompt shares with the one before it is not computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..sequence import Round, Sequence
from .base import CacheBytes, Decoder
from .batch import BatchDecoder


class SequentialDecoder(Decoder):
    """Decodes its sequences in order; `make` builds the decoder of each when its turn comes."""

    def __init__(
        self, sequences: list[Sequence], make: Callable[[Sequence], BatchDecoder], cache: CacheBytes | None = None
    ) -> None:
        self._waiting, self._make, self.cache = list(sequences), make, cache
        self._current: BatchDecoder | None = None
        self._done_forwards = 0

    @property
    def target_forwards(self) -> int:
        return self._done_forwards + (self._current.target_forwards if self._current else 0)

    @property
    def finished(self) -> bool:
        return not self._waiting and (self._current is None or self._current.finished)

    @property
    def next_begins(self) -> Any:
        # The next sequence's prompt must not pay for a round that an ended sequence has left on the device.
        return None if self._current is None or self._current.finished else self._current.next_begins

    def close(self) -> None:
        if self._current is not None:
            self._current.close()

    def prepare(self) -> None:
        """Prepare the first sequence's decoder; the others reuse the graphs captured for it."""
        if self._current is None and self._waiting:
            self._current = self._make(self._waiting.pop(0))
            self._current.prepare()

    def step(self) -> Round:
        if self._current is None or self._current.finished:
            self._done_forwards = self.target_forwards
            self._current = None
            self._current = self._make(self._waiting.pop(0))
        return self._current.step()
