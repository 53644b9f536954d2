"""The settings offer and promise only what holds for this pair on this machine."""

from __future__ import annotations

import pytest

from bass_core import ModelPair
from ui.page.choices import COUPLED, NEAR_TIES, choices

from ...models import tiny


@pytest.mark.parametrize(
    ("low_precision", "words", "note"),
    [
        (False, "coupled: the same text in every lane", COUPLED),
        (True, "coupled: the same text, except at near ties", NEAR_TIES),
    ],
)
def test_equal_words_are_promised_only_where_sums_are_not_rounded_to_16_bits(
    low_precision: bool, words: str, note: str
) -> None:
    pair = ModelPair(tiny("llama"))
    pair.target_step.low_precision = low_precision
    made = choices(pair, "auto")
    assert (words, "coupled") in made.verifications and made.verification == note
