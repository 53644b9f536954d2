"""The table of decoding methods: the names that `method=` and `lanes=` accept, and what each can't answer.

Contract: one entry per method; code that lists or builds methods reads this table. `check_method` runs nothing and
refuses with a RequestError of one sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..decode.base import Decoder
from ..decode.outside.call import refuse_transformers
from ..decode.outside.decoder import build_transformers
from ..decode.overlapped.decoder import refuse_amusd
from ..decode.request import Request
from ..errors import RequestError
from ..length.options import fixed_length
from ..length.policies import RecordedLengths
from ..machine.openmp import idle_threads
from ..model.pair import ModelPair
from ..sequence import Sequence
from .build import build_bass, build_overlapped, build_regular, build_speculative


@dataclass(frozen=True)
class Method:
    """One entry of the table.

    name: the value for `method=` and `lanes=`. label, about: its name on the page, and one sentence that explains
    it. build: makes a fresh decoder for a checked request and the lane's own sequences. drafts: False for decoding
    without a drafter. batched: True if all rows are in memory together, False if one after another. overlaps:
    draft and target work at the same time, so the split into rounds depends on timing. reference: the other lanes
    are compared with this one, in speed and in text. outside: other code than ours decodes, with memory of its own
    and noise of its own, so that only its greedy text can be compared; what its steps compute is not known to us.
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


# How what runs in torch's threads alone ran, which in a program of its own can be faster.
_HERE = f"; {clause}, which can slow it down on several threads" if (clause := idle_threads()) else ""

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
    """Add a method to the table. Raises ValueError if the name is taken."""
    if method.name in METHODS:
        raise ValueError(f'A method "{method.name}" is registered already: choose another name.')
    METHODS[method.name] = method


def unregister(name: str) -> None:
    """Remove a method from the table."""
    del METHODS[name]


def find_method(name: object) -> Method:
    """The method of that name. Raises RequestError for a name that is not in the table."""
    if not isinstance(name, str) or name not in METHODS:
        raise RequestError(f"method must be one of {', '.join(METHODS)}; got {name!r}.")
    return METHODS[name]


def find_methods(names: object) -> list[Method]:
    """The methods of a list of different names. Raises RequestError for anything else."""
    known = f"lanes must name different methods out of {', '.join(METHODS)}; got {names!r}."
    if not isinstance(names, list | tuple) or not names:
        raise RequestError(known)
    methods = [find_method(name) for name in names]
    if len({method.name for method in methods}) != len(methods):
        raise RequestError(known)
    return methods


def policy_rows(request: Request, method: Method) -> int:
    """Rows of the batch that the method's length policy covers; 0 if the method has none."""
    if not method.drafts or method.overlaps:
        return 0
    return len(request.prompts) if method.batched else 1


def check_method(method: Method, pair: ModelPair, request: Request) -> None:
    """Raises RequestError if the method, an entry of METHODS, can't answer the request."""
    if method.check is not None:
        method.check(pair, request)
    if method.drafts:
        _check_noise(request)
    if request.clock is None:
        return
    if method.outside:
        raise RequestError(
            f"{method.name} can't run on a simulated clock, which predicts our own forwards alone: leave out the "
            "method, or the clock."
        )
    if method.overlaps:
        raise RequestError(
            f"{method.name} can't run on a simulated clock, because what its rounds are depends on how long draft "
            "and target really take: leave out the method, or the clock."
        )


def _check_noise(request: Request) -> None:
    """For methods that draft: refuse equal ids where a row's draft lengths go by what other rows accepted.

    That was decided by the noise which then judges the row that lags. A greedy text uses none, and a coupled
    one does not depend on lengths.
    """
    ids, own = request.sequence_ids, request.draft_length
    known = request.tree is not None or fixed_length(own) is not None or isinstance(own, RecordedLengths)
    if len(set(ids)) < len(ids) and not (known or request.sampling.greedy or request.rule.coupled):
        raise RequestError(
            f"sequence_ids must differ where the draft length depends on what other rows accept; got {ids!r}: "
            'give each row an id of its own, or choose a fixed draft_length, or verification="coupled".'
        )
