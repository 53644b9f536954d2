"""Counts the back-off n-gram table from what the target wrote.

Contract: a pure function of the corpus and the settings. For each context of 1 to `longest` tokens the likeliest
next token is kept. The table keeps `contexts` contexts: first those of one token, then those whose token was seen
most often, ties by hash.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bass_core.models.ngram import NgramTable, context_key

from .corpus import rows_of
from .settings import NgramSettings


def count_ngrams(paths: list[Path], settings: NgramSettings) -> NgramTable:
    """Count over the answers of all shards; an answer's first contexts reach back into its prompt."""
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    single: set[int] = set()
    for path in tqdm(paths, desc="n-grams", unit="shard"):
        for tokens, _, prompt in rows_of(path):
            text = tokens.tolist()
            for at in range(prompt, len(text)):
                for size in range(1, min(settings.longest, at) + 1):
                    key = context_key(text[at - size : at])
                    counts[key][text[at]] += 1
                    if size == 1:
                        single.add(key)
    best = [(key, *followers.most_common(1)[0]) for key, followers in counts.items()]
    best.sort(key=lambda entry: (entry[0] not in single, -entry[2], entry[0]))
    kept = sorted(best[: settings.contexts])
    keys = np.array([key for key, _, _ in kept], dtype=np.uint64)
    tokens_ = np.array([token for _, token, _ in kept], dtype=np.uint32)
    return NgramTable(keys, tokens_, settings.longest)
