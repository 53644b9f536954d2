"""The table that the conformance suite runs over: the choices, and which of them are tried together.

Contract: the choices come from the library's METHODS, from `DRAFTS` and from the other axes. `covering(n)` returns
cases, always the same ones, in which each choice (n = 1) or every two choices that can meet (n = 2) do so at least
once. A registered method takes part without a line here; a new drafter, backend or architecture takes one line.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import chain, combinations, product
from typing import Any

from bass_core import METHODS, Method, ModelPair, RequestError, SamplingParams, generate
from bass_core.decode.request import make_request
from bass_core.lanes.generate import Generation
from bass_core.length.cost_aware import CostAware
from bass_core.length.costs import CostTable
from tests.support.models import BUILDERS, prompts, reference, tiny, tiny_pair

TOKENS = 16
SEED = 3
# Each prompt occurs twice in a row, so that the copying drafters have something to copy.
_PROMPTS = [prompt * 2 for prompt in prompts(6, longest=10)]
_LONG, _OTHER = (list(chain(*prompts(9, longest=10, seed=seed)))[:37] for seed in (7, 8))
# Rows whose prompts share a prefix (conftest.py lets even few tokens be shared), all of it, a part or none.
PROMPTS = {
    "different": _PROMPTS,
    "shared": [_LONG] * 6,
    "mixed": [_LONG, _PROMPTS[0], _LONG[:32], _OTHER, _LONG[:33] + _PROMPTS[1], _OTHER[:16] + _PROMPTS[2]],
}


@dataclass(frozen=True)
class Draft:
    """`drafter` as in generate(); `kind` selects the pair's draft; `only` lists the architectures it can serve."""

    drafter: str
    kind: str = "perturbed"
    only: tuple[str, ...] = field(default=tuple(BUILDERS))


DRAFTS = {
    "random": Draft("model", "random"),
    "perturbed": Draft("model"),
    "self": Draft("model", "self"),
    "prompt_lookup": Draft("prompt_lookup", "none"),
    "adaptive": Draft("adaptive"),
    "head": Draft("model", "head", only=("llama",)),
    "adaptive_head": Draft("adaptive", "head", only=("llama",)),
    "window": Draft("window", "none"),
    "window_model": Draft("window_model"),
    "window_head": Draft("window_model", "head", only=("llama",)),
}
# Milliseconds; a step has room for some tokens that cost little, so that it pays to draft, and not always.
COSTS = CostTable(
    {1: [(1, 10), (12, 10.5), (32, 40)], 6: [(6, 11), (30, 12), (60, 44)]}, {1: 0.3, 6: 0.3}, padded=False
)
# The ways to draft that have no short name of their own in generate().
TREES: dict[Any, tuple[int, ...]] = {"tree 3 2 1": (3, 2, 1), "tree 1 2": (1, 2)}
BUDGETS: dict[Any, Any] = {"by cost": CostAware(COSTS, timed=False)}
GROWING = ("random", "perturbed", "self", "adaptive", "head", "adaptive_head")
# The axes besides "method", whose choices are METHODS.
AXES: dict[str, tuple[Any, ...]] = {
    "draft": tuple(DRAFTS),
    "architecture": tuple(BUILDERS),
    "attention": ("pad", "split", "sdpa"),
    "length": (0, 1, 4, "bass", *TREES, *BUDGETS),
    "batch": (1, 2, 6),
    "text": ("greedy", "coupled", "coupled, filtered"),
    "prompts": tuple(PROMPTS),
}
SAMPLING = {
    "greedy": SamplingParams(),
    "coupled": SamplingParams(0.9),
    "coupled, filtered": SamplingParams(0.8, top_k=20, top_p=0.9),
}


@dataclass(frozen=True)
class Case:
    """One choice on every axis."""

    method: str
    draft: str
    architecture: str
    attention: str
    length: Any
    batch: int
    text: str
    prompts: str

    def __str__(self) -> str:
        return "-".join(str(choice) for _, choice in self.choices).replace(", ", "_").replace(" ", "_")

    @property
    def choices(self) -> list[tuple[str, Any]]:
        return [(field.name, getattr(self, field.name)) for field in fields(self)]

    @property
    def possible(self) -> bool:
        return self.architecture in DRAFTS[self.draft].only and serves(
            METHODS[self.method], self.draft, self.length, self.text
        )

    def run(self) -> Generation:
        """The text that the method writes."""
        return generate(**self.arguments())

    def arguments(self) -> dict[str, Any]:
        """Of generate() and stream()."""
        return {
            "pair": pair(self.architecture, DRAFTS[self.draft].kind),
            "prompt": PROMPTS[self.prompts][: self.batch],
            "method": self.method,
            "drafter": DRAFTS[self.draft].drafter,
            "attention": self.attention,
            **drafting_of(self.length),
            "max_new_tokens": TOKENS,
            "seed": SEED,
            **sampling_of(self.text),
        }

    def expected(self) -> list[list[int]]:
        """The text that the method must write."""
        return expected(self.architecture, self.text, self.prompts)[: self.batch]


