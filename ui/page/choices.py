"""Contract: what the settings offer, each value with its words; only what this pair and this library can do."""

from __future__ import annotations

from dataclasses import dataclass, field

from bass_core import METHODS, BassError, ModelPair
from bass_core.attention.huggingface import BACKENDS
from bass_core.drafting.registry import DRAFTERS, choose_drafter
from bass_core.lanes.race import SCHEDULINGS
from bass_core.verification.table import VERIFICATIONS
from ui.page.limits import LANES, MAX_DRAFT_LENGTH

Choice = tuple[str, str]

DRAFTER_WORDS = {
    "model": "draft model, at every position",
    "prompt_lookup": "prompt lookup: copies from the text so far",
    "sibling_lookup": "lookup in all texts of the batch",
    "ngram": "n-gram table",
    "lookup": "prompt lookup, else n-gram table",
    "cascade": "prompt lookup, else draft model",
    "adaptive": "prompt lookup, else draft head where it is sure",
}
LANE_WORDS = {"regular": "Regular", "speculative": "Speculative", "bass": "BASS", "amusd": "AMUSD"}
SCHEDULING_WORDS = {
    "fair": "fair: whoever is furthest behind goes next",
    "overlap": "overlap: all at once, competing",
    "in_turn": "in turn: one lane after another, alone",
}
DRAFT_LENGTH_WORDS = {
    "bass": "Algorithm 1, the paper's rule",
    "cost-aware": "cost-aware: by what a round costs here",
}
VERIFICATION_WORDS = {
    "chen": "rejection sampling: the same distribution",
    "coupled": "coupled: the same words in every lane",
}
COUPLED = "Coupled: all lanes draw with the same dice, so their words agree at any temperature."
# Where sums are rounded to 16 bits (CausalModel.low_precision) the words above would promise too much.
NEAR_TIES_WORDS = "coupled: the same words, near ties aside"
NEAR_TIES = (
    f"{COUPLED} But here the weights are multiplied in 16 bits, so lanes can differ where two tokens are almost "
    "equally likely; a row that differs says where."
)


@dataclass(frozen=True)
class Choices:
    """(words, value) of each setting that is picked from a list; `verification` explains one of them."""

    lanes: tuple[Choice, ...] = tuple((LANE_WORDS[name], name) for name in LANES)
    drafters: tuple[Choice, ...] = (("the pair's own", "auto"),)
    attentions: tuple[Choice, ...] = (("the fastest known here", "auto"),)
    schedulings: tuple[Choice, ...] = tuple((SCHEDULING_WORDS.get(name, name), name) for name in SCHEDULINGS)
    verifications: tuple[Choice, ...] = tuple((VERIFICATION_WORDS.get(name, name), name) for name in VERIFICATIONS)
    verification: str = COUPLED
    draft_lengths: tuple[Choice, ...] = field(default_factory=lambda: draft_lengths("bass"))


def draft_lengths(first: str) -> tuple[Choice, ...]:
    """The policies, the page's own first, and the fixed lengths."""
    policies = sorted(DRAFT_LENGTH_WORDS, key=lambda name: name != first)
    fixed = ((f"fixed, {length}", str(length)) for length in range(1, MAX_DRAFT_LENGTH + 1))
    return (*((DRAFT_LENGTH_WORDS[name], name) for name in policies), *fixed)


def choices(pair: ModelPair, draft_length: str) -> Choices:
    """What can be chosen with this pair; the page starts with this policy of draft lengths."""
    near_ties = pair.target_step.low_precision
    coupled = {"coupled": NEAR_TIES_WORDS} if near_ties else {}
    return Choices(
        lanes=tuple((LANE_WORDS.get(name, name), name) for name in METHODS),
        drafters=(
            ("the pair's own", "auto"),
            *((DRAFTER_WORDS.get(name, name), name) for name in DRAFTERS if _has_drafter(pair, name)),
        ),
        verifications=tuple(((VERIFICATION_WORDS | coupled).get(name, name), name) for name in VERIFICATIONS),
        verification=NEAR_TIES if near_ties else COUPLED,
        draft_lengths=draft_lengths(draft_length),
        attentions=(("the fastest known here", "auto"), *((name, name) for name in BACKENDS)),
    )


def _has_drafter(pair: ModelPair, name: str) -> bool:
    try:
        choose_drafter(pair, name)
    except BassError:
        return False
    return True
