"""The cases of the conformance suite: combinations of methods, drafts, architectures and other choices.

`covering(1)` returns cases in which each choice occurs, `covering(2)` cases in which every two compatible choices
occur together; both are deterministic. A registered method is included automatically; add one line here for a new
drafter, backend or architecture.
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
from tests.support.models import BUILDERS, STATEFUL, prompts, reference, tiny, tiny_pair

TOKENS = 16
SEED = 3
# Each prompt consists of two equal halves, so that the copying drafters have something to copy.
_PROMPTS = [prompt * 2 for prompt in prompts(6, longest=10)]
_LONG, _OTHER = (list(chain(*prompts(9, longest=10, seed=seed)))[:37] for seed in (7, 8))
# All "shared" prompts are equal, and some "mixed" ones share a prefix. conftest.py lets short prefixes be shared.
PROMPTS = {
    "different": _PROMPTS,
    "shared": [_LONG] * 6,
    "mixed": [_LONG, _PROMPTS[0], _LONG[:32], _OTHER, _LONG[:33] + _PROMPTS[1], _OTHER[:16] + _PROMPTS[2]],
}


@dataclass(frozen=True)
class Draft:
    """A way to draft, and the architectures for which such a draft exists (`only`)."""

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
    "eagle": Draft("model", "eagle", only=("llama",)),
    "window": Draft("window", "none"),
    "window_model": Draft("window_model"),
    "window_head": Draft("window_model", "head", only=("llama",)),
}
# In ms. Some extra tokens per step are cheap, so drafting pays in some rounds but not in all.
COSTS = CostTable(
    {1: [(1, 10), (12, 10.5), (32, 40)], 6: [(6, 11), (30, 12), (60, 44)]}, {1: 0.3, 6: 0.3}, padded=False
)
# Short names for trees and a policy, which generate() takes as values.
TREES: dict[Any, tuple[int, ...]] = {"tree 3 2 1": (3, 2, 1), "tree 1 2": (1, 2)}
BUDGETS: dict[Any, Any] = {"by cost": CostAware(COSTS, timed=False)}
TREE_DRAFTS = ("random", "perturbed", "self", "adaptive", "head", "adaptive_head", "eagle")
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
        # Models with states attend to no trees, and as drafts they can't go back over several rounds.
        stateful = self.architecture in STATEFUL and (
            self.length in TREES or self.draft == "window_model" or METHODS[self.method].overlaps
        )
        return (
            not stateful
            and self.architecture in DRAFTS[self.draft].only
            and serves(METHODS[self.method], self.draft, self.length, self.text)
        )

    def run(self) -> Generation:
        return generate(**self.arguments())

    def arguments(self) -> dict[str, Any]:
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
        return expected(self.architecture, self.text, self.prompts)[: self.batch]


def drafting_of(length: Any) -> dict[str, Any]:
    return {"tree": TREES[length]} if length in TREES else {"draft_length": BUDGETS.get(length, length)}


def sampling_of(text: str) -> dict[str, Any]:
    return {"sampling": SAMPLING[text], "verification": "auto" if text == "greedy" else "coupled"}


@cache
def expected(architecture: str, text: str, prompts: str = "different") -> list[list[int]]:
    """Return transformers' greedy text, or regular decoding's with the same noise, each prompt separately."""
    if text == "greedy":
        return [reference(target(architecture), prompt, TOKENS) for prompt in PROMPTS[prompts]]
    rows = []
    for index, prompt in enumerate(PROMPTS[prompts]):
        same: dict[str, Any] = {"sampling": SAMPLING[text], "seed": SEED, "max_new_tokens": TOKENS}
        out = generate(pair(architecture, "none"), prompt, method="regular", sequence_ids=[index], **same)
        rows.append(out.sequences[0].token_ids)
    return rows


@cache
def target(architecture: str) -> Any:
    return tiny(architecture)


@cache
def pair(architecture: str, kind: str) -> ModelPair:
    return tiny_pair(kind, architecture=architecture, target=target(architecture))


@cache
def serves(method: Method, draft: str, length: Any, text: str = "greedy") -> bool:
    """Return whether the method accepts such a request. Llama stands for all architectures here."""
    if length in TREES and draft in DRAFTS and draft not in TREE_DRAFTS:
        return False
    if method.check is None:
        return True
    llama = pair("llama", DRAFTS[draft].kind)
    try:
        request = make_request(
            llama,
            [1],
            drafter=DRAFTS[draft].drafter,
            **drafting_of(length),
            **sampling_of(text),
            seed=SEED,
        )
        method.check(llama, request)
    except RequestError:
        return False
    return True


def drafts_trees(case: Case) -> bool:
    """Return whether the case asks for trees. Its method may be unable to verify them."""
    return case.length in TREES and case.draft in TREE_DRAFTS


def covering(size: int, among: Callable[[Case], bool] = lambda case: True) -> list[Case]:
    """Return cases, chosen greedily, in which each possible choice (size 1) or pair of choices (size 2) occurs."""
    rng, chosen = random.Random(0), list[Case]()
    possible = [case for case in _every() if among(case) and case.possible]
    rng.shuffle(possible)
    uncovered = {combination for case in possible for combination in _combinations(case, size)}
    for case in possible:
        # Repeat until this case covers nothing new: choose the best of 41 candidates. Trying all cases would take
        # minutes.
        while not uncovered.isdisjoint(_combinations(case, size)):
            candidates = case, *rng.sample(possible, min(40, len(possible)))
            best = max(candidates, key=lambda other: len(uncovered.intersection(_combinations(other, size))))
            uncovered.difference_update(_combinations(best, size))
            chosen.append(best)
    return chosen


@cache
def cases(size: int, states: bool = True) -> list[Case]:
    """Return cases that cover the table, and more cases that cover the part of the table with trees.

    Without `states`, the models have keys and values only: the emulated device can't run other states.
    """

    def among(case: Case) -> bool:
        return states or case.architecture not in STATEFUL

    def in_trees(case: Case) -> bool:
        method = METHODS[case.method]
        return among(case) and drafts_trees(case) and method.drafts and not method.overlaps

    return [*covering(size, among), *covering(size, in_trees)]


def _every() -> Iterator[Case]:
    """Yield all combinations, but only nine of attention, batch and prompts, which cover each pair of choices."""
    free = [AXES[name] for name in ("attention", "batch", "prompts")]
    nine = [(free[0][i], free[1][j], free[2][(i + j) % 3]) for i, j in product(range(3), repeat=2)]
    rest = product(METHODS, AXES["draft"], AXES["architecture"], AXES["length"], AXES["text"])
    for (method, draft, architecture, length, text), (attention, batch, rows) in product(rest, nine):
        yield Case(method, draft, architecture, attention, length, batch, text, rows)


def _combinations(case: Case, size: int) -> Iterator[tuple[Any, ...]]:
    return combinations(case.choices, size)
