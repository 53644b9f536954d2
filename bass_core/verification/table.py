"""The ways to verify drafts, by name: what `verification=` may say.

Contract: `VERIFICATIONS` lists what users choose from; `find_verification` also knows "common_stop", which is kept
for comparisons. Nothing outside this table compares their names. Each leaves the text distributed as the target's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import RequestError
from ..sampling.noise import Role
from .acceptance import RowOutcome
from .common_stop import stop_together


@dataclass(frozen=True)
class Verification:
    """label: what a list of choices calls it.

    coupled: a draft stands where it is the target's own Gumbel-max choice, which needs no q and makes sampled text
    regular decoding's, whatever the draft; else the rejection rule decides (rejection.py). adjust: what becomes of
    a round's outcomes once they are on the host; None: they stay.
    """

    label: str
    coupled: bool = False
    adjust: Callable[[list[RowOutcome]], list[RowOutcome]] | None = None

    @property
    def draft_role(self) -> Role:
        """What a draft model draws with: noise of its own, or under coupling the target's."""
        return Role.TARGET if self.coupled else Role.DRAFT


VERIFICATIONS: dict[str, Verification] = {
    "chen": Verification("rejection sampling: the same distribution"),
    "coupled": Verification("coupled: the same words in every lane", coupled=True),
}
_FOR_COMPARISON = {"common_stop": Verification("the batch stops at its first rejection", adjust=stop_together)}


def find_verification(name: object) -> Verification:
    """The verification of that name. Raises RequestError for one that is not there."""
    found = (VERIFICATIONS | _FOR_COMPARISON).get(name) if isinstance(name, str) else None
    if found is None:
        raise RequestError(f"verification must be one of {', '.join(VERIFICATIONS)}; got {name!r}.")
    return found
