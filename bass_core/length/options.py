"""The option `draft_length`: what it may say, and the policy that it stands for.

Contract: "auto" ("cost-aware" where costs are known, else Algorithm 1), "bass" (Algorithm 1, arXiv 2404.15778),
"cost-aware" (row lengths by measured cost), a whole number of draft tokens from 0 to LONGEST, or an object of the
user's own: a policy (policies.py) or a budget (base.py). Nothing here measures anything or runs a model.
"""

from __future__ import annotations

import copy
from typing import TypeGuard

from ..errors import RequestError
from .base import Budget
from .cost_aware import LIMIT, CostAware
from .costs import RoundCosts
from .policies import LONGEST, Algorithm1, DraftLengthPolicy, EqualRows, FixedLength, is_length

DraftLength = str | int | DraftLengthPolicy | Budget

AUTO, BASS, COST_AWARE = "auto", "bass", "cost-aware"
# The most drafts of a row and round for which each name wants room. "auto" may turn out to be any of the others.
_LIMITS = {AUTO: 32, BASS: Algorithm1.limit, COST_AWARE: LIMIT}


def check_draft_length(option: DraftLength) -> DraftLength:
    """The option as it is. Raises RequestError, one sentence, for what is none."""
    named = isinstance(option, str) and option in _LIMITS
    if named or is_length(option) or _is_policy(option) or _is_budget(option):
        return option
    raise RequestError(
        f"draft_length must be one of {', '.join(_LIMITS)}, a whole number from 0 to {LONGEST}, or an object with "
        f"`length`, `limit` and `update`, or with `limit`, `max_drafts` and `observe`; got {option!r}."
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


def make_budget(option: DraftLength, costs: RoundCosts | None = None, timed: bool = True) -> Budget:
    """A fresh budget for a checked option; a user's object is copied.

    costs: what rounds cost. With them "auto" goes by them; without them it is Algorithm 1, and "cost-aware" raises
    ValueError. timed: whether the rounds' own times correct the costs.
    """
    check_draft_length(option)
    if wants_costs(option) and costs is not None:
        return CostAware(costs, timed)
    if option == COST_AWARE:
        raise ValueError(f'draft_length="{option}" needs costs: see with_costs in decode/measuring.py.')
    if isinstance(option, str):
        return EqualRows(Algorithm1())
    if isinstance(option, int):
        return EqualRows(FixedLength(option))
    own = copy.deepcopy(option)
    if _is_budget(own):
        return own
    assert _is_policy(own), "checked above"
    return EqualRows(own)


def _is_budget(option: object) -> TypeGuard[Budget]:
    """Whether it gives each row a number of its own (Budget)."""
    asked = all(hasattr(option, name) for name in ("max_drafts", "observe"))
    return asked and is_length(getattr(option, "limit", None))


def _is_policy(option: object) -> TypeGuard[DraftLengthPolicy]:
    """Whether it has what a decoder asks of a policy (DraftLengthPolicy)."""
    return hasattr(option, "length") and hasattr(option, "update") and is_length(getattr(option, "limit", None))
