"""A checked request: the prompts, and how to answer them. `make_request` makes one.

Every user error is reported here, before a model runs or memory is allocated. All lanes of a race share a Request.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

from ..draft.registry import DrafterKind, choose_drafter, default_drafter
from ..errors import RequestError
from ..length.acceptance import PastDrafts
from ..length.costs import RoundCosts
from ..length.options import check_draft_length, longest_draft
from ..model.attention import choose_backend
from ..model.pair import ModelPair
from ..model.prefix import CachedTexts
from ..options import Keywords, Options, Prompt, lists_options, options_of_call
from ..predict.clock import check_clock
from ..sample.grammar import Grammar, check_grammars, compile_grammars
from ..sample.params import SamplingParams
from ..sequence import Sequence
from ..verify.rules import Verification, find_verification
from .checks import (
    MAX_TREE_DRAFTS,
    check_acceptance,
    check_branching,
    check_end_ids,
    check_sequence_ids,
    check_stop,
    check_switch,
    check_time_budget,
    check_tree,
    check_whole,
    check_window_attention,
    drafts_of,
    refuse_states,
    with_bad_word_ids,
)
from .prompts import Chat, encode_prompts
from .text import StopStrings

# Largest n. Far fewer rows fit any memory, but the list of n prompts is built before admission checks the memory.
MAX_ROWS = 2**20


@dataclass(frozen=True, kw_only=True)
class Request(Options):
    """Checked options, in which every "auto" of a drafter, attention or verification is resolved.

    Attributes:
        prompts: token ids, one list per row.
        draft_length: the depth of `tree` if there is one.
        tokenizer: the pair's; needed if `stop` has strings.
        grammars: each row's grammar, or () if no row has one.
        costs: the costs of rounds, measured or those of the simulated clock; None unless the draft length depends
            on costs (measuring.py).
        costs_path: the file of measured costs (cost_store.py), else None.
        past_drafts: how many drafts earlier calls tested and accepted, which the lanes add to (measuring.py).
        clock: the simulated clock, with its number of GPUs chosen.
        copies: a list for the copies of the user's drafter and policy that decoders of this request work on; None
            unless the caller wants them.
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
    grammars: tuple[Grammar | None, ...] = field(default=(), repr=False)
    costs: RoundCosts | None = None
    costs_path: Path | None = field(default=None, repr=False)
    past_drafts: PastDrafts | None = field(default=None, repr=False)
    copies: list[Any] | None = field(default=None, repr=False, compare=False)

    @property
    def longest_draft(self) -> int:
        """Maximum number of tokens that a row may draft in one round."""
        if self.tree is not None:
            return drafts_of(self.tree)
        if self.kind.branches:
            return MAX_TREE_DRAFTS
        return min(longest_draft(self.draft_length), self.max_new_tokens)

    @property
    def longest(self) -> int:
        """Tokens of the longest row, prompt plus answer."""
        return max(len(prompt) + self.new_tokens(prompt) for prompt in self.prompts)

    def new_tokens(self, prompt: list[int]) -> int:
        """Return the maximum number of new tokens of a row: a text ends at the end of the model's context."""
        return min(self.max_new_tokens, self.context - len(prompt))

    def texts(self, padding: int, rows: int | None = None) -> CachedTexts:
        """Return the texts of the first `rows` rows (None: all), with room for `padding` more tokens each."""
        prompts = self.prompts[:rows]
        return CachedTexts(prompts, [len(prompt) + self.new_tokens(prompt) + padding for prompt in prompts])

    def sequences(self) -> list[Sequence]:
        """Return new sequences, one per row; every lane gets its own."""
        sequences = [
            Sequence(index, self.sequence_ids[index], prompt, self.new_tokens(prompt), self.eos)
            for index, prompt in enumerate(self.prompts)
        ]
        for sequence in sequences:
            if self.stop:
                sequence.stopped = StopStrings(self.tokenizer, self.stop)
            if self.grammars and (grammar := self.grammars[sequence.index]) is not None:
                sequence.grammar = grammar.matcher(self.eos)
        return sequences


