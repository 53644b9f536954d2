"""What a caller may ask for: the options of `generate`, `stream` and `race`, each written down once.

Contract: an Options is plain data, as given; `make_request` checks it against the pair and the prompts. `Keywords`
shows its fields to type checkers as keyword arguments, `lists_options` to help() and editors. `gathered` makes an
Options of what a call was given.
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

# A message of a conversation: its role ("system", "user", "assistant" and so on), and its content.
Message = Mapping[str, Any]
# A text, token ids, a conversation as a list of messages, or a list with one of these a row.
Prompt = str | Seq[int] | Seq[Message] | Seq[str | Seq[int] | Seq[Message]]
# Default draft_length of generate, stream, race and the page (length/options.py).
DEFAULT_DRAFT_LENGTH = AUTO


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a prompt is to be answered. An unusable value is refused, with a RequestError, by the call that gets it.

    n: answers to one prompt, each a row; 1 to 2**20, and 1 or their number where several prompts are given.
    max_new_tokens: tokens of each row, 1 or more; a text also ends at the end of the model's context.
    sampling: temperature, top_k, top_p, min_p, penalties, biases and bad words; None is greedy.
    draft_length: drafts of a row and round. "auto": "cost-aware" if this machine can be measured, else "bass".
        "bass": Algorithm 1 (arXiv 2404.15778). "cost-aware": a length a row, by measured round costs. Or a whole
        number from 0 to 1024, or a policy of your own: an object with `limit`, `lengths` and `observe`
        (length/base.py).
    tree: draft trees of this shape instead, the children of each draft level by level, as (3, 2, 1); at most 62
        drafts, by a draft model or head. None: chains.
    drafter: a name from DRAFTERS, a drafter object, or "auto" (the pair's default).
    attention: a name from ATTENTIONS, or "auto" (the fastest known on this device).
    verification: "block" (judges a row's drafts together), "rejection" (one by one), "coupled" (every method gives
        the same text), or "auto" (of the first two, the one that accepts most).
    seed: of all noise, 0 to 2**63 - 1.
    sequence_ids: a key for each row's noise, 0 to 2**63 - 1; None: 0 to n - 1.
    eos_token_id: the id or ids that end a text, None for no such id, "auto" for the model's own.
    stop: a string or several, none empty, that end a text as soon as it holds one: the text ends before it, and
        `token_ids` with the token that completed it. Needs a tokenizer. None: no such string.
    system: a system message before each prompt that is text; None: none.
    chat_template_kwargs: variables of the chat template, as {"enable_thinking": False}, and other arguments of
        `tokenizer.apply_chat_template`, as {"chat_template": "tool_use"}; None: none.
    raw: whether the chat template is left out of a prompt that is text.
    time_budget_ms: milliseconds of lane time, above 0, after which the lane ends; None: no limit.
    synthetic_acceptance: accept each draft with this probability, 0 to 1, whatever it is; for benchmarks.
    logprobs: whether `generate` and `stream` give each token's log-probability under the target, by its plain
        softmax (`logprobs`) and by the distribution that is sampled (`sampled_logprobs`).
    inspect: whether each row's round gets its `detail`, worked out off the lane's clock.
    clock: predict times on another machine; None: measure them on this one.
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
    """Let help() and editors see the fields of Options in the place of the function's `**keywords`."""
    signature = inspect.signature(function)
    own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    listed = [*own, *inspect.signature(Options).parameters.values()]
    vars(function)["__signature__"] = signature.replace(parameters=listed)
    return function


def gathered(function: Callable[..., object], options: Options | None, keywords: Keywords) -> Options:
    """The Options of a call of `function`, given as one object or as keywords.

    Raises RequestError for both at once, and for the first keyword that `function` has not.
    """
    known = [name for name, one in inspect.signature(function).parameters.items() if one.kind is one.KEYWORD_ONLY]
    for name in keywords:
        if name not in known:
            raise RequestError(f"{function.__name__} has no argument {name}: {_advice(name, known)}")
    if options is None:
        return Options(**keywords)
    if not isinstance(options, Options):
        raise RequestError(f"options must be an Options, or None; got {options!r}.")
    if keywords:
        raise RequestError(f"{next(iter(keywords))} was given beside options: put it into Options(...).")
    return options


def _advice(name: str, known: list[str]) -> str:
    """What to write in the place of an unknown keyword."""
    if name in _SAMPLING:
        return f"use sampling=SamplingParams({name}=...)."
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}."