def drafting_of(length: Any) -> dict[str, Any]:
    """The arguments of generate() that ask for this draft length or tree."""
    return {"tree": TREES[length]} if length in TREES else {"draft_length": BUDGETS.get(length, length)}


def sampling_of(text: str) -> dict[str, Any]:
    """The arguments of generate() that ask for this kind of text."""
    return {"sampling": SAMPLING[text], "verification": "auto" if text == "greedy" else "coupled"}


@cache
def expected(architecture: str, text: str, prompts: str = "different") -> list[list[int]]:
    """transformers' own greedy text, or regular decoding's with the same noise; each prompt on its own."""
    if text == "greedy":
        return [reference(target(architecture), prompt, TOKENS) for prompt in PROMPTS[prompts]]
    rows = []
    for index, prompt in enumerate(PROMPTS[prompts]):
        same: dict[str, Any] = {"sampling": SAMPLING[text], "seed": SEED, "max_new_tokens": TOKENS}
        alone = generate(pair(architecture, "none"), prompt, method="regular", sequence_ids=[index], **same)
        rows.append(alone.sequences[0].token_ids)
    return rows


@cache
def target(architecture: str) -> Any:
    return tiny(architecture)


@cache
def pair(architecture: str, kind: str) -> ModelPair:
    """The architecture's target with a draft of that kind."""
    return tiny_pair(kind, architecture=architecture, target=target(architecture))


@cache
def serves(method: Method, draft: str, length: Any, text: str = "greedy") -> bool:
    """Whether the method accepts such a request; tried on one architecture, which stands for all."""
    if length in TREES and draft in DRAFTS and draft not in GROWING:
        return False
    if method.check is None:
        return True
    one = pair("llama", DRAFTS[draft].kind)
    try:
        asked = make_request(
            one,
            [1],
            drafter=DRAFTS[draft].drafter,
            **drafting_of(length),
            **sampling_of(text),
            seed=SEED,
        )
        method.check(one, asked)
    except RequestError:
        return False
    return True


def grows(case: Case) -> bool:
    """Whether it drafts trees, where its method can verify them."""
    return case.length in TREES and case.draft in GROWING


def covering(together: int, among: Callable[[Case], bool] = lambda case: True) -> list[Case]:
    """Cases in which every `together` choices, 1 or 2, that can meet do; a greedy cover with a fixed seed."""
    rng, chosen = random.Random(0), list[Case]()
    possible = [case for case in _every() if among(case) and case.possible]
    rng.shuffle(possible)
    open_ = {meeting for case in possible for meeting in _meetings(case, together)}
    for case in possible:
        # The best of 41 candidates, until this one has nothing new; trying all would take minutes.
        while not open_.isdisjoint(_meetings(case, together)):
            some = case, *rng.sample(possible, min(40, len(possible)))
            best = max(some, key=lambda one: len(open_.intersection(_meetings(one, together))))
            open_.difference_update(_meetings(best, together))
            chosen.append(best)
    return chosen


@cache
def cases(together: int) -> list[Case]:
    """Those that cover the table, and those that cover it where drafts grow trees."""

    def in_trees(case: Case) -> bool:
        return grows(case) and METHODS[case.method].drafts and not METHODS[case.method].overlaps

    return [*covering(together), *covering(together, in_trees)]


def _every() -> Iterator[Case]:
    """All that may be possible, with nine combinations of the axes that no method or draft looks at.

    In the nine every two choices of these axes meet.
    """
    free = [AXES[name] for name in ("attention", "batch", "prompts")]
    nine = [(free[0][i], free[1][j], free[2][(i + j) % 3]) for i, j in product(range(3), repeat=2)]
    rest = product(METHODS, AXES["draft"], AXES["architecture"], AXES["length"], AXES["text"])
    for (method, draft, architecture, length, text), (attention, batch, rows) in product(rest, nine):
        yield Case(method, draft, architecture, attention, length, batch, text, rows)


def _meetings(case: Case, together: int) -> Iterator[tuple[Any, ...]]:
    return combinations(case.choices, together)
