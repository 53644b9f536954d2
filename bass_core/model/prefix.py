"""Find prompts that begin alike, so that their common prefix is computed and stored once.

`share_prompts` groups prompts; each group has one prefix, a multiple of PREFIX_UNIT tokens long. A prompt is in at
most one group, and prefixes don't share prefixes. This module knows no models and no caches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kernels.plan import PREFIX_UNIT

Tokens = tuple[int, ...]
# Depth of the search. If a group of prompts splits into subgroups more often than this, one split inside another,
# the prompts may be grouped less well.
_MAX_DEPTH = 100


@dataclass(frozen=True)
class SharedPrompts:
    """The shared prefixes of a list of prompts."""

    prefixes: tuple[Tokens, ...] = ()

    def of(self, prompt: Seq[int]) -> Tokens:
        """Return the longest prefix that the prompt begins with, or an empty one."""
        fitting = (prefix for prefix in self.prefixes if tuple(prompt[: len(prefix)]) == prefix)
        return max(fitting, key=len, default=())

    @property
    def longest(self) -> int:
        """The number of tokens in the longest prefix."""
        return max(map(len, self.prefixes), default=0)


NOTHING_SHARED = SharedPrompts()


@dataclass(frozen=True)
class CachedTexts:
    """The texts that a runner is made for.

    Attributes:
        ends: how many tokens of each text the cache must hold.
    """

    prompts: Seq[Seq[int]]
    ends: Seq[int]

    def cropped(self, limit: int) -> CachedTexts:
        """Return these texts with at most `limit` tokens per prompt, for a model with a shorter context."""
        return CachedTexts([prompt[:limit] for prompt in self.prompts], self.ends)

    def shared(self, min_shared_tokens: int | None) -> SharedPrompts:
        """Return the prompts' shared prefixes (`share_prompts`); none if `min_shared_tokens` is None."""
        return NOTHING_SHARED if min_shared_tokens is None else share_prompts(self.prompts, min_shared_tokens)

    def columns(self, shared: SharedPrompts) -> int:
        """Return how many columns each row of the cache needs besides its prefix."""
        if not shared.prefixes:
            return max(self.ends)
        end_of = {tuple(prompt): 0 for prompt in self.prompts}
        for prompt, end in zip(self.prompts, self.ends, strict=True):
            end_of[tuple(prompt)] = max(end_of[tuple(prompt)], end)
        return max(end - len(shared.of(prompt)) for prompt, end in end_of.items())

    def copied(self, shared: SharedPrompts, rows: int) -> int:
        """Return how many more tokens `rows` rows would store if each had its own copy of its shared prefix."""
        return sum(sorted((len(shared.of(prompt)) for prompt in self.prompts), reverse=True)[:rows])


def share_prompts(prompts: Seq[Seq[int]], min_shared_tokens: int = PREFIX_UNIT) -> SharedPrompts:
    """Group the prompts so that sharing saves the most tokens.

    A group saves (rows - 1) x the tokens of its prefix. For example, four prompts that share 64 tokens save 192.
    Groups that save fewer than `min_shared_tokens` tokens are not made.
    """
    counted = Counter(map(tuple, prompts))
    if counted.total() < 2:
        return NOTHING_SHARED
    prefixes = _best_groups(sorted(counted.items()), min_shared_tokens)[1]
    return SharedPrompts(tuple(sorted(prefixes)))


def _best_groups(
    prompts: list[tuple[Tokens, int]], min_shared_tokens: int, depth_left: int = _MAX_DEPTH
) -> tuple[int, list[Tokens]]:
    """Return the most tokens that these sorted, counted prompts can save, and the prefixes to share for that."""
    first, last = prompts[0][0], prompts[-1][0]
    common = _common_len(first, last)
    saved_as_one = (sum(count for _, count in prompts) - 1) * common
    saved, prefixes = (saved_as_one, [first[:common]]) if saved_as_one >= max(min_shared_tokens, 1) else (0, [])
    if len(prompts) == 1 or not depth_left:
        return saved, prefixes
    # Sorted prompts with the same next unit are adjacent.
    branches: dict[Tokens, list[tuple[Tokens, int]]] = {}
    for prompt, count in prompts:
        branches.setdefault(prompt[common : common + PREFIX_UNIT], []).append((prompt, count))
    if len(branches) == 1:
        return saved, prefixes
    parts = [_best_groups(branch, min_shared_tokens, depth_left - 1) for branch in branches.values()]
    saved_apart = sum(part[0] for part in parts)
    if saved_apart > saved:
        return saved_apart, [prefix for part in parts for prefix in part[1]]
    return saved, prefixes


def _common_len(first: Tokens, last: Tokens) -> int:
    """Return how many tokens both prompts begin with, in whole units of PREFIX_UNIT."""
    limit = min(len(first), len(last)) // PREFIX_UNIT * PREFIX_UNIT
    for start in range(0, limit, PREFIX_UNIT):
        if first[start : start + PREFIX_UNIT] != last[start : start + PREFIX_UNIT]:
            return start
    return limit
