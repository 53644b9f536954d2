"""The cost-aware draft length: the one that should write most tokens a millisecond on this machine.

Contract: before each round the policy weighs every length from 0 (a plain step) to its limit: what it should
write, by the acceptance seen so far, over what it should cost, by a table measured on this machine
(decoding/calibrate.py). Given the table it is a function of what was drafted and accepted alone, so a run
repeats. While drafting loses, it is tried again now and then, more and more seldom.
Formula: tokens a row and round = 1 + sum over i of P(position i accepted), as in Leviathan et al. 2211.17192,
equation 1, with a probability of its own for each position.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .cost_table import RoundCosts

# The weight of an observation is multiplied by this with every later round: acceptance changes along a text.
MEMORY = 0.97
# A position starts as if tried PRIOR times, at the rate of the position before it (the first at PRIOR_RATE).
PRIOR, PRIOR_RATE = 2.0, 0.6
# Plain steps until drafting is tried again; the wait doubles, up to the longest, while drafting keeps losing.
FIRST_WAIT, LONGEST_WAIT = 16, 64


@dataclass
class _Chain:
    """Estimates how often a count reaches position i, given that it reached i - 1."""

    limit: int
    tried: list[float] = field(init=False)
    reached: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.tried, self.reached = [0.0] * self.limit, [0.0] * self.limit

    def fade(self) -> None:
        self.tried = [MEMORY * count for count in self.tried]
        self.reached = [MEMORY * count for count in self.reached]

    def add(self, count: int, requested: int) -> None:
        """Note a count that could have reached `requested`."""
        for position in range(min(count + 1, requested)):
            self.tried[position] += 1
            self.reached[position] += count > position

    def expected(self, prior: float) -> list[float]:
        """E[min(count, l)] for l = 0 .. limit, when at least l are requested."""
        sums, alive, rate = [0.0], 1.0, prior
        for tried, reached in zip(self.tried, self.reached, strict=True):
            rate = (reached + PRIOR * rate) / (tried + PRIOR)
            alive *= rate
            sums.append(sums[-1] + alive)
        return sums


class CostAware:
    """Chooses the length by a CostTable or another RoundCosts. `rows` is the batch that it starts with."""

    def __init__(self, table: RoundCosts, rows: int = 1, limit: int = 16) -> None:
        self.table, self.rows, self.limit = table, rows, limit
        self._accepted, self._drafted = _Chain(limit), _Chain(limit)
        self._widest, self._forwards = _Chain(limit), _Chain(limit)
        self._plain, self._wait = 0, FIRST_WAIT
        self.length = self._choose()

    def update(self, accepted: list[int]) -> None:
        """Does nothing: `observe` learns from every round."""

    def observe(self, requested: int, drafted: list[int], accepted: list[int], forwards: int) -> None:
        """What each row drafted and accepted in a round of length `requested`, and forwards of the draft it took.

        A row counts as if what it drafted was requested where it was cut short by its own end.
        """
        self.rows = len(drafted)
        if requested:
            for chain in (self._accepted, self._drafted, self._widest, self._forwards):
                chain.fade()
            for tried, stood in zip(drafted, accepted, strict=True):
                self._drafted.add(tried, requested)
                self._accepted.add(stood, requested)
            self._widest.add(max(drafted), requested)
            self._forwards.add(forwards, requested)
        self.length = self._choose()
        if self.length:
            self._plain = 0
            self._wait = FIRST_WAIT
            return
        self._plain += 1
        if self._plain >= self._wait:
            self._plain, self._wait = 0, min(2 * self._wait, LONGEST_WAIT)
            self.length = self._choose(least=1)

    def rates(self) -> list[float]:
        """Expected tokens a ms of the whole batch for lengths 0 .. limit."""
        written = self._accepted.expected(PRIOR_RATE)
        fed = (self._widest if self.table.padded else self._drafted).expected(1.0)
        forwards = self._forwards.expected(1.0)
        draft_ms = self.table.draft_ms(self.rows)
        return [
            self.rows
            * (1 + written[length])
            / (self.table.verify_ms(self.rows, self.rows * (1 + fed[length])) + draft_ms * forwards[length])
            for length in range(self.limit + 1)
        ]

    def _choose(self, least: int = 0) -> int:
        rates = self.rates()
        return max(range(least, self.limit + 1), key=lambda length: rates[length])
