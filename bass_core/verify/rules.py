"""The ways to verify drafts, by name: what `verification=` may say.

Contract: `VERIFICATIONS` lists what users choose from; `find_verification` also knows "chen", an old name of
"rejection", and "common_stop", which is kept for comparisons. A request finds its Verification once
(decode/request.py); what runs takes the object, and nothing outside this table compares names.
Each leaves the text distributed as the target's. Under greedy decoding all of them are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ..errors import RequestError
from ..sample.noise import Role
from .acceptance import RowOutcome


class Rule(Enum):
    """How sampled drafts are verified.

    REJECTION: one by one, each by p / q, up to the first that is rejected (rejection.py). BLOCK: all of a row
    together (block.py). COUPLED: a draft is accepted where it is the target's own Gumbel-max choice, which needs
    no q and makes sampled text regular decoding's, whatever the draft.
    """

    REJECTION = "rejection"
    BLOCK = "block"
    COUPLED = "coupled"


@dataclass(frozen=True)
class Verification:
    """label: what a list of choices calls it. chains: the rule for a sampled chain of drafts.

    adjust: what becomes of a round's outcomes once they are on the host; None: they stay.
    """

    label: str
    chains: Rule = Rule.REJECTION
    adjust: Callable[[list[RowOutcome]], list[RowOutcome]] | None = None

    @property
    def coupled(self) -> bool:
        """Whether sampled text is regular decoding's own."""
        return self.chains is Rule.COUPLED

    @property
    def together(self) -> bool:
        """Whether a row's drafts are judged together: one can be accepted though a test before it failed."""
        return self.chains is Rule.BLOCK

    @property
    def draft_role(self) -> Role:
        """What a draft model draws with: noise of its own, or under coupling the target's."""
        return Role.TARGET if self.coupled else Role.DRAFT


def stop_together(outcomes: list[RowOutcome]) -> list[RowOutcome]:
    """The outcomes of a round, each shortened to the shortest: what BASS does without, kept to be compared with.

    Acceptance a turns into a^batch. The text is distributed as ever: a row that had accepted more keeps the next
    of these drafts in the place of the target's own token.
    """
    least = min(outcome.accepted for outcome in outcomes)
    return [outcome if outcome.accepted == least else _cut(outcome, least) for outcome in outcomes]


def _cut(outcome: RowOutcome, accepted: int) -> RowOutcome:
    test = outcome.tests[accepted]
    return outcome._replace(accepted=accepted, next_token=test.token, next_p=test.p, next_drafted=True)


AUTO = "auto"
VERIFICATIONS: dict[str, Verification] = {
    AUTO: Verification("automatic: the rule that accepts most", Rule.BLOCK),
    "block": Verification("block: the drafts of a row together, the same distribution in every lane", Rule.BLOCK),
    "rejection": Verification("rejection sampling: draft by draft, the same distribution in every lane"),
    "coupled": Verification("coupled: the same text in every lane", Rule.COUPLED),
}
AUTOMATIC = VERIFICATIONS[AUTO]
_FOR_COMPARISON = {"common_stop": Verification("the batch stops at its first rejection", adjust=stop_together)}
_OLD_NAMES = {"chen": "rejection"}


def find_verification(name: object) -> Verification:
    """The verification of that name. Raises RequestError for one that is not there."""
    found = None
    if isinstance(name, str):
        found = (VERIFICATIONS | _FOR_COMPARISON).get(_OLD_NAMES.get(name, name))
    if found is None:
        raise RequestError(f"verification must be one of {', '.join(VERIFICATIONS)}; got {name!r}.")
    return found
