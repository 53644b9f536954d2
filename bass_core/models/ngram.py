"""A compact back-off n-gram table: the likeliest next token of each context of 1 to `longest` tokens.

Contract: two memory-mapped arrays, `keys` uint64 sorted and `tokens` uint32 beside it; a look-up is one binary
search for each length of context, longest first. Contexts are kept as 64-bit hashes, so that a table of 200,000
contexts takes 2.4 MB. Two contexts that collide cost a rejected draft, never a wrong text.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import WeightsError

KEYS, TOKENS = "keys.npy", "tokens.npy"
_PRIME, _MASK = 0x100000001B3, (1 << 64) - 1


def context_key(tokens: list[int]) -> int:
    """A 64-bit hash of a context (FNV-1a over its tokens and its length, finished by a xorshift)."""
    value = 0xCBF29CE484222325 ^ len(tokens)
    for token in tokens:
        value = ((value ^ token) * _PRIME) & _MASK
        value ^= value >> 29
    return value


class NgramTable:
    """keys uint64 [N], ascending; tokens uint32 [N]; longest: tokens of the longest context."""

    def __init__(self, keys: NDArray[np.uint64], tokens: NDArray[np.uint32], longest: int) -> None:
        self.keys, self.tokens, self.longest = keys, tokens, longest

    def next_token(self, context: list[int], shortest: int = 1) -> int | None:
        """The likeliest next token after the longest known suffix of the context; None if none is known."""
        for size in range(min(self.longest, len(context)), shortest - 1, -1):
            key = np.uint64(context_key(context[-size:]))
            at = int(self.keys.searchsorted(key))
            if at < len(self.keys) and self.keys[at] == key:
                return int(self.tokens[at])
        return None

    def save(self, folder: Path) -> None:
        """Write both arrays."""
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / KEYS, self.keys)
        np.save(folder / TOKENS, self.tokens)


def load_ngrams(folder: Path, longest: int = 4) -> NgramTable:
    """The table in a folder, memory-mapped. Raises WeightsError if it can't be read."""
    try:
        return NgramTable(np.load(folder / KEYS, mmap_mode="r"), np.load(folder / TOKENS, mmap_mode="r"), longest)
    except (OSError, ValueError) as error:
        raise WeightsError(
            f"The n-gram table in {folder} can't be read ({error}): fetch it again, or count one with "
            "`python -m distill ngram`."
        ) from error
