"""A checked request: the prompts, and how to answer them.

Contract: every user error is refused here, in one sentence, before a model runs or memory is allocated. A Request
is plain data that every lane of a race shares.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

from ..attention.select import choose_backend
from ..budget.cost_table import RoundCosts
from ..budget.options import AUTO, check_draft_length, longest_draft
from ..drafting.registry import branches, choose_drafter
from ..engine.prefix import CachedTexts
from ..errors import RequestError
from ..models.pair import ModelPair
from ..prediction.clock import SimulatedClock, check_clock
from ..sampling.params import SamplingParams
from ..sequence import Sequence
from ..verification.table import find_verification
from .checks import (
    MOST_DRAFTS,
    check_acceptance,
    check_branching,
    check_end_ids,
    check_sequence_ids,
    check_sight,
    check_switch,
    check_time_budget,
    check_tree,
    check_whole,
    drafts_of,
    encode_prompts,
)

# Largest n: far more rows than any memory holds. It bounds the list of n prompts, which is built before admission.
MAX_ROWS = 2**20
# Default draft_length of generate, stream, race and the page (budget/options.py).
DEFAULT_DRAFT_LENGTH = AUTO


@dataclass(frozen=True)
class Request:
    """The checked arguments of `generate`. prompts: token ids, one list per row.

    draft_length: the option as given, see budget/options.py; the depth of `tree`, the shape of trees of drafts
    (children a level). context: the model's context length in tokens. costs:
    of rounds, measured or of the simulated clock, set after admission if the draft length depends on them
    (budgets.py). inspect: whether rounds carry their details (RowDetail). clock: None for measured time; else its
    number of GPUs is known.
    """

    prompts: list[list[int]]
    max_new_tokens: int
    sampling: SamplingParams
    draft_length: Any
    drafter: Any
    backend: str
    verification: str
    seed: int
    sequence_ids: list[int]
    eos: frozenset[int]
    time_budget_ms: float | None
    synthetic_acceptance: float | None
    context: int
    costs: RoundCosts | None = None
    inspect: bool = False
    clock: SimulatedClock | None = None
    tree: tuple[int, ...] | None = None

    @property
    def longest_draft(self) -> int:
        """The most tokens that a row may draft in one round."""
        if self.tree is not None:
            return drafts_of(self.tree)
        if branches(self.drafter, None):
            return MOST_DRAFTS
        return min(longest_draft(self.draft_length), self.max_new_tokens)

    @property
    def longest(self) -> int:
        """Tokens of the longest row, prompt plus answer."""
        return max(len(prompt) + self.new_tokens(prompt) for prompt in self.prompts)

    def new_tokens(self, prompt: list[int]) -> int:
        """The most new tokens of a row: a text ends at the end of the model's context."""
        return min(self.max_new_tokens, self.context - len(prompt))

    def texts(self, padding: int, rows: int | None = None) -> CachedTexts:
        """The first `rows` rows (None: all) as a cache must hold them, with room for `padding` more tokens."""
        prompts = self.prompts[:rows]
        return CachedTexts(prompts, [len(prompt) + self.new_tokens(prompt) + padding for prompt in prompts])

    def sequences(self) -> list[Sequence]:
        """Fresh sequences, one per row; every lane gets its own."""
        return [
            Sequence(index, self.sequence_ids[index], prompt, self.new_tokens(prompt), self.eos)
            for index, prompt in enumerate(self.prompts)
        ]


def make_request(
    pair: ModelPair,
    prompt: str | Seq[Any],
    *,
    n: int = 1,
    max_new_tokens: int = 64,
    sampling: SamplingParams | None = None,
    draft_length: Any = DEFAULT_DRAFT_LENGTH,
    tree: Any = None,
    drafter: Any = "auto",
    attention: str = "auto",
    verification: str = "auto",
    seed: int = 0,
    sequence_ids: Seq[int] | None = None,
    eos_token_id: Any = "auto",
    raw: bool = False,
    time_budget_ms: float | None = None,
    synthetic_acceptance: float | None = None,
    inspect: bool = False,
    clock: SimulatedClock | None = None,
) -> Request:
    """Check all arguments. Raises RequestError with one sentence that says what to do."""
    check_whole("n", n, 1, MAX_ROWS)
    check_whole("max_new_tokens", max_new_tokens, 1, None)
    check_whole("seed", seed, 0, 2**63 - 1)
    sampling = SamplingParams() if sampling is None else sampling
    if not isinstance(sampling, SamplingParams):
        raise RequestError(f"sampling must be a SamplingParams; got {sampling!r}.")
    find_verification(verification)
    check_time_budget(time_budget_ms)
    check_acceptance(synthetic_acceptance)
    prompts = encode_prompts(pair, prompt, n, raw)
    drafter, backend = choose_drafter(pair, drafter), choose_backend(attention, pair.device, pair.dtype)
    check_sight(drafter, backend)
    shape = check_tree(tree, drafter, draft_length)
    if branches(drafter, shape):
        check_branching(backend, verification, synthetic_acceptance)
    made = Request(
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        draft_length=check_draft_length(draft_length) if shape is None else len(shape),
        drafter=drafter,
        backend=backend,
        verification=verification,
        seed=seed,
        sequence_ids=check_sequence_ids(sequence_ids, len(prompts), drafter),
        eos=check_end_ids(pair, eos_token_id),
        time_budget_ms=time_budget_ms,
        synthetic_acceptance=synthetic_acceptance,
        context=pair.context_length,
        inspect=check_switch("inspect", inspect),
        tree=shape,
    )
    return made if clock is None else replace(made, clock=check_clock(clock, len(prompts), made.longest))
