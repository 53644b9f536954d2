"""The option `draft_length`: its values (`check_draft_length`), and their policies (`make_policy`).

The values are the names in `POLICIES`, a whole number of draft tokens from 0 to LONGEST, or a user's own policy
(base.py). To add a policy by name, add a line to `POLICIES`. Nothing here measures anything or runs a model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..errors import RequestError
from .acceptance import PastDrafts
from .base import LengthPolicy, own_copy
from .cost_aware import LIMIT, CostAware
from .costs import RoundCosts
from .policies import LONGEST, Algorithm1, FixedLength, is_length

DraftLength = str | int | LengthPolicy

AUTO, BASS, COST_AWARE = "auto", "bass", "cost-aware"


class PolicyParts(NamedTuple):
    """The parts that a policy may be built from.

    Attributes:
        costs: costs of rounds, or None if they are unknown.
        timed: whether the rounds' own times correct the costs.
        past_drafts: counts of earlier calls (acceptance.py), which a cost-aware policy adds to.
    """

    costs: RoundCosts | None = None
    timed: bool = True
    past_drafts: PastDrafts | None = None


class PolicyKind(NamedTuple):
    """A line of `POLICIES`.

    Attributes:
        limit: maximum number of draft tokens per row and round.
        uses_costs: whether it uses the costs of rounds, which are then measured.
    """

    limit: int
    make: Callable[[PolicyParts], LengthPolicy]
    uses_costs: bool = False


def _cost_aware(parts: PolicyParts) -> LengthPolicy:
    if parts.costs is None:
        raise ValueError(f'draft_length="{COST_AWARE}" needs costs: see with_costs in decode/measuring.py.')
    return CostAware(parts.costs, parts.timed, parts.past_drafts)


def _algorithm_1(parts: PolicyParts) -> LengthPolicy:
    return Algorithm1()


def _auto(parts: PolicyParts) -> LengthPolicy:
    return (_algorithm_1 if parts.costs is None else _cost_aware)(parts)


POLICIES = {
    # "cost-aware" if costs are known, else "bass"
    AUTO: PolicyKind(max(Algorithm1.limit, LIMIT), _auto, uses_costs=True),
    # Algorithm 1 of arXiv 2404.15778
    BASS: PolicyKind(Algorithm1.limit, _algorithm_1),
    # the length of each row by measured costs
    COST_AWARE: PolicyKind(LIMIT, _cost_aware, uses_costs=True),
}


def check_draft_length(option: DraftLength) -> DraftLength:
    """Return the option unchanged.

    Raises:
        RequestError: if it is not a valid draft length.
    """
    named = isinstance(option, str) and option in POLICIES
    if named or is_length(option) or _is_policy(option):
        return option
    raise RequestError(
        f"draft_length must be one of {', '.join(POLICIES)}, a whole number from 0 to {LONGEST}, or an object "
        f"with `limit`, `lengths` and `observe`; got {option!r}."
    )


def longest_draft(option: DraftLength) -> int:
    """Return the maximum number of draft tokens per row and round for a checked option."""
    if isinstance(option, str):
        return POLICIES[option].limit
    return option if isinstance(option, int) else option.limit


def fixed_length(option: DraftLength) -> int | None:
    """Return the draft length of every round if a checked option fixes it, else None."""
    if isinstance(option, FixedLength):
        return option.length
    return option if is_length(option) else None


def wants_costs(option: DraftLength) -> bool:
    """Return whether a checked option uses the costs of rounds."""
    return isinstance(option, str) and POLICIES[option].uses_costs


def make_policy(
    option: DraftLength,
    costs: RoundCosts | None = None,
    timed: bool = True,
    past_drafts: PastDrafts | None = None,
) -> LengthPolicy:
    """Return a fresh policy for an option; a user's object is copied. Other arguments as in PolicyParts.

    Raises:
        ValueError: if the option is "cost-aware" and there are no costs.
    """
    check_draft_length(option)
    if isinstance(option, str):
        return POLICIES[option].make(PolicyParts(costs, timed, past_drafts))
    return FixedLength(option) if isinstance(option, int) else own_copy(option, "draft_length object")


def _is_policy(option: object) -> bool:
    """Return whether the option has the members of LengthPolicy."""
    asked = all(callable(getattr(option, name, None)) for name in ("lengths", "observe"))
    return asked and is_length(getattr(option, "limit", None))
