"""The table of decoding methods: the names for `method=` and `lanes=`, and the requests that each can't answer.

Code that lists or builds methods reads this table. To add a method, call `register`.
`check_method` refuses a request without running anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..decode.amusd.decoder import refuse_amusd
from ..decode.base import Decoder
from ..decode.request import Request
from ..decode.transformers_generate.call import refuse_transformers
from ..decode.transformers_generate.decoder import build_transformers
from ..errors import RequestError
from ..length.options import fixed_length
from ..length.policies import RecordedLengths
from ..machine.openmp import idle_threads
from ..model.pair import ModelPair
from ..sequence import Sequence
from .build import build_amusd, build_bass, build_regular, build_speculative


@dataclass(frozen=True)
class Method:
    """One entry of the table.

    Attributes:
        name: the value for `method=` and `lanes=`.
        build: builds a decoder for a checked request and the lane's own sequences.
        drafts: False if it decodes without a drafter.
        batched: True if all rows are in memory together, False if they come one after another.
        overlaps: draft and target work at the same time, so the split into rounds depends on timing.
        reference: the other lanes are compared with this one, in speed and in text.
        outside: another library decodes, with its own memory and noise. Only its greedy text can be compared, and
            the work of its steps is unknown.
        check: raises RequestError for a request that the method can't answer.
    """

    name: str
    label: str
    about: str
    build: Callable[[ModelPair, Request, list[Sequence]], Decoder]
    drafts: bool = True
    batched: bool = True
    overlaps: bool = False
    reference: bool = False
    outside: bool = False
    check: Callable[[ModelPair, Request], None] | None = None


# A clause for `about` of lanes that run only in torch, for example transformers' generate: torch's idle threads
# sleep sooner in our process than in other programs, which can slow such a lane down. Empty if they don't sleep
# sooner.
_HERE = f"; {clause}, which can slow it down on several threads" if (clause := idle_threads()) else ""

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "regular", "Regular", "One token per sequence and step.", build_regular, drafts=False, reference=True
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
            build_amusd,
            overlaps=True,
            check=refuse_amusd,
        ),
        Method(
            "transformers",
            "transformers",
            f"transformers' own generate, on the same weights{_HERE}.",
            build_transformers,
            drafts=False,
            outside=True,
            check=refuse_transformers,
        ),
    )
}
# Default lanes of `race`, and default method of `generate` and `stream`.
DEFAULT_LANES = ("regular", "speculative", "bass")
DEFAULT_METHOD = "bass"


def register(method: Method) -> None:
    """Add a method to the table.

    Raises:
        ValueError: if the name is taken.
    """
    if method.name in METHODS:
        raise ValueError(f'A method "{method.name}" is registered already: choose another name.')
    METHODS[method.name] = method


def unregister(name: str) -> None:
    """Remove a method from the table."""
    del METHODS[name]


def find_method(name: object) -> Method:
    """Return the method of that name.

    Raises:
        RequestError: if the name is not in the table.
    """
    if not isinstance(name, str) or name not in METHODS:
        raise RequestError(f"method must be one of {', '.join(METHODS)}; got {name!r}.")
    return METHODS[name]


def find_methods(names: object) -> list[Method]:
    """Return the methods of a list of different names.

    Raises:
        RequestError: for any other value.
    """
    message = f"lanes must be a list of different methods out of {', '.join(METHODS)}; got {names!r}."
    if not isinstance(names, list | tuple) or not names:
        raise RequestError(message)
    methods = [find_method(name) for name in names]
    if len({method.name for method in methods}) != len(methods):
        raise RequestError(message)
    return methods


def policy_rows(request: Request, method: Method) -> int:
    """Return the number of rows that the method's length policy covers, or 0 if it has no policy."""
    if not method.drafts or method.overlaps:
        return 0
    return len(request.prompts) if method.batched else 1


def check_method(method: Method, pair: ModelPair, request: Request) -> None:
    """Check that the method can answer the request.

    Raises:
        RequestError: if it can't.
    """
    if method.check is not None:
        method.check(pair, request)
    if method.drafts:
        _check_noise(request)
    if request.clock is None:
        return
    if method.outside:
        raise RequestError(
            f"{method.name} can't run on a simulated clock, which only predicts our own forwards: leave out the "
            "method or the clock."
        )
    if method.overlaps:
        raise RequestError(
            f"{method.name} can't run on a simulated clock, because its rounds depend on the real timing of draft "
            "and target: leave out the method or the clock."
        )


def _check_noise(request: Request) -> None:
    """Refuse equal ids if a method drafts and a row's draft lengths depend on what other rows accepted.

    Rows with equal ids share random numbers: the row that is ahead would determine the other row's draft length,
    using the same random numbers that later judge that row's drafts. Greedy text uses no random numbers, and
    coupled text doesn't depend on lengths.
    """
    ids, draft_length = request.sequence_ids, request.draft_length
    independent = (
        request.tree is not None
        or fixed_length(draft_length) is not None
        or isinstance(draft_length, RecordedLengths)
    )
    if len(set(ids)) < len(ids) and not (independent or request.sampling.greedy or request.rule.coupled):
        raise RequestError(
            f"sequence_ids must differ if the draft length depends on what other rows accept; got {ids!r}: give "
            'each row its own id, or choose a fixed draft_length or verification="coupled".'
        )
