"""A checked request: the prompts, and how to answer them.

Contract: every user error is refused here, in one sentence, before a model runs or memory is allocated. A Request
is plain data that every lane of a race shares.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

from typing_extensions import Unpack

from ..draft.registry import DrafterKind, choose_drafter, default_drafter
from ..errors import RequestError
from ..length.costs import RoundCosts
from ..length.options import check_draft_length, longest_draft
from ..model.attention import choose_backend
from ..model.pair import ModelPair
from ..model.prefix import CachedTexts
from ..options import Keywords, Options, Prompt, gathered, lists_options
from ..predict.clock import check_clock
from ..sample.params import SamplingParams
from ..sequence import Sequence
from ..verify.rules import Verification, find_verification
from .checks import (
    MOST_DRAFTS,
    check_acceptance,
    check_branching,
    check_end_ids,
    check_sequence_ids,
    check_sight,
    check_stop,
    check_switch,
    check_time_budget,
    check_tree,
    check_whole,
    drafts_of,
    spelled,
)
from .prompts import Chat, encode_prompts
from .text import StopStrings

# Largest n: far more rows than any memory holds. It bounds the list of n prompts, which is built before admission.
MAX_ROWS = 2**20


@dataclass(frozen=True, kw_only=True)
class Request(Options):
    """Options that are checked, with every choice made that they leave open.

    prompts: token ids, one list per row. draft_length: the depth of `tree` where there is one. backend: the
    attention that was chosen. kind: what `drafter` stands for. rule: the one that `verification` names. eos: the
    ids that end a text. tokenizer: the pair's, which spells texts where `stop` names strings. context: the model's
    context length in tokens. costs: of rounds, measured or of the simulated clock, set after admission if the
    draft length depends on them (measuring.py). clock: its number of GPUs is known.
    """

    prompts: list[list[int]]
    sampling: SamplingParams
    tree: tuple[int, ...] | None
    sequence_ids: list[int]
    backend: str
    kind: DrafterKind
    rule: Verification
    eos: frozenset[int]
    stop: tuple[str, ...]
    context: int
    tokenizer: Any = field(default=None, repr=False)
    costs: RoundCosts | None = None

    @property
    def longest_draft(self) -> int:
        """The most tokens that a row may draft in one round."""
        if self.tree is not None:
            return drafts_of(self.tree)
        if self.kind.branches:
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
        made = [
            Sequence(index, self.sequence_ids[index], prompt, self.new_tokens(prompt), self.eos)
            for index, prompt in enumerate(self.prompts)
        ]
        if self.stop:
            for sequence in made:
                sequence.stopped = StopStrings(self.tokenizer, self.stop)
        return made


def check_options(given: Options) -> None:
    """Check what can be checked without a pair and a prompt.

    Raises RequestError with one sentence that says what to do.
    """
    check_whole("n", given.n, 1, MAX_ROWS)
    check_whole("max_new_tokens", given.max_new_tokens, 1, None)
    check_whole("seed", given.seed, 0, 2**63 - 1)
    if given.sampling is not None and not isinstance(given.sampling, SamplingParams):
        raise RequestError(f"sampling must be a SamplingParams; got {given.sampling!r}.")
    find_verification(given.verification)
    check_time_budget(given.time_budget_ms)
    check_acceptance(given.synthetic_acceptance)
    if given.tree is None:
        check_draft_length(given.draft_length)
    check_switch("logprobs", given.logprobs)
    check_switch("inspect", given.inspect)
    Chat(given.system, given.chat_template_kwargs, check_switch("raw", given.raw))


@lists_options
def make_request(
    pair: ModelPair, prompt: Prompt, *, options: Options | None = None, **keywords: Unpack[Keywords]
) -> Request:
    """Check all options, given as one object or as keywords, against the pair and the prompt.

    Raises RequestError with one sentence that says what to do.
    """
    given = gathered(make_request, options, keywords)
    check_options(given)
    if not hasattr(pair, "target_step"):
        call = f'load_pair("{pair}")' if isinstance(pair, str | os.PathLike) else "ModelPair(target=...)"
        raise RequestError(f"The first argument must be a pair; got {pair!r:.80}: make one with {call}.")
    pair.refresh()
    sampling = spelled(pair, SamplingParams() if given.sampling is None else given.sampling)
    rule = find_verification(given.verification)
    chat = Chat(given.system, given.chat_template_kwargs, given.raw)
    prompts = encode_prompts(pair, prompt, given.n, chat)
    drafter = default_drafter(pair) if given.drafter == "auto" else given.drafter
    kind = choose_drafter(pair, drafter)
    backend = choose_backend(given.attention, pair.device, pair.dtype)
    check_sight(drafter, kind, backend)
    tree = check_tree(given.tree, drafter, kind, given.draft_length)
    if tree is not None or kind.branches:
        check_branching(pair.target_step, backend, given.verification, rule, given.synthetic_acceptance)
    made = Request(
        n=given.n,
        max_new_tokens=given.max_new_tokens,
        sampling=sampling,
        draft_length=given.draft_length if tree is None else len(tree),
        tree=tree,
        drafter=drafter,
        attention=given.attention,
        verification=given.verification,
        seed=given.seed,
        sequence_ids=check_sequence_ids(given.sequence_ids, len(prompts), kind),
        eos_token_id=given.eos_token_id,
        system=given.system,
        chat_template_kwargs=given.chat_template_kwargs,
        raw=given.raw,
        time_budget_ms=given.time_budget_ms,
        synthetic_acceptance=given.synthetic_acceptance,
        logprobs=given.logprobs,
        inspect=given.inspect,
        prompts=prompts,
        backend=backend,
        kind=kind,
        rule=rule,
        eos=check_end_ids(pair, given.eos_token_id),
        stop=check_stop(pair, given.stop),
        tokenizer=pair.tokenizer,
        context=pair.context_length,
    )
    return (
        made if given.clock is None else replace(made, clock=check_clock(given.clock, len(prompts), made.longest))
    )
