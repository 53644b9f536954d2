"""The option `draft_length`: what it may say, and the policy that it stands for.

Contract: "auto" ("cost-aware" where costs are known, else Algorithm 1), "bass" (Algorithm 1, arXiv 2404.15778),
"cost-aware" (row lengths by measured cost), a whole number of draft tokens from 0 to LONGEST, or a policy of the
user's own (base.py). Nothing here measures anything or runs a model.
"""

from __future__ import annotations

import copy

from ..errors import RequestError
from .base import LengthPolicy
from .cost_aware import LIMIT, CostAware
from .costs import RoundCosts
from .policies import LONGEST, Algorithm1, FixedLength, is_length

DraftLength = str | int | LengthPolicy

AUTO, BASS, COST_AWARE = "auto", "bass", "cost-aware"
# The most drafts of a row and round for which each name wants room. "auto" may turn out to be any of the others.
_LIMITS = {AUTO: 32, BASS: Algorithm1.limit, COST_AWARE: LIMIT}


def check_draft_length(option: DraftLength) -> DraftLength:
    """The option as it is. Raises RequestError, one sentence, for what is none."""
    named = isinstance(option, str) and option in _LIMITS
    if named or is_length(option) or _is_policy(option):
        return option
    raise RequestError(
        f"draft_length must be one of {', '.join(_LIMITS)}, a whole number from 0 to {LONGEST}, or an object with "
        f"`limit`, `lengths` and `observe`; got {option!r}."
    )


def longest_draft(option: DraftLength) -> int:
    """The most draft tokens a row and round that a checked option may ask for."""
    if isinstance(option, str):
        return _LIMITS[option]
    return option if isinstance(option, int) else option.limit


def fixed_length(option: DraftLength) -> int | None:
    """The draft length of every round where a checked option fixes it, else None."""
    if isinstance(option, FixedLength):
        return option.length
    return option if is_length(option) else None


def wants_costs(option: DraftLength) -> bool:
    """Whether a checked option goes by what rounds cost."""
    return isinstance(option, str) and option in (AUTO, COST_AWARE)


def make_policy(option: DraftLength, costs: RoundCosts | None = None, timed: bool = True) -> LengthPolicy:
    """A fresh policy for a checked option; a user's object is copied.

    costs: what rounds cost. With them "auto" goes by them; without them it is Algorithm 1, and "cost-aware" raises
    ValueError. timed: whether the rounds' own times correct the costs.
    """
    check_draft_length(option)
    if wants_costs(option) and costs is not None:
        return CostAware(costs, timed)
    if option == COST_AWARE:
        raise ValueError(f'draft_length="{option}" needs costs: see with_costs in decode/measuring.py.')
    if isinstance(option, str):
        return Algorithm1()
    if isinstance(option, int):
        return FixedLength(option)
    return copy.deepcopy(option)


def _is_policy(option: object) -> bool:
    """Whether it has what a decoder asks of a policy."""
    asked = all(callable(getattr(option, name, None)) for name in ("lengths", "observe"))
    return asked and is_length(getattr(option, "limit", None))
