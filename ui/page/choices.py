"""The values that the form's lists offer, each with its label.

`choices` returns only values that the loaded pair and this version of bass_core support.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bass_core import (
    ATTENTIONS,
    DRAFTERS,
    METHODS,
    SCHEDULINGS,
    VERIFICATIONS,
    BassError,
    ModelPair,
    choose_drafter,
)
from ui.page.first import first_race
from ui.page.limits import MAX_DRAFT_LENGTH
from ui.page.presets import First
from ui.sweep.readers import here

Choice = tuple[str, str]

SCHEDULING_WORDS = {
    "fair": "fair: the lane that is furthest behind goes next",
    "overlap": "overlap: all lanes at once, competing for the device",
    "in_turn": "in turn: one lane after the other",
}
DRAFT_LENGTH_WORDS = {
    "auto": "automatic: by measured cost",
    "bass": "Algorithm 1, the paper's rule",
    "cost-aware": "cost-aware: by cost, all costs measured first",
}
COUPLED = "Coupled: all lanes use the same random numbers, so they write the same text at any temperature."
# Words for models whose sums are rounded to 16 bits (CausalModel.low_precision). The lanes of such a model can
# differ at near ties, so COUPLED would promise too much.
NEAR_TIES_WORDS = "coupled: the same text, except at near ties"
NEAR_TIES = (
    f"{COUPLED} This model is computed in 16 bits, so lanes can differ where two tokens are almost equally "
    "likely. A line below each row shows the first difference."
)


@dataclass(frozen=True)
class Choices:
    """The (label, value) pairs of each list, the explanation of `verifications`, the `first` race, and more.

    Attributes:
        here: this machine's entry in the slider over readers (ui/sweep/readers.py), or None.
    """

    lanes: tuple[Choice, ...] = field(default_factory=lambda: lanes())
    prompts: tuple[Choice, ...] = (("one prompt for all rows", "one"), ("one prompt per line", "lines"))
    drafters: tuple[Choice, ...] = (("automatic: the pair's own", "auto"),)
    attentions: tuple[Choice, ...] = (("automatic: the fastest on this device", "auto"),)
    schedulings: tuple[Choice, ...] = tuple((SCHEDULING_WORDS.get(name, name), name) for name in SCHEDULINGS)
    verifications: tuple[Choice, ...] = field(default_factory=lambda: verifications())
    verification: str = COUPLED
    draft_lengths: tuple[Choice, ...] = field(default_factory=lambda: draft_lengths("auto"))
    first: First = field(default_factory=First)
    here: dict[str, Any] | None = None


def lanes() -> tuple[Choice, ...]:
    """Return every method in bass_core's table, including registered ones."""
    return tuple((method.label, name) for name, method in METHODS.items())


def verifications(near_ties: bool = False) -> tuple[Choice, ...]:
    """Return the verification rules. With `near_ties`, the label of coupled lanes admits small differences."""
    return tuple(
        (NEAR_TIES_WORDS if near_ties and kind.coupled else kind.label, name)
        for name, kind in VERIFICATIONS.items()
    )


def draft_lengths(first: str) -> tuple[Choice, ...]:
    """Return the policies, starting with `first`, then the fixed lengths."""
    policies = sorted(DRAFT_LENGTH_WORDS, key=lambda name: name != first)
    fixed = ((f"fixed, {length}", str(length)) for length in range(1, MAX_DRAFT_LENGTH + 1))
    return (*((DRAFT_LENGTH_WORDS[name], name) for name in policies), *fixed)


def choices(pair: ModelPair, draft_length: str, max_batch: int = 32, measures: bool = True) -> Choices:
    """Return the choices for this pair. The page starts with `draft_length`; the rest is as for first_race."""
    near_ties = pair.target_step.low_precision
    return Choices(
        drafters=(
            ("automatic: the pair's own", "auto"),
            *((kind.label, name) for name, kind in DRAFTERS.items() if _has_drafter(pair, name)),
        ),
        verifications=verifications(near_ties),
        verification=NEAR_TIES if near_ties else COUPLED,
        draft_lengths=draft_lengths(draft_length),
        attentions=(("automatic: the fastest on this device", "auto"), *((name, name) for name in ATTENTIONS)),
        first=first_race(pair, max_batch, measures),  # measures what the next line needs
        here=here(pair),
    )


def _has_drafter(pair: ModelPair, name: str) -> bool:
    try:
        choose_drafter(pair, name)
    except BassError:
        return False
    return True
