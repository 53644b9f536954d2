"""The checks of a request's numbers and names, one function each.

Contract: an unusable value raises RequestError with one sentence that names it and says what to do; otherwise a
check returns the value in the form that a Request holds, if it changes. Nothing here runs a model.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TypeGuard

from kernels.plan import MOST_TREE

from ..draft.base import Drafter
from ..draft.registry import DRAFTERS, DrafterKind
from ..errors import RequestError
from ..length.options import AUTO, DraftLength
from ..model.base import CausalModel
from ..model.pair import ModelPair
from ..model.runner import SHARING, TREES
from ..sample.params import SamplingParams
from ..verify.rules import AUTOMATIC, Verification

# The most drafts of a row in a round where they form a tree: one column of MOST_TREE is the newest token's.
MOST_DRAFTS = MOST_TREE - 1


def check_sequence_ids(ids: Seq[int] | None, rows: int, kind: DrafterKind) -> list[int]:
    """The ids that key each row's sampling noise; None stands for 0, 1, 2 and so on.

    What a row wrote tells of the noise that another row with its id is judged by: no drafter may read it.
    """
    if ids is None:
        return list(range(rows))
    if not isinstance(ids, Seq) or len(ids) != rows:
        raise RequestError(f"sequence_ids must be a list of {rows} numbers, one a row; got {ids!r}.")
    for key in ids:
        check_whole("a sequence id", key, 0, 2**63 - 1)
    if len(set(ids)) < len(ids) and kind.reads_others:
        raise RequestError(
            f"sequence_ids must differ where the drafter may read the texts of other rows; got {ids!r}: give each "
            "row an id of its own, or choose another drafter."
        )
    return list(ids)


def check_time_budget(milliseconds: object) -> None:
    """Accept None, or a finite number of milliseconds above 0."""
    if milliseconds is not None and not (_is_number(milliseconds) and milliseconds > 0):
        raise RequestError(f"time_budget_ms must be above 0, or None; got {milliseconds!r}.")


def check_acceptance(rate: object) -> None:
    """Accept None, or a probability."""
    if rate is not None and not (_is_number(rate) and 0 <= rate <= 1):
        raise RequestError(f"synthetic_acceptance must be from 0 to 1; got {rate!r}.")


def check_switch(name: str, value: object) -> bool:
    """Accept True or False."""
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be True or False; got {value!r}.")
    return value


def check_end_ids(pair: ModelPair, eos: str | int | Collection[int] | None) -> frozenset[int]:
    """The ids that end a text: "auto" stands for the target's own, None for no id."""
    if isinstance(eos, str) and eos == "auto":
        return pair.default_eos()
    if eos is None:
        return frozenset()
    ids = [eos] if isinstance(eos, int) else eos
    if not isinstance(ids, list | tuple | set | frozenset) or not all(isinstance(i, int) for i in ids):
        raise RequestError(f'eos_token_id must be "auto", None, a token id or a list of them; got {eos!r}.')
    return frozenset(ids)


def check_stop(pair: ModelPair, stop: object) -> tuple[str, ...]:
    """The strings that end a text, none for None."""
    given = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(given, list | tuple) or not all(isinstance(one, str) and one for one in given):
        raise RequestError(f"stop must be a string that is not empty, a list of such, or None; got {stop!r}.")
    if given and pair.tokenizer is None:
        raise RequestError("stop needs a tokenizer, and this pair has none: leave it out, or use eos_token_id.")
    return tuple(given)


def spelled(pair: ModelPair, sampling: SamplingParams) -> SamplingParams:
    """The same with each bad word as token ids, at a text's start and behind a space; refuse unknown ids."""
    words: list[tuple[int, ...]] = []
    for word in sampling.bad_words:
        if not isinstance(word, str):
            words.append(word)
            continue
        if pair.tokenizer is None:
            raise RequestError("bad_words needs a tokenizer for texts, and this pair has none: give ids.")
        both = [pair.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (word, f" {word}")]
        # What the model has no ids for it can't write.
        words += [tuple(ids) for ids in both if ids and max(ids) < pair.vocab]
    biased, barred = [token for token, _ in sampling.biases], [token for word in words for token in word]
    for name, ids in (("logit_bias", biased), ("bad_words", barred)):
        if ids and max(ids) >= pair.vocab:
            raise RequestError(f"{name} must name token ids from 0 to {pair.vocab - 1}; got {max(ids)}.")
    return replace(sampling, bad_words=tuple(dict.fromkeys(words)))


def check_sight(drafter: str | Drafter, kind: DrafterKind, backend: str) -> None:
    """Refuse a drafter that sees parts of the cache, with an attention that only sees it whole."""
    if kind.windows and backend not in SHARING:
        raise RequestError(
            f'drafter="{drafter}" sees parts of the cache alone, and attention="{backend}" sees it whole: choose '
            'attention="sdpa".'
        )


def drafts_of(tree: Seq[int]) -> int:
    """Drafts of a tree of this shape."""
    return sum(math.prod(tree[: depth + 1]) for depth in range(len(tree)))


def check_tree(
    tree: Seq[int] | None, drafter: str | Drafter, kind: DrafterKind, draft_length: DraftLength
) -> tuple[int, ...] | None:
    """The shape of trees, None for none; refuse a drafter that can't make them, and a draft length beside them."""
    if tree is None:
        return None
    shape = tuple(tree) if isinstance(tree, list | tuple) else ()
    whole = all(isinstance(one, int) and not isinstance(one, bool) and one >= 1 for one in shape)
    # A product of many levels would be a number of many digits.
    if not shape or not whole or len(shape) > MOST_DRAFTS or drafts_of(shape) > MOST_DRAFTS:
        raise RequestError(
            "tree must list whole numbers of at least 1, the children of each draft level by level, for at most "
            f"{MOST_DRAFTS} drafts a row; got {tree!r}."
        )
    if not kind.takes_shape:
        able = [name for name, one in DRAFTERS.items() if one.takes_shape]
        raise RequestError(f"tree needs a drafter that makes trees, {', '.join(able)}; got drafter={drafter!r}.")
    if draft_length != AUTO:
        raise RequestError(
            f"tree fixes how much is drafted: leave draft_length out; got draft_length={draft_length!r}."
        )
    return shape


def check_branching(
    target: CausalModel, backend: str, verification: str, rule: Verification, acceptance: float | None
) -> None:
    """Refuse, for trees of drafts, a target, an attention, a verification or an acceptance that is for chains."""
    if not target.trees:
        raise RequestError(
            f"{target.name} can't attend over trees of drafts: leave tree out, or choose a drafter that makes "
            "chains."
        )
    if backend not in TREES:
        raise RequestError(
            f'attention="{backend}" can\'t attend over trees of drafts: choose one of {", ".join(TREES)}.'
        )
    if rule is not AUTOMATIC and (rule.together or rule.adjust is not None):
        raise RequestError(
            f'verification="{verification}" judges chains, and these drafts are trees: choose "auto", "rejection" '
            'or "coupled".'
        )
    if acceptance is not None:
        raise RequestError("synthetic_acceptance is for chains of drafts, and these are trees: leave it out.")


def check_whole(name: str, value: object, low: int, high: int | None) -> None:
    """Accept a whole number from `low` to `high`; if `high` is None, there is no upper limit."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        limits = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} must be a whole number {limits}; got {value!r}.")


def _is_number(value: object) -> TypeGuard[float]:
    """Whether the value is a finite number."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole or (isinstance(value, float) and math.isfinite(value))