def check_options(options: Options) -> None:
    """Raise RequestError if an option can't be used, whatever the pair and the prompt."""
    check_whole("n", options.n, 1, MAX_ROWS)
    check_whole("max_new_tokens", options.max_new_tokens, 1, None)
    check_whole("seed", options.seed, 0, 2**63 - 1)
    if options.sampling is not None and not isinstance(options.sampling, SamplingParams):
        raise RequestError(f"sampling must be a SamplingParams; got {options.sampling!r}.")
    find_verification(options.verification)
    check_time_budget(options.time_budget_ms)
    check_acceptance(options.synthetic_acceptance)
    if options.tree is None:
        check_draft_length(options.draft_length)
    check_grammars(options)
    check_switch("logprobs", options.logprobs)
    check_switch("inspect", options.inspect)
    Chat(options.system, options.chat_template_kwargs, check_switch("raw", options.raw))


@lists_options
def make_request(
    pair: ModelPair, prompt: Prompt, *, options: Options | None = None, **keywords: Unpack[Keywords]
) -> Request:
    """Check all options, given as one object or as keywords, against the pair and the prompt.

    Raises:
        RequestError: if an option or the prompt can't be used.
    """
    unchecked = options_of_call(make_request, options, keywords)
    check_options(unchecked)
    if not hasattr(pair, "target_step"):
        call = f'load_pair("{pair}")' if isinstance(pair, str | os.PathLike) else "ModelPair(target=...)"
        got = repr(pair) if isinstance(pair, str | os.PathLike) else f"a {type(pair).__name__}"
        raise RequestError(f"The first argument must be a pair; got {got:.80}: make one with {call}.")
    pair.refresh()
    sampling = with_bad_word_ids(pair, SamplingParams() if unchecked.sampling is None else unchecked.sampling)
    rule = find_verification(unchecked.verification)
    chat = Chat(unchecked.system, unchecked.chat_template_kwargs, unchecked.raw)
    prompts = encode_prompts(pair, prompt, unchecked.n, chat)
    drafter = default_drafter(pair) if unchecked.drafter == "auto" else unchecked.drafter
    kind = choose_drafter(pair, drafter)
    backend = choose_backend(unchecked.attention, pair.device, pair.dtype)
    check_window_attention(drafter, kind, backend)
    eos = check_end_ids(pair, unchecked.eos_token_id)
    grammars = compile_grammars(unchecked, pair.tokenizer, len(prompts), eos, pair.vocab)
    if any(grammars) and unchecked.synthetic_acceptance is not None:
        raise RequestError("synthetic_acceptance accepts drafts that a grammar forbids: leave one of them out.")
    if kind.windows and kind.runs_model:
        refuse_states(pair.draft_step, f'drafter="{drafter}"')
    tree = check_tree(unchecked.tree, drafter, kind, unchecked.draft_length)
    if tree is not None or kind.branches:
        check_branching(pair.target_step, backend, unchecked.verification, rule, unchecked.synthetic_acceptance)
    request = Request(
        n=unchecked.n,
        max_new_tokens=unchecked.max_new_tokens,
        sampling=sampling,
        draft_length=unchecked.draft_length if tree is None else len(tree),
        tree=tree,
        drafter=drafter,
        attention=unchecked.attention,
        verification=unchecked.verification,
        seed=unchecked.seed,
        sequence_ids=check_sequence_ids(unchecked.sequence_ids, len(prompts), kind),
        eos_token_id=unchecked.eos_token_id,
        system=unchecked.system,
        chat_template_kwargs=unchecked.chat_template_kwargs,
        raw=unchecked.raw,
        time_budget_ms=unchecked.time_budget_ms,
        synthetic_acceptance=unchecked.synthetic_acceptance,
        logprobs=unchecked.logprobs,
        inspect=unchecked.inspect,
        prompts=prompts,
        backend=backend,
        kind=kind,
        rule=rule,
        eos=eos,
        json_schema=unchecked.json_schema,
        regex=unchecked.regex,
        grammar=unchecked.grammar,
        grammars=grammars,
        stop=check_stop(pair, unchecked.stop),
        tokenizer=pair.tokenizer,
        context=pair.context_length,
    )
    return (
        request
        if unchecked.clock is None
        else replace(request, clock=check_clock(unchecked.clock, len(prompts), request.longest))
    )
