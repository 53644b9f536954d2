"""The speed of a lane: its texts counted in plain steps, and the time that regular decoding needs for them.

Call `Tally.add` for each round of a lane; `Tally.pace` returns its Pace so far. All figures of speed come from it:
`ms_per_token`, and compared with the reference lane's Pace `speedup`, `round_cost` and `scatter`.

The j-th token of a text is worth 1 / m plain steps, where m is the number of rows that have at least j tokens or
are unfinished, including rows that have not begun. For example, a lane that serves one of four rows at a time
writes a quarter of a plain step with each token. Regular decoding writes one plain step per step. Tokens and
times of prefills don't count.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .snapshot import LaneSnapshot

# Rounds that a running lane needs before its speed is shown.
LEAST_ROUNDS = 8
# While lanes run, a round's time is capped at this many times the lane's median time of a round, because one
# stalled step says nothing about speed. Once the lanes have finished, nothing is capped.
STALL = 4.0
# The finish reasons of a complete text. With any other reason ("budget", "stopped", "error") the text was cut off,
# and its row counts as unfinished.
ENDS = frozenset({"eos", "stop", "grammar", "length"})


@dataclass(frozen=True, eq=False)
class Pace:
    """The rounds of one lane, or of several races of one lane together.

    Args:
        shared: shared[m] is the number of decoded tokens that are worth 1 / m plain steps (see the module
            docstring).
        rows: int64 [R], for each round the rows that were unfinished when it began.
        written: int64 [R], the tokens that it appended.
        ms: float64 [R], its time.
    """

    shared: Counter[int]
    rows: NDArray[np.int64]
    written: NDArray[np.int64]
    ms: NDArray[np.float64]
    over: bool

    @staticmethod
    def of(lane: LaneSnapshot) -> Pace:
        """Return the pace of a lane in a snapshot."""
        sequences = lane["sequences"]
        lengths = [
            len(sequence["token_ids"]) if sequence["finish_reason"] in ENDS else None for sequence in sequences
        ]
        tally, at = Tally(len(sequences)), 0.0
        for record in lane["rounds"]:
            rows = [(row["sequence"], row["written"], row["start"] + row["written"]) for row in record["rows"]]
            tally.add(record["kind"], record["time_ms"] - at, [(i, n, end == lengths[i]) for i, n, end in rows])
            at = record["time_ms"]
        return tally.pace(lane["finished"])

    @staticmethod
    def together(paces: Iterable[Pace]) -> Pace:
        """Join the paces of one lane in several races. If there are none, return the pace of an idle lane."""
        return reduce(Pace._joined, paces, Tally(0).pace(over=True))

    def _joined(self, other: Pace) -> Pace:
        return Pace(
            shared=self.shared + other.shared,
            rows=np.concatenate([self.rows, other.rows]),
            written=np.concatenate([self.written, other.written]),
            ms=np.concatenate([self.ms, other.ms]),
            over=self.over and other.over,
        )

    @property
    def plain_steps(self) -> float:
        """The texts' worth in plain steps."""
        return sum(count / m for m, count in self.shared.items())

    @property
    def ms_per_token(self) -> float | None:
        """The lane's time per plain step, or None before it has written anything."""
        return float(self.ms.sum()) / self.plain_steps if self.shared else None

    @property
    def early(self) -> bool:
        """Whether there are too few rounds to know the lane's speed."""
        return not self.shared or not self.ms.sum() or not (self.over or len(self.ms) >= LEAST_ROUNDS)

    @cached_property
    def _capped_ms(self) -> NDArray[np.float64]:
        return np.minimum(self.ms, STALL * np.median(self.ms)) if len(self.ms) else self.ms

    def speedup(self, reference: Pace) -> float | None:
        """Return (the reference's time for this lane's texts) / (this lane's time), or None if either is `early`.

        The reference's time for a token worth 1 / m plain steps is s(m) / m, where s(m) is the reference's mean
        time of a plain step with m unfinished rows. s(m) is interpolated linearly between the values of m that
        occurred, and is constant beyond them. For equal texts, the result is the ratio of the lanes' times.
        """
        if self.early or reference.early:
            return None
        ours, step_ms = _times(self, reference)
        return sum(count * step_ms(m) / m for m, count in self.shared.items()) / float(ours.sum())

    def round_cost(self, reference: Pace) -> float | None:
        """Return the mean cost of a round, in steps of the reference with as many unfinished rows, or None."""
        if self.early or reference.early:
            return None
        ours, step_ms = _times(self, reference)
        return float(ours.sum()) / sum(count * step_ms(m) for m, count in Counter(self.rows.tolist()).items())

    def against(self, reference: Pace | None) -> dict[str, float | None]:
        """Return speedup, round_cost and scatter under their names in Metrics.

        `reference` is None in a race without a reference lane. A reference that failed before it wrote anything is
        ignored.
        """
        if reference is not None and reference.over and reference.early:
            reference = None
        scatter = math.inf if self.early or (reference and reference.early) else self.scatter(reference)
        return {
            "speedup": None if reference is None else self.speedup(reference),
            "round_cost": None if reference is None else self.round_cost(reference),
            "scatter": scatter if math.isfinite(scatter) else None,
        }

    def scatter(self, reference: Pace | None = None) -> float:
        """Return the relative standard error of this lane's speed, from its rounds; inf before two rounds.

        Round i takes s_i ms, and the reference needs t_i ms for the tokens of that round. Without a reference, t_i
        is their worth in plain steps. For R rounds the error is sqrt(R / (R - 1) sum((t_i - r s_i)^2)) / sum(t_i),
        with r = sum(t_i) / sum(s_i) (Cochran, Sampling Techniques, section 6.4).
        """
        count = len(self.ms)
        if count < 2 or not self.shared or not self.ms.sum():
            return math.inf
        ours, worth = self.ms, self.written / self.rows
        if reference is not None and len(reference.ms):
            ours, step_ms = _times(self, reference)
            steps = {m: step_ms(m) for m in set(self.rows.tolist())}
            worth = worth * np.array([steps[m] for m in self.rows.tolist()])
        residuals = worth - worth.sum() / ours.sum() * ours
        return float(math.sqrt(count / (count - 1) * float((residuals**2).sum())) / worth.sum())


