"""The rules that verify drafts, by name: the values of `verification=`.

`VERIFICATIONS` lists the choices for users. `find_verification` also knows "chen", an old name of "rejection", and
"common_stop", which is kept for comparison. A request looks its Verification up once (decode/request.py) and
passes the object on; no other code compares names.

Every rule keeps the target's distribution. Under greedy decoding they are all the same.
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

    Attributes:
        REJECTION: one by one, each by p / q, up to the first rejection (rejection.py).
        BLOCK: all drafts of a row together (block.py).
        COUPLED: a draft is accepted if it is the target's own Gumbel-max choice. This needs no q, and the sampled
            text is that of regular decoding, whatever the draft.
    """

    REJECTION = "rejection"
    BLOCK = "block"
    COUPLED = "coupled"


@dataclass(frozen=True)
class Verification:
    """One way to verify drafts.

    Attributes:
        label: its name in a list of choices.
        chains: the rule for sampled chains of drafts.
        adjust: changes a round's outcomes once they are on the host; None leaves them as they are.
    """

    label: str
    chains: Rule = Rule.REJECTION
    adjust: Callable[[list[RowOutcome]], list[RowOutcome]] | None = None

    @property
    def coupled(self) -> bool:
        """Whether sampled text is that of regular decoding."""
        return self.chains is Rule.COUPLED

    @property
    def together(self) -> bool:
        """Whether a row's drafts are judged together: a draft after a failed test can be accepted."""
        return self.chains is Rule.BLOCK

    @property
    def draft_role(self) -> Role:
        """The noise that a draft model draws with: its own, or the target's under coupling."""
        return Role.TARGET if self.coupled else Role.DRAFT


def stop_together(outcomes: list[RowOutcome]) -> list[RowOutcome]:
    """Cut every outcome of a round to the fewest accepted drafts; kept for comparison.

    If each row accepts a draft with probability a, all rows of a batch accept it with probability a^batch. The
    text keeps its distribution: a row that had accepted more drafts writes the next accepted one in place of a
    token of the target.
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
    """Return the verification with this name.

    Raises:
        RequestError: if there is none.
    """
    verification = None
    if isinstance(name, str):
        verification = (VERIFICATIONS | _FOR_COMPARISON).get(_OLD_NAMES.get(name, name))
    if verification is None:
        raise RequestError(f"verification must be one of {', '.join(VERIFICATIONS)}; got {name!r}.")
    return verification
