"""A checked request: what to write, how, and with which decoder.

Contract: everything a user can get wrong is refused here, with one sentence, before a model runs or memory is
taken. What comes out is plain data that every lane of a race shares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from ..attention.select import choose_backend
from ..budget.cost_aware import CostAware
from ..budget.policies import DraftLengthPolicy, make_policy
from ..drafting.registry import choose_drafter
from ..errors import RequestError
from ..models.pair import ModelPair
from ..sampling.params import SamplingParams
from ..sequence import Sequence
from ..verification.table import find_verification
from .calibrate import cost_table

# Far above what any memory holds: a list of that many prompts is made before the memory is looked at.
MAX_ROWS = 2**20
# What generate, stream, race and the page do where nobody says how much to draft.
DEFAULT_DRAFT_LENGTH = "bass"


@dataclass(frozen=True)
class Request:
    """Arguments of `generate`, checked: `prompts` as token ids, one a row."""

    prompts: list[list[int]]
    max_new_tokens: int
    sampling: SamplingParams
    policy: DraftLengthPolicy
    drafter: Any
    backend: str
    verification: str
    seed: int
    sequence_ids: list[int]
    eos: frozenset[int]
    time_budget_ms: float | None
    synthetic_acceptance: float | None
    context: int = field(default=0)

    @property
    def longest(self) -> int:
        """Tokens of the longest row, prompt and answer together."""
        return max(len(prompt) + self.new_tokens(prompt) for prompt in self.prompts)

    def new_tokens(self, prompt: list[int]) -> int:
        """What a row may write: a text ends where the model's context does."""
        return min(self.max_new_tokens, self.context - len(prompt))

    def sequences(self) -> list[Sequence]:
        """Fresh sequences, one a row: every lane writes its own."""
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
    drafter: Any = "auto",
    attention: str = "auto",
    verification: str = "chen",
    seed: int = 0,
    sequence_ids: Seq[int] | None = None,
    eos_token_id: Any = "auto",
    raw: bool = False,
    time_budget_ms: float | None = None,
    synthetic_acceptance: float | None = None,
) -> Request:
    """Check all arguments. Raises RequestError, one sentence that says what to do."""
    _whole("n", n, 1, MAX_ROWS)
    _whole("max_new_tokens", max_new_tokens, 1, None)
    _whole("seed", seed, 0, 2**63 - 1)
    sampling = SamplingParams() if sampling is None else sampling
    if not isinstance(sampling, SamplingParams):
        raise RequestError(f"sampling must be a SamplingParams; got {sampling!r}.")
    find_verification(verification)
    if time_budget_ms is not None and not _positive(time_budget_ms):
        raise RequestError(f"time_budget_ms must be above 0, or None; got {time_budget_ms!r}.")
    if synthetic_acceptance is not None and not (
        isinstance(synthetic_acceptance, int | float) and 0 <= synthetic_acceptance <= 1
    ):
        raise RequestError(f"synthetic_acceptance must be from 0 to 1; got {synthetic_acceptance!r}.")
    given = _prompts(prompt, n)
    texts = {one: _encode(pair, one, raw) for one in given if isinstance(one, str)}
    prompts = [list(texts[one]) if isinstance(one, str) else _encode(pair, one, raw) for one in given]
    for one in prompts:
        _check_prompt(pair, one)
    ids: Any = range(len(prompts)) if sequence_ids is None else sequence_ids
    if not isinstance(ids, Seq) or len(ids) != len(prompts):
        raise RequestError(f"sequence_ids must be a list of {len(prompts)} numbers, one a row; got {ids!r}.")
    for key in ids:
        _whole("a sequence id", key, 0, 2**63 - 1)
    drafter, backend = choose_drafter(pair, drafter), choose_backend(attention, pair.device, pair.dtype)
    policy: DraftLengthPolicy
    if draft_length == "cost-aware":
        table = cost_table(pair, drafter, backend, sampling, len(prompts), verification)
        policy = CostAware(table, len(prompts))
    else:
        policy = make_policy(draft_length)
    return Request(
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        policy=policy,
        drafter=drafter,
        backend=backend,
        verification=verification,
        seed=seed,
        sequence_ids=list(ids),
        eos=_eos(pair, eos_token_id),
        time_budget_ms=time_budget_ms,
        synthetic_acceptance=synthetic_acceptance,
        context=pair.context_length,
    )


def _prompts(prompt: str | Seq[Any], n: int) -> list[Any]:
    if isinstance(prompt, str):
        return [prompt] * n
    if not isinstance(prompt, list | tuple):
        kind = type(prompt).__name__
        raise RequestError(f"The prompt must be text, token ids, or a list of either; got {kind}.")
    if not prompt:
        raise RequestError("The prompt is empty: write one, as text, as token ids, or as a list of either.")
    if all(isinstance(token, int) for token in prompt):
        return [list(prompt)] * n
    if n not in (1, len(prompt)):
        raise RequestError(f"n is {n} but {len(prompt)} prompts were given: leave n out.")
    return list(prompt)


def _encode(pair: ModelPair, prompt: Any, raw: bool) -> list[int]:
    if not isinstance(prompt, str):
        if not isinstance(prompt, list | tuple) or not all(type(token) is int for token in prompt):
            raise RequestError(f"A prompt must be text or a list of token ids; got {type(prompt).__name__}.")
        return list(prompt)
    if not prompt.strip():
        raise RequestError("The prompt is empty: write something for the model to answer.")
    if not prompt.isascii() and any("\ud800" <= letter <= "\udfff" for letter in prompt):
        raise RequestError("The prompt holds half a character (a lone surrogate): write that place anew.")
    tokenizer = pair.tokenizer
    if tokenizer is None:
        raise RequestError("This pair has no tokenizer: give the prompt as a list of token ids.")
    if raw or not getattr(tokenizer, "chat_template", None):
        return list(tokenizer(prompt)["input_ids"])
    message = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=False)
    return list(ids)


def _check_prompt(pair: ModelPair, ids: list[int]) -> None:
    if not ids:
        raise RequestError("The prompt is empty: write something for the model to answer.")
    if len(ids) >= pair.context_length:
        raise RequestError(
            f"The prompt has {len(ids)} tokens and the model holds {pair.context_length}, answer included: "
            "shorten the prompt."
        )
    if min(ids) < 0 or max(ids) >= pair.vocab:
        raise RequestError(f"Token ids must be from 0 to {pair.vocab - 1}; got {min(ids)} to {max(ids)}.")


def _eos(pair: ModelPair, eos: Any) -> frozenset[int]:
    if isinstance(eos, str) and eos == "auto":
        return pair.default_eos()
    if eos is None:
        return frozenset()
    ids = [eos] if isinstance(eos, int) else eos
    if not isinstance(ids, list | tuple | set | frozenset) or not all(isinstance(i, int) for i in ids):
        raise RequestError(f'eos_token_id must be "auto", None, a token id or a list of them; got {eos!r}.')
    return frozenset(ids)


def _whole(name: str, value: object, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        limits = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} must be a whole number {limits}; got {value!r}.")


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0
