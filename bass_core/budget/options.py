"""The option `draft_length`: what it may say, and the policy that it stands for.

Contract: "auto" ("cost-aware" where costs are known, else Algorithm 1), "bass" (Algorithm 1, arXiv 2404.15778),
"cost-aware" (one length, by measured cost), a whole number of draft tokens from 0 to LONGEST, or an object of the
user's own: a policy (policies.py) or a budget (base.py). Nothing here measures anything or runs a model.
"""

from __future__ import annotations

import copy
from typing import Any

from ..errors import RequestError
from .base import Budget
from .cost_aware import CostAware
from .cost_table import RoundCosts
from .policies import LONGEST, Algorithm1, DraftLengthPolicy, EqualRows, FixedLength, is_length

AUTO, BASS, COST_AWARE = "auto", "bass", "cost-aware"
# The most drafts of a row and round for which each name wants room. "auto" may turn out to be any of the others.
_LIMITS = {AUTO: 32, BASS: Algorithm1.limit, COST_AWARE: CostAware.LIMIT}


def check_draft_length(option: object) -> Any:
    """The option as it is. Raises RequestError, one sentence, for what is none."""
    if (
        (isinstance(option, str) and option in _LIMITS)
        or is_length(option)
        or _is_policy(option)
        or _is_budget(option)
    ):
        return option
    raise RequestError(
        f"draft_length must be one of {', '.join(_LIMITS)}, a whole number from 0 to {LONGEST}, or an object with "
        f"`length`, `limit` and `update`, or with `limit`, `max_drafts` and `observe`; got {option!r}."
    )


def longest_draft(option: Any) -> int:
    """The most draft tokens a row and round that a checked option may ask for."""
    if isinstance(option, str):
        return _LIMITS[option]
    return int(option if is_length(option) else option.limit)


def fixed_length(option: Any) -> int | None:
    """The draft length of every round where a checked option fixes it, else None."""
    if isinstance(option, FixedLength):
        return option.length
    return option if is_length(option) else None


def wants_costs(option: Any) -> bool:
    """Whether a checked option goes by what rounds cost."""
    return isinstance(option, str) and option in (AUTO, COST_AWARE)


def make_budget(option: Any, costs: RoundCosts | None = None, rows: int = 1) -> Budget:
    """A fresh budget for a checked option; a user's object is copied. Arguments as for make_policy."""
    if _is_budget(option):
        budget: Budget = copy.deepcopy(option)
        return budget
    return EqualRows(make_policy(option, costs, rows))


def make_policy(option: Any, costs: RoundCosts | None = None, rows: int = 1) -> DraftLengthPolicy:
    """A fresh policy for a checked option; a user's object is copied.

    costs: what rounds cost, of a batch that starts with `rows` rows. With them "auto" goes by them; without them
    it is Algorithm 1, and "cost-aware" raises ValueError. Raises RequestError for a budget, which is no policy.
    """
    check_draft_length(option)
    if _is_budget(option):
        raise RequestError(f"This draft_length must be the same for all rows of a round; got {option!r}.")
    if wants_costs(option) and costs is not None:
        return CostAware(costs, rows)
    if option == COST_AWARE:
        raise ValueError(f'draft_length="{option}" needs costs: see with_costs in decoding/budgets.py.')
    if isinstance(option, str):
        return Algorithm1()
    if is_length(option):
        return FixedLength(option)
    policy: DraftLengthPolicy = copy.deepcopy(option)
    return policy


def _is_budget(option: Any) -> bool:
    """Whether it gives each row a number of its own (Budget)."""
    asked = all(hasattr(option, name) for name in ("max_drafts", "observe"))
    return asked and is_length(getattr(option, "limit", None))


def _is_policy(option: Any) -> bool:
    """Whether it has what a decoder asks of a policy (DraftLengthPolicy)."""
    return hasattr(option, "length") and hasattr(option, "update") and is_length(getattr(option, "limit", None))
