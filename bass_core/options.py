"""The options of `generate`, `stream` and `race`, each defined once.

`Options` is plain, unchecked data; `make_request` (decode/request.py) checks it against the pair and the prompts.
`options_of_call` builds an Options from the arguments of a call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, TypedDict, TypeVar

from .draft.base import Drafter
from .errors import RequestError
from .length.options import AUTO, DraftLength
from .predict.clock import SimulatedClock
from .sample.params import SamplingParams

# A message of a conversation: its role (e.g. "system", "user" or "assistant") and its content.
Message = Mapping[str, Any]
# A text, token ids or a conversation (a list of messages); or a list with one of these per row.
Prompt = str | Seq[int] | Seq[Message] | Seq[str | Seq[int] | Seq[Message]]
# A JSON schema: a dictionary, a JSON text, or a pydantic model.
Schema = Mapping[str, Any] | str | type
# Default draft_length of generate, stream, race and the page.
DEFAULT_DRAFT_LENGTH = AUTO


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to answer a prompt. A call with an unusable value raises a RequestError.

    Attributes:
        n: number of answers to one prompt, each a row of the batch; 1 to 2**20. With several prompts, n must be 1
            or the number of prompts.
        max_new_tokens: maximum number of new tokens per row, 1 or more. A text also ends at the end of the model's
            context.
        sampling: temperature, top_k, top_p, min_p, penalties, biases and bad words; None is greedy.
        draft_length: tokens to draft per row and round. "auto" is "cost-aware" if this machine can be measured,
            else "bass". "bass" is Algorithm 1 of arXiv 2404.15778. "cost-aware" picks a length for every row from
            measured round costs. You can also give an integer from 0 to 1024, or your own policy: an object with
            `limit`, `lengths` and `observe` (length/base.py). Decoders work on deep copies of it.
        tree: draft trees instead of chains: the number of children of each draft, level by level. For example,
            (3, 2, 1) drafts 3 tokens, 2 after each of them and 1 after each of those: 15 in all. A tree has at
            most 62 drafts and needs a draft model or head. None drafts chains.
        drafter: a name from DRAFTERS, a drafter object (decoders work on deep copies of it), or "auto" (the pair's
            default).
        attention: a name from ATTENTIONS, or "auto" (the fastest known on this device).
        verification: "block" (judges a row's drafts together), "rejection" (one by one), "coupled" (every method
            writes the same text), or "auto" ("block" for chains, the tree rule for trees).
        seed: seed of all random numbers, 0 to 2**63 - 1.
        sequence_ids: a key for each row's random numbers, 0 to 2**63 - 1; None means 0 to n - 1.
        eos_token_id: the id or ids that end a text; None for no such id, "auto" for the model's own.
        stop: a string or several, none empty; a text ends just before the first one that appears in it.
            `token_ids` includes the token that completed it. Needs a tokenizer. None for no such string.
        json_schema: write only JSON that fits this schema: a dictionary, a JSON text or a pydantic model. None for
            no schema, or a list with one value per row, each of which may be None. Needs the package llguidance
            and a tokenizer. A text that ends at `max_new_tokens` may be incomplete.
        regex: write only texts that match this regular expression as a whole; otherwise as `json_schema`.
        grammar: write only texts of this grammar, in Lark's syntax; otherwise as `json_schema`. A row can have
            only one of the three.
        system: a system message before each prompt that is text; None for none.
        chat_template_kwargs: variables of the chat template, e.g. {"enable_thinking": False}, and other arguments
            of `tokenizer.apply_chat_template`, e.g. {"chat_template": "tool_use"}; None for none.
        raw: whether to leave out the chat template for a prompt that is text.
        time_budget_ms: milliseconds of lane time, above 0, after which the lane ends; None for no limit.
        synthetic_acceptance: accept each draft with this probability (0 to 1) instead of judging it; for
            benchmarks.
        logprobs: whether `generate` and `stream` return each token's log-probability under the target: by the
            plain softmax (`logprobs`) and by the distribution that was sampled (`sampled_logprobs`).
        inspect: whether to set `RowRound.detail`, which is computed while the lane's clock is stopped.
        clock: predict the times of another machine; None measures them on this one.
    """

    n: int = 1
    max_new_tokens: int = 64
    sampling: SamplingParams | None = None
    draft_length: DraftLength = DEFAULT_DRAFT_LENGTH
    tree: Seq[int] | None = None
    drafter: str | Drafter = "auto"
    attention: str = "auto"
    verification: str = "auto"
    seed: int = 0
    sequence_ids: Seq[int] | None = None
    eos_token_id: str | int | Collection[int] | None = "auto"
    stop: str | Seq[str] | None = None
    json_schema: Schema | Seq[Schema | None] | None = None
    regex: str | Seq[str | None] | None = None
    grammar: str | Seq[str | None] | None = None
    system: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    raw: bool = False
    time_budget_ms: float | None = None
    synthetic_acceptance: float | None = None
    logprobs: bool = False
    inspect: bool = False
    clock: SimulatedClock | None = None


class Keywords(TypedDict, total=False):
    """The fields of Options as keyword arguments, for type checkers."""

    n: int
    max_new_tokens: int
    sampling: SamplingParams | None
    draft_length: DraftLength
    tree: Seq[int] | None
    drafter: str | Drafter
    attention: str
    verification: str
    seed: int
    sequence_ids: Seq[int] | None
    eos_token_id: str | int | Collection[int] | None
    stop: str | Seq[str] | None
    json_schema: Schema | Seq[Schema | None] | None
    regex: str | Seq[str | None] | None
    grammar: str | Seq[str | None] | None
    system: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    raw: bool
    time_budget_ms: float | None
    synthetic_acceptance: float | None
    logprobs: bool
    inspect: bool
    clock: SimulatedClock | None


F = TypeVar("F", bound=Callable[..., object])
_SAMPLING = tuple(field.name for field in fields(SamplingParams))


def lists_options(function: F) -> F:
    """Show the fields of Options to help() and editors, in place of the function's `**keywords`.

    Returns:
        The same function, with a new `__signature__`.
    """
    signature = inspect.signature(function)
    parameters = [
        parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD
    ]
    shown = [*parameters, *inspect.signature(Options).parameters.values()]
    vars(function)["__signature__"] = signature.replace(parameters=shown)
    return function


def options_of_call(function: Callable[..., object], options: Options | None, keywords: Keywords) -> Options:
    """Return the Options of a call of `function`, which got them as one object or as keywords.

    Raises:
        RequestError: if both are given, or for the first keyword that `function` does not have.
    """
    known = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    for name in keywords:
        if name not in known:
            raise RequestError(f"{function.__name__} has no argument {name}: {_advice(name, known)}")
    if options is None:
        return Options(**keywords)
    if not isinstance(options, Options):
        raise RequestError(f"options must be an Options, or None; got {options!r}.")
    if keywords:
        raise RequestError(f"{next(iter(keywords))} was given together with options: put it into Options(...).")
    return options


def _advice(name: str, known: list[str]) -> str:
    """Return a suggestion to use instead of an unknown keyword."""
    if name in _SAMPLING:
        return f"use sampling=SamplingParams({name}=...)."
    matches = get_close_matches(name, known, n=1)
    return f"did you mean {matches[0]}?" if matches else f"choose from {', '.join(known)}."
