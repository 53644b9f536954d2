"""The option `draft_length`: its values (`check_draft_length`), and their policies (`make_policy`).

The values are "auto" ("cost-aware" if costs are known, else Algorithm 1), "bass" (Algorithm 1, arXiv 2404.15778),
"cost-aware" (row lengths by measured cost), a whole number of draft tokens from 0 to LONGEST, or a user's own
policy (base.py). Nothing here measures anything or runs a model.
"""

from __future__ import annotations

import copy

from ..errors import RequestError
from .acceptance import PastDrafts
from .base import LengthPolicy
from .cost_aware import LIMIT, CostAware
from .costs import RoundCosts
from .policies import LONGEST, Algorithm1, FixedLength, is_length

DraftLength = str | int | LengthPolicy

AUTO, BASS, COST_AWARE = "auto", "bass", "cost-aware"
# Maximum number of drafts per row and round, by name. "auto" has the larger of the two other limits.
_LIMITS = {AUTO: 32, BASS: Algorithm1.limit, COST_AWARE: LIMIT}


def check_draft_length(option: DraftLength) -> DraftLength:
    """Return the option unchanged.

    Raises:
        RequestError: if it is not a valid draft length.
    """
    named = isinstance(option, str) and option in _LIMITS
    if named or is_length(option) or _is_policy(option):
        return option
    raise RequestError(
        f"draft_length must be one of {', '.join(_LIMITS)}, a whole number from 0 to {LONGEST}, or an object with "
        f"`limit`, `lengths` and `observe`; got {option!r}."
    )


def longest_draft(option: DraftLength) -> int:
    """Return the maximum number of draft tokens per row and round for a checked option."""
    if isinstance(option, str):
        return _LIMITS[option]
    return option if isinstance(option, int) else option.limit


def fixed_length(option: DraftLength) -> int | None:
    """Return the draft length of every round if a checked option fixes it, else None."""
    if isinstance(option, FixedLength):
        return option.length
    return option if is_length(option) else None


def wants_costs(option: DraftLength) -> bool:
    """Return whether a checked option uses the costs of rounds."""
    return isinstance(option, str) and option in (AUTO, COST_AWARE)


def make_policy(
    option: DraftLength,
    costs: RoundCosts | None = None,
    timed: bool = True,
    past_drafts: PastDrafts | None = None,
) -> LengthPolicy:
    """Return a fresh policy for a checked option; a user's object is copied.

    Args:
        option: the checked option.
        costs: costs of rounds, or None. Without costs, "auto" means Algorithm 1.
        timed: whether the rounds' own times correct the costs.
        past_drafts: counts of earlier calls (acceptance.py), which a cost-aware policy adds to.

    Raises:
        ValueError: if the option is "cost-aware" and there are no costs.
    """
    check_draft_length(option)
    if wants_costs(option) and costs is not None:
        return CostAware(costs, timed, past_drafts)
    if option == COST_AWARE:
        raise ValueError(f'draft_length="{option}" needs costs: see with_costs in decode/measuring.py.')
    if isinstance(option, str):
        return Algorithm1()
    if isinstance(option, int):
        return FixedLength(option)
    return copy.deepcopy(option)


def _is_policy(option: object) -> bool:
    """Return whether the option has the members of LengthPolicy."""
    asked = all(callable(getattr(option, name, None)) for name in ("lengths", "observe"))
    return asked and is_length(getattr(option, "limit", None))
