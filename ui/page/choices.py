"""The values that the settings offer, each with its label.

Contract: offers only what this pair and this version of bass_core can do.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
from ui.page.limits import MAX_DRAFT_LENGTH

Choice = tuple[str, str]

SCHEDULING_WORDS = {
    "fair": "fair: the lane that is furthest behind goes next",
    "overlap": "overlap: all lanes at once, competing for the device",
    "in_turn": "in turn: one lane after another",
}
DRAFT_LENGTH_WORDS = {
    "auto": "automatic: by measured cost",
    "bass": "Algorithm 1, the paper's rule",
    "cost-aware": "cost-aware: by cost, measured in full first",
}
COUPLED = "Coupled: all lanes use the same random numbers, so they write the same text at any temperature."
# For models whose sums are rounded to 16 bits (CausalModel.low_precision), which the words above promise too much.
NEAR_TIES_WORDS = "coupled: the same text, except at near ties"
NEAR_TIES = (
    f"{COUPLED} This model is computed in 16 bits, so lanes can differ where two tokens are almost equally "
    "likely; a row that differs shows where."
)


@dataclass(frozen=True)
class Choices:
    """(words, value) for each setting with a list; `verification` is the line below that list's label."""

    lanes: tuple[Choice, ...] = field(default_factory=lambda: lanes())
    prompts: tuple[Choice, ...] = (("one prompt for all rows", "one"), ("one prompt a line", "lines"))
    drafters: tuple[Choice, ...] = (("automatic: the pair's own", "auto"),)
    attentions: tuple[Choice, ...] = (("automatic: the fastest on this device", "auto"),)
    schedulings: tuple[Choice, ...] = tuple((SCHEDULING_WORDS.get(name, name), name) for name in SCHEDULINGS)
    verifications: tuple[Choice, ...] = field(default_factory=lambda: verifications())
    verification: str = COUPLED
    draft_lengths: tuple[Choice, ...] = field(default_factory=lambda: draft_lengths("auto"))


def lanes() -> tuple[Choice, ...]:
    """Every method in bass_core's table, registered ones included."""
    return tuple((method.label, name) for name, method in METHODS.items())


def verifications(near_ties: bool = False) -> tuple[Choice, ...]:
    """The ways to verify; with `near_ties`, coupled lanes are not promised the same text."""
    return tuple(
        (NEAR_TIES_WORDS if near_ties and kind.coupled else kind.label, name)
        for name, kind in VERIFICATIONS.items()
    )


def draft_lengths(first: str) -> tuple[Choice, ...]:
    """The policies, with `first` at the head of the list, and the fixed lengths."""
    policies = sorted(DRAFT_LENGTH_WORDS, key=lambda name: name != first)
    fixed = ((f"fixed, {length}", str(length)) for length in range(1, MAX_DRAFT_LENGTH + 1))
    return (*((DRAFT_LENGTH_WORDS[name], name) for name in policies), *fixed)


def choices(pair: ModelPair, draft_length: str) -> Choices:
    """What can be chosen with this pair; `draft_length` is the policy that the page starts with."""
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
    )


def _has_drafter(pair: ModelPair, name: str) -> bool:
    try:
        choose_drafter(pair, name)
    except BassError:
        return False
    return True