class _StepTimes:
    """The reference's mean time of a plain step, by its number of unfinished rows."""

    def __init__(self, reference: Pace, ms: NDArray[np.float64]) -> None:
        self.seen, place = np.unique(reference.rows, return_inverse=True)
        self.means = self.seen * np.bincount(place, ms) / np.bincount(place, reference.written)

    def __call__(self, rows: int) -> float:
        return float(np.interp(rows, self.seen, self.means))


def _times(lane: Pace, reference: Pace) -> tuple[NDArray[np.float64], _StepTimes]:
    """Return the times of the lane's rounds and the reference's steps, capped (STALL) until both are over."""
    if lane.over and reference.over:
        return lane.ms, _StepTimes(reference, reference.ms)
    return lane._capped_ms, _StepTimes(reference, reference._capped_ms)


class Tally:
    """Collects the rounds of one lane of `rows` rows."""

    def __init__(self, rows: int) -> None:
        self._prefilled, self._length, self._ended = [0] * rows, [0] * rows, [False] * rows
        self._rows, self._written, self._ms = array("q"), array("q"), array("d")

    def add(self, kind: str, ms: float, rows: Iterable[tuple[int, int, bool]]) -> None:
        """Count a round.

        Args:
            rows: for each row its index, its number of new tokens, and whether its text ended.
        """
        unfinished, written = self._ended.count(False), 0
        for index, tokens, ended in rows:
            written += tokens
            self._length[index] += tokens
            self._prefilled[index] += tokens if kind == "prefill" else 0
            self._ended[index] |= ended
        if kind != "prefill":
            self._rows.append(unfinished)
            self._written.append(written)
            self._ms.append(ms)

    def pace(self, over: bool) -> Pace:
        """Return the pace so far. `over`: whether the lane has finished."""
        return Pace(
            self._shared(),
            np.array(self._rows, np.int64),
            np.array(self._written, np.int64),
            np.array(self._ms, np.float64),
            over,
        )

    def _shared(self) -> Counter[int]:
        """Return `Pace.shared`: for each m, the number of decoded tokens that are worth 1 / m plain steps."""
        writers: Counter[int] = Counter()
        ended: Counter[int] = Counter()
        for prefilled, length, over in zip(self._prefilled, self._length, self._ended, strict=True):
            writers[prefilled] += 1
            writers[length] -= 1
            ended[length] += over
        shared: Counter[int] = Counter()
        sharing, writing = len(self._length), 0
        for place, following in pairwise(sorted(writers.keys() | ended.keys())):
            writing += writers[place]
            sharing -= ended[place]
            if writing:
                shared[sharing] += writing * (following - place)
        return shared
