"""Sampling parameters: temperature, top-k, top-p and min-p, penalties, biases and bad words.

A SamplingParams that exists is valid, hashable and comparable. shaping.py applies the penalties.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import RequestError

# The smallest temperature for sampling (vLLM's _SAMPLING_EPS); below it decoding is greedy.
COLDEST = 1e-5
# The largest divisor of the logits, because float32 can't hold the reciprocal of a larger one. At this temperature
# all unmasked tokens are equally likely anyway, so a higher one would change nothing.
HOTTEST = 2.0**126

# Limits of the repetition penalty, and of the size of presence and frequency penalties and biases. Within them the
# changed logits fit float32.
MIN_REPETITION, MAX_REPETITION = 1e-3, 1e3
MAX_ADDED = 1e4

# A word that must not be written: its text, or its token ids.
Word = str | tuple[int, ...]


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. An unusable value raises a RequestError.

    Penalties, biases and bad words change the logits before the temperature, in greedy decoding too.

    Attributes:
        temperature: divisor of the logits; 0 or more, greedy below COLDEST.
        top_k: keep the k largest logits; 0 keeps all.
        top_p: keep the most likely tokens until their mass reaches this, above 0 and at most 1; 1 keeps all.
        min_p: keep tokens at least this likely, relative to the most likely one, 0 to 1; 0 keeps all.
        repetition_penalty: divides positive logits of tokens in the prompt or the text, and multiplies negative
            ones (Keskar et al., arXiv 1909.05858); 0.001 to 1000, 1 for none.
        presence_penalty: subtracted once from the logit of a token in the text, without the prompt (OpenAI's);
            -10000 to 10000, 0 for none.
        frequency_penalty: subtracted once per occurrence of a token in the text, without the prompt (OpenAI's);
            -10000 to 10000, 0 for none.
        logit_bias: a dictionary from token ids to numbers added to their logits; -10000 to 10000, or -inf to
            forbid one.
        bad_words: words that must not be written, as texts or as lists of token ids.
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
        if not _is_number(self.temperature) or self.temperature < 0:
            raise RequestError(
                f"temperature must be a number of at least 0 (0 is greedy); got {self.temperature!r}."
            )
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise RequestError(f"top_k must be a whole number of at least 0 (0 turns it off); got {self.top_k!r}.")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be above 0 and at most 1 (1 turns it off); got {self.top_p!r}.")
        if not _is_number(self.min_p) or not 0 <= self.min_p <= 1:
            raise RequestError(f"min_p must be from 0 to 1 (0 turns it off); got {self.min_p!r}.")
        penalty = self.repetition_penalty
        if not _is_number(penalty) or not MIN_REPETITION <= penalty <= MAX_REPETITION:
            raise RequestError(
                f"repetition_penalty must be a number from {MIN_REPETITION:g} to {MAX_REPETITION:g} "
                f"(1 turns it off); got {penalty!r}."
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not _is_addable(getattr(self, name)):
                raise RequestError(
                    f"{name} must be a number from {-MAX_ADDED:g} to {MAX_ADDED:g} (0 turns it off); "
                    f"got {getattr(self, name)!r}."
                )
        object.__setattr__(self, "logit_bias", _sorted_biases(self.logit_bias))
        object.__setattr__(self, "bad_words", _checked_words(self.bad_words))

    @property
    def divisor(self) -> float:
        """Divisor of the logits: the temperature, at most HOTTEST."""
        return min(self.temperature, HOTTEST)

    @property
    def greedy(self) -> bool:
        """Whether to take the most likely token, without a draw."""
        return self.temperature < COLDEST

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """The items of `logit_bias`, sorted by token id."""
        return _sorted_biases(self.logit_bias)

    @property
    def counts(self) -> bool:
        """Whether the logits depend on the tokens of the text."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def longer_words(self) -> tuple[tuple[int, ...], ...]:
        """The bad words of several tokens."""
        return tuple(word for word in self.bad_words if not isinstance(word, str) and len(word) > 1)

    @property
    def barred(self) -> tuple[int, ...]:
        """The bad words of one token."""
        return tuple(word[0] for word in self.bad_words if not isinstance(word, str) and len(word) == 1)

    @property
    def reads_text(self) -> bool:
        """Whether the changes to the logits depend on the text."""
        return self.counts or bool(self.longer_words)

    @property
    def unshaped(self) -> SamplingParams:
        """The same parameters without penalties, biases and bad words."""
        return SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def shapes(self) -> bool:
        """Whether penalties, biases or bad words change the logits."""
        return self.counts or bool(self.logit_bias) or bool(self.bad_words)


def _is_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int too large for a float
        return False


def _is_addable(value: Any) -> bool:
    return _is_number(value) and abs(value) <= MAX_ADDED


def _sorted_biases(value: Any) -> tuple[tuple[int, float], ...]:
    pairs = value.items() if isinstance(value, Mapping) else value
    try:
        biases = {token: bias for token, bias in pairs}
        valid = all(type(token) is int and token >= 0 for token in biases)
        valid = valid and all(_is_addable(bias) or bias == -math.inf for bias in biases.values())
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise RequestError(
            f"logit_bias must be a dictionary of token ids and numbers from {-MAX_ADDED:g} to {MAX_ADDED:g}, or "
            f"-inf; got {value!r}."
        )
    return tuple(sorted((token, float(bias)) for token, bias in biases.items()))


def _checked_words(value: Any) -> tuple[Word, ...]:
    words = value if isinstance(value, list | tuple) else None
    copied = [
        word if isinstance(word, str) else tuple(word)
        for word in words or ()
        if isinstance(word, str | list | tuple)
    ]
    valid = words is not None and len(copied) == len(words) and all(copied)
    if not valid or not all(
        isinstance(word, str) or all(type(i) is int and i >= 0 for i in word) for word in copied
    ):
        raise RequestError(f"bad_words must be a list of texts or lists of token ids, none empty; got {value!r}.")
    return tuple(copied)
