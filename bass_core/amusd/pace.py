"""Whether the target should wait for one more draft, from what steps cost and how often drafts are accepted.

Contract: plain numbers; times in milliseconds.
"""

from __future__ import annotations

# The weight of a new measurement in a running mean.
NEWS = 0.2


class Pace:
    """`plain_ms`: milliseconds of a target step without drafts; None until a step was measured."""

    def __init__(self) -> None:
        self.plain_ms: float | None = None
        self._accepted, self._tested = 1, 2

    def measure(self, spent: float, plain: bool) -> None:
        """A step of the target took `spent` ms; `plain` if it verified nothing."""
        if self.plain_ms is None or spent < self.plain_ms:
            self.plain_ms = spent
        elif plain:
            self.plain_ms += NEWS * (spent - self.plain_ms)

    def count(self, accepted: int, drafted: int) -> None:
        """Of a row's `drafted` drafts that were looked at, `accepted` were accepted."""
        self._accepted += accepted
        self._tested += min(accepted + 1, drafted)

    def worth_waiting(self, step_ms: float, counts: list[int], growing: list[bool], waited: float) -> bool:
        """Whether one more draft for the growing rows, a draft's step from now, raises the expected tokens per ms.

        With a token acceptance of a, n drafts give 1 + a + ... + a^n tokens for a target step of t ms (Leviathan
        et al., 2211.17192). One more gives a^(n+1) for d ms: worth it while
        a^(n+1) (t + waited) > d (1 + ... + a^n).
        """
        if self.plain_ms is None:
            return False
        a = self._accepted / self._tested
        gain = sum(a ** (n + 1) for n, grows in zip(counts, growing, strict=True) if grows)
        return gain * (self.plain_ms + waited) > step_ms * sum((1 - a ** (n + 1)) / (1 - a) for n in counts)
