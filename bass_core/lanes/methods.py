"""The table of methods: one entry for each decoder that a lane can run.

Contract: no other module compares method names; code that needs a fact about a method reads a field of its entry.
`register` adds a user's decoder, which is then a method like any other: in `generate`, `stream` and `race`, in the
page's settings and charts, and in the conformance suite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..amusd.checks import refuse_amusd
from ..decoding.base import Decoder
from ..decoding.request import Request
from ..errors import RequestError
from ..models.pair import ModelPair
from ..sequence import Sequence
from .setup.build import build_bass, build_overlapped, build_regular, build_speculative


@dataclass(frozen=True)
class Method:
    """One entry of the table.

    name: the value for `method=` and `lanes=`. label, about: its name on the page, and one sentence that explains
    it. build: makes a fresh decoder for a checked request and the lane's own sequences. drafts: False for decoding
    without a drafter. batched: True if all rows are in memory together, False if one after another. overlaps:
    draft and target work at the same time, so the split into rounds depends on timing. reference: the other lanes
    are compared with this one, in speed and in text. check: raises RequestError for a request that the method
    can't answer.
    """

    name: str
    label: str
    about: str
    build: Callable[[ModelPair, Request, list[Sequence]], Decoder]
    drafts: bool = True
    batched: bool = True
    overlaps: bool = False
    reference: bool = False
    check: Callable[[ModelPair, Request], None] | None = None


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "regular", "Regular", "One token a sequence and step.", build_regular, drafts=False, reference=True
        ),
        Method(
            "speculative",
            "Speculative",
            "Drafts and verifies, one sequence at a time.",
            build_speculative,
            batched=False,
        ),
        Method("bass", "BASS", "Drafts and verifies all sequences at once.", build_bass),
        Method(
            "amusd",
            "AMUSD",
            "Drafts and verifies at the same time.",
            build_overlapped,
            overlaps=True,
            check=refuse_amusd,
        ),
    )
}
# Default lanes of `race`, and default method of `generate` and `stream`.
DEFAULT_LANES = ("regular", "speculative", "bass")
DEFAULT_METHOD = "bass"


def register(method: Method) -> None:
    """Add a method to the table. Raises ValueError if the name is taken."""
    if method.name in METHODS:
        raise ValueError(f'A method "{method.name}" is registered already: choose another name.')
    METHODS[method.name] = method


def unregister(name: str) -> None:
    """Remove a method from the table."""
    del METHODS[name]


def check_method(method: Method, pair: ModelPair, request: Request) -> None:
    """Raises RequestError if the method can't answer the request."""
    if method.check is not None:
        method.check(pair, request)
    if method.overlaps and request.clock is not None:
        raise RequestError(
            f"{method.name} can't run on a simulated clock, because what its rounds are depends on how long draft "
            "and target really take: leave out the method, or the clock."
        )


def find_method(name: object) -> Method:
    """The method of that name. Raises RequestError for a name that is not in the table."""
    if not isinstance(name, str) or name not in METHODS:
        raise RequestError(f"method must be one of {', '.join(METHODS)}; got {name!r}.")
    return METHODS[name]


def budget_rows(request: Request, method: Method) -> int:
    """Rows of the batch that the method's budget covers; 0 if the method has no budget for its drafts."""
    if not method.drafts or method.overlaps:
        return 0
    return len(request.prompts) if method.batched else 1
