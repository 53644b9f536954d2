"""Doubt in this machine's stored figures: costs of rounds (cost_store.py) and a CPU's peaks (peaks.py).

A figure that was measured on a busy machine is too slow. A lane that is faster doubts it at its end. The next
measurement, while no lane runs, then measures it again: before the next request, or when the page is idle.
Doubts change no running lane, and only a lane's times raise them.
"""

from __future__ import annotations

from collections.abc import Hashable


class Doubts:
    """The figures that are doubted, each by its file or by the place in its file.

    Each is doubted once per process, because a second doubt has another reason: the figure was measured at another
    size of text, for example, or a processor's cache served the lane.
    """

    def __init__(self) -> None:
        self._open: set[Hashable] = set()
        self._settled: set[Hashable] = set()

    def __contains__(self, figure: Hashable) -> bool:
        return figure in self._open

    def add(self, figure: Hashable) -> None:
        """Doubt a figure, unless it has been measured again already."""
        if figure not in self._settled:
            self._open.add(figure)

    def settle(self, figure: Hashable) -> None:
        """Note that a figure has been measured. If it was doubted, it is not doubted again."""
        if figure in self._open:
            self._open.remove(figure)
            self._settled.add(figure)


DOUBTS = Doubts()
