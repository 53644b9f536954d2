"""How tokens are chosen: temperature, top-k, top-p and min-p, penalties and biases, checked.

Contract: a SamplingParams that exists is valid, can be hashed and compared. What penalties read of a text, and how
they change logits, is in shaping.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import RequestError

# The smallest temperature that is sampled with (vLLM's _SAMPLING_EPS); below it decoding is greedy.
COLDEST = 1e-5
# The largest temperature that logits are divided by; above it, float32 could not hold its reciprocal. All logits
# of a model are equally likely there, but for those that are masked.
HOTTEST = 2.0**126

# The smallest and the largest repetition penalty, and how large presence and frequency penalties and biases may be
# either way: float32 holds what they make of logits.
LEAST_REPETITION, MOST_REPETITION = 1e-3, 1e3
MOST_ADDED = 1e4

# A word that must not be written: its text, or its token ids.
Word = str | tuple[int, ...]


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. An unusable value is refused with a RequestError.

    temperature: logits are divided by it; 0 or more, and greedy below COLDEST.
    top_k: keep the k largest logits; 0: all.
    top_p: keep the likeliest tokens until their mass reaches it, above 0 and at most 1; 1: all.
    min_p: keep the tokens that are at least so many times as likely as the likeliest, 0 to 1; 0: all.
    repetition_penalty: divides positive logits of tokens that the prompt or the text holds, and multiplies
        negative ones (Keskar et al., arXiv 1909.05858); 0.001 to 1000, and 1 for none.
    presence_penalty, frequency_penalty: taken from the logits of tokens that the text holds, the prompt not
        counted: the first once, the second for each time (OpenAI's); -10000 to 10000, and 0 for none.
    logit_bias: added to the logits of these ids, a dictionary; -10000 to 10000, and -inf forbids one.
    bad_words: words that must not be written, as texts or as lists of token ids.

    Penalties, biases and bad words change the logits before the temperature, greedy ones included.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    bad_words: tuple[Word, ...] = ()

    def __post_init__(self) -> None:
        if not _number(self.temperature) or self.temperature < 0:
            raise RequestError(
                f"temperature must be a number of at least 0 (0 is greedy); got {self.temperature!r}."
            )
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise RequestError(f"top_k must be a whole number of at least 0 (0 turns it off); got {self.top_k!r}.")
        if not _number(self.top_p) or not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be above 0 and at most 1 (1 turns it off); got {self.top_p!r}.")
        if not _number(self.min_p) or not 0 <= self.min_p <= 1:
            raise RequestError(f"min_p must be from 0 to 1 (0 turns it off); got {self.min_p!r}.")
        penalty = self.repetition_penalty
        if not _number(penalty) or not LEAST_REPETITION <= penalty <= MOST_REPETITION:
            raise RequestError(
                f"repetition_penalty must be a number from {LEAST_REPETITION:g} to {MOST_REPETITION:g} "
                f"(1 turns it off); got {penalty!r}."
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not _addable(getattr(self, name)):
                raise RequestError(
                    f"{name} must be a number from {-MOST_ADDED:g} to {MOST_ADDED:g} (0 turns it off); "
                    f"got {getattr(self, name)!r}."
                )
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(self, "bad_words", _words(self.bad_words))

    @property
    def divisor(self) -> float:
        """What logits are divided by: the temperature, at most HOTTEST."""
        return min(self.temperature, HOTTEST)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without a draw."""
        return self.temperature < COLDEST

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs of a token id and a number, by id."""
        return _biases(self.logit_bias)

    @property
    def counts(self) -> bool:
        """Whether the logits depend on which tokens the text holds."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def unshaped(self) -> SamplingParams:
        """The same without penalties, biases and bad words."""
        return SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def shapes(self) -> bool:
        """Whether penalties, biases or bad words change the logits."""
        return self.counts or bool(self.logit_bias) or bool(self.bad_words)


def _number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float holds
        return False


def _addable(value: Any) -> bool:
    return _number(value) and abs(value) <= MOST_ADDED


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    pairs = given.items() if isinstance(given, Mapping) else given
    try:
        made = {token: bias for token, bias in pairs}
        right = all(type(token) is int and token >= 0 for token in made)
        right = right and all(_addable(bias) or bias == -math.inf for bias in made.values())
    except (TypeError, ValueError):
        right = False
    if not right:
        raise RequestError(
            f"logit_bias must be a dictionary of token ids and numbers from {-MOST_ADDED:g} to {MOST_ADDED:g}, or "
            f"-inf; got {given!r}."
        )
    return tuple(sorted((token, float(bias)) for token, bias in made.items()))


def _words(given: Any) -> tuple[Word, ...]:
    words = given if isinstance(given, list | tuple) else None
    made = [
        word if isinstance(word, str) else tuple(word)
        for word in words or ()
        if isinstance(word, str | list | tuple)
    ]
    right = words is not None and len(made) == len(words) and all(made)
    if not right or not all(
        isinstance(word, str) or all(type(i) is int and i >= 0 for i in word) for word in made
    ):
        raise RequestError(f"bad_words must be a list of texts or lists of token ids, none empty; got {given!r}.")
    return tuple(made)
