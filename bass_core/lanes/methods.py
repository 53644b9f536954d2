"""The table of methods: one line for each decoder that a lane can be.

Contract: nothing else compares a method's name; whoever needs a fact about a method reads a field of its line. A
decoder of one's own joins with `register` and is then a method like any other: in `generate`, `stream` and
`race`, in the page's settings and charts, and in the conformance suite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..amusd.decoder import refuse_amusd
from ..decoding.base import Decoder
from ..decoding.request import Request
from ..errors import RequestError
from ..models.pair import ModelPair
from ..sequence import Sequence
from .setup.build import build_bass, build_overlapped, build_regular, build_speculative


@dataclass(frozen=True)
class Method:
    """One line of the table.

    name: what `method=` and `lanes=` say. label, about: how the page writes it, and one sentence that explains it.
    build: makes a fresh decoder for a checked request and the lane's own sequences. drafts: False for decoding
    without a drafter. batched: all rows are in memory together; False: one after another. overlaps: draft and
    target work at the same time, so that how the rounds fall depends on timing. reference: the lane that others
    are compared with, in speed and in text. check: raises RequestError for a request that it can't answer.
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
# The lanes of a race that names none, and the method of `generate` and `stream` where none is named.
DEFAULT_LANES = ("regular", "speculative", "bass")
DEFAULT_METHOD = "bass"


def register(method: Method) -> None:
    """Add a line to the table. Raises ValueError for a name that is taken."""
    if method.name in METHODS:
        raise ValueError(f'A method "{method.name}" is registered already: choose another name.')
    METHODS[method.name] = method


def unregister(name: str) -> None:
    """Take a registered method out of the table."""
    del METHODS[name]


def find_method(name: object) -> Method:
    """The method of that name. Raises RequestError for a name that is not in the table."""
    if not isinstance(name, str) or name not in METHODS:
        raise RequestError(f"method must be one of {', '.join(METHODS)}; got {name!r}.")
    return METHODS[name]
