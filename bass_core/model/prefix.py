"""Which prompts begin alike, so that what they share is computed and stored once.

Contract: `share_prompts` puts prompts into groups, each with one prefix of whole units of SHARE tokens. A prompt
is in one group at most. Nothing here knows a model or a cache. Non-goals: prefixes of prefixes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kernels.plan import SHARE

Tokens = tuple[int, ...]
# Prompts that part, one after another, at more places than this may be grouped less well.
_LEVELS = 100


@dataclass(frozen=True)
class SharedPrompts:
    """The prefixes of some prompts, and each prompt's place among them."""

    prefixes: tuple[Tokens, ...] = ()

    def of(self, prompt: Seq[int]) -> Tokens:
        """The longest prefix with which the prompt begins; empty if it begins with none."""
        fitting = (prefix for prefix in self.prefixes if tuple(prompt[: len(prefix)]) == prefix)
        return max(fitting, key=len, default=())

    @property
    def longest(self) -> int:
        """Tokens of the longest prefix."""
        return max(map(len, self.prefixes), default=0)


NOTHING_SHARED = SharedPrompts()


@dataclass(frozen=True)
class CachedTexts:
    """The rows for which a runner is made: their prompts, and how many tokens of each the cache must hold."""

    prompts: Seq[Seq[int]]
    ends: Seq[int]

    def cropped(self, limit: int) -> CachedTexts:
        """The same with at most `limit` tokens of each prompt, for a model with a shorter context."""
        return CachedTexts([prompt[:limit] for prompt in self.prompts], self.ends)

    def shared(self, least_saved: int | None) -> SharedPrompts:
        """Their shared prefixes, see `share_prompts`; None: none."""
        return NOTHING_SHARED if least_saved is None else share_prompts(self.prompts, least_saved)

    def columns(self, shared: SharedPrompts) -> int:
        """Columns that each row of the cache needs after its prefix."""
        own = {tuple(prompt): 0 for prompt in self.prompts}
        for prompt, end in zip(self.prompts, self.ends, strict=True):
            own[tuple(prompt)] = max(own[tuple(prompt)], end)
        return max(end - len(shared.of(prompt)) for prompt, end in own.items())

    def copied(self, shared: SharedPrompts, rows: int) -> int:
        """Tokens that `rows` of them at a time would hold again if each row kept a copy of its prefix."""
        return sum(sorted((len(shared.of(prompt)) for prompt in self.prompts), reverse=True)[:rows])


def share_prompts(prompts: Seq[Seq[int]], least_saved: int = SHARE) -> SharedPrompts:
    """The groups of prompts that together save most tokens: for a group, (rows - 1) x tokens of its prefix.

    A group that saves fewer than `least_saved` tokens is not made.
    """
    counted = Counter(map(tuple, prompts))
    if counted.total() < 2:
        return NOTHING_SHARED
    found = _best(sorted(counted.items()), least_saved)[1]
    return SharedPrompts(tuple(sorted(found)))


def _best(prompts: list[tuple[Tokens, int]], least_saved: int, levels: int = _LEVELS) -> tuple[int, list[Tokens]]:
    """The most tokens that these sorted, counted prompts can save, and the prefixes that save them."""
    first, last = prompts[0][0], prompts[-1][0]
    common = _common(first, last)
    together = (sum(count for _, count in prompts) - 1) * common
    saved, prefixes = (together, [first[:common]]) if together >= max(least_saved, 1) else (0, [])
    if len(prompts) == 1 or not levels:
        return saved, prefixes
    # Prompts are sorted, so those with the same next unit are neighbours.
    branches: dict[Tokens, list[tuple[Tokens, int]]] = {}
    for prompt, count in prompts:
        branches.setdefault(prompt[common : common + SHARE], []).append((prompt, count))
    if len(branches) == 1:
        return saved, prefixes
    parts = [_best(branch, least_saved, levels - 1) for branch in branches.values()]
    apart = sum(part[0] for part in parts)
    if apart > saved:
        return apart, [prefix for part in parts for prefix in part[1]]
    return saved, prefixes


def _common(first: Tokens, last: Tokens) -> int:
    """How many tokens both begin with, in whole units."""
    most = min(len(first), len(last)) // SHARE * SHARE
    for start in range(0, most, SHARE):
        if first[start : start + SHARE] != last[start : start + SHARE]:
            return start
    return most
