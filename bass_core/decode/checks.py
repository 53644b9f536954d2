"""The checks of a request's numbers and names, one function each. None of them runs a model.

A check raises RequestError, with one sentence that names the bad value and the remedy. A check of a value that a
Request stores in another form returns that form.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TypeGuard

from kernels.plan import MAX_TREE_TOKENS

from ..draft.base import Drafter
from ..draft.registry import DRAFTERS, DrafterKind
from ..errors import RequestError
from ..length.options import AUTO, DraftLength
from ..model.base import CausalModel
from ..model.pair import ModelPair
from ..model.runner import SHARING, TREES
from ..sample.params import SamplingParams
from ..verify.rules import AUTOMATIC, Verification

# Maximum number of drafts in a tree. One of the MAX_TREE_TOKENS columns is for the newest token of the text.
MAX_TREE_DRAFTS = MAX_TREE_TOKENS - 1


def check_sequence_ids(ids: Seq[int] | None, rows: int, kind: DrafterKind) -> list[int]:
    """Return the ids that key each row's random numbers; None stands for 0, 1, 2 and so on.

    Rows with equal ids share random numbers. Equal ids are refused if the drafter reads other rows' texts: it
    would see the effect of the random numbers that later judge its drafts.
    """
    if ids is None:
        return list(range(rows))
    if not isinstance(ids, Seq) or len(ids) != rows:
        raise RequestError(f"sequence_ids must be a list of {rows} numbers, one per row; got {ids!r}.")
    for key in ids:
        check_whole("a sequence id", key, 0, 2**63 - 1)
    if len(set(ids)) < len(ids) and kind.reads_others:
        raise RequestError(
            f"sequence_ids must differ if the drafter may read the texts of other rows; got {ids!r}: give each "
            "row its own id, or choose another drafter."
        )
    return list(ids)


def check_time_budget(milliseconds: object) -> None:
    """Accept None or a finite number of milliseconds above 0."""
    if milliseconds is not None and not (_is_number(milliseconds) and milliseconds > 0):
        raise RequestError(f"time_budget_ms must be above 0, or None; got {milliseconds!r}.")


def check_acceptance(rate: object) -> None:
    """Accept None or a probability."""
    if rate is not None and not (_is_number(rate) and 0 <= rate <= 1):
        raise RequestError(f"synthetic_acceptance must be from 0 to 1; got {rate!r}.")


def check_switch(name: str, value: object) -> bool:
    """Accept True or False."""
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be True or False; got {value!r}.")
    return value


def check_end_ids(pair: ModelPair, eos: str | int | Collection[int] | None) -> frozenset[int]:
    """Return the ids that end a text: "auto" stands for the target's own, None for no id."""
    if isinstance(eos, str) and eos == "auto":
        return pair.default_eos()
    if eos is None:
        return frozenset()
    ids = [eos] if isinstance(eos, int) else eos
    if not isinstance(ids, list | tuple | set | frozenset) or not all(type(i) is int for i in ids):
        raise RequestError(f'eos_token_id must be "auto", None, a token id or a list of them; got {eos!r}.')
    return frozenset(ids)


def check_stop(pair: ModelPair, stop: object) -> tuple[str, ...]:
    """Return the strings that end a text; () for None."""
    strings = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, list | tuple) or not all(isinstance(string, str) and string for string in strings):
        raise RequestError(f"stop must be a non-empty string, a list of them, or None; got {stop!r}.")
    if strings and pair.tokenizer is None:
        raise RequestError("stop needs a tokenizer, and this pair has none: leave it out, or use eos_token_id.")
    return tuple(strings)


def with_bad_word_ids(pair: ModelPair, sampling: SamplingParams) -> SamplingParams:
    """Return the parameters with bad words as token ids: those of the word alone and of the word after a space.

    Raises:
        RequestError: for unknown token ids, for words as texts that no tokenizer reads, or if no token is left.
    """
    if not (sampling.bad_words or sampling.logit_bias):
        return sampling
    words: list[tuple[int, ...]] = []
    for word in sampling.bad_words:
        if not isinstance(word, str):
            words.append(word)
            continue
        if pair.tokenizer is None:
            raise RequestError(
                "bad_words given as texts need a tokenizer, and this pair has none: give token ids."
            )
        texts = (word, f" {word}")
        try:
            spellings = [pair.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        except Exception as error:
            raise RequestError(
                f"The tokenizer can't read the bad word {word!r} ({type(error).__name__}): correct it, or give "
                "its token ids."
            ) from error
        # Skip a spelling with ids outside the model's vocabulary, because the model can't write it.
        words += [tuple(ids) for ids in spellings if ids and max(ids) < pair.vocab]
    biased, forbidden = [token for token, _ in sampling.biases], [token for word in words for token in word]
    for name, ids in (("logit_bias", biased), ("bad_words", forbidden)):
        if ids and max(ids) >= pair.vocab:
            raise RequestError(f"{name} must name token ids from 0 to {pair.vocab - 1}; got {max(ids)}.")
    sampling = replace(sampling, bad_words=tuple(dict.fromkeys(words)))
    barred = {*sampling.barred, *(token for token, bias in sampling.biases if bias == -math.inf)}
    if len(barred) == pair.vocab:
        raise RequestError("logit_bias and bad_words forbid every token of the model: allow at least one.")
    return sampling


def check_window_attention(drafter: str | Drafter, kind: DrafterKind, backend: str) -> None:
    """Refuse a drafter that reads only parts of the cache, unless the attention can read parts of a cache."""
    if kind.windows and backend not in SHARING:
        raise RequestError(
            f'drafter="{drafter}" reads only parts of the cache, and attention="{backend}" always reads it all: '
            'choose attention="sdpa".'
        )


def drafts_of(tree: Seq[int]) -> int:
    """Return the number of drafts of a tree of this shape; 15 for (3, 2, 1), for example."""
    return sum(math.prod(tree[: depth + 1]) for depth in range(len(tree)))


def check_tree(
    tree: Seq[int] | None, drafter: str | Drafter, kind: DrafterKind, draft_length: DraftLength
) -> tuple[int, ...] | None:
    """Return the shape of the trees, or None for none.

    Raises:
        RequestError: for a bad shape, a drafter that can't make trees, or if a draft length is given as well.
    """
    if tree is None:
        return None
    shape = tuple(tree) if isinstance(tree, list | tuple) else ()
    whole = all(isinstance(width, int) and not isinstance(width, bool) and width >= 1 for width in shape)
    # Check the number of levels before `drafts_of`: the product of very many widths would be a huge number.
    if not shape or not whole or len(shape) > MAX_TREE_DRAFTS or drafts_of(shape) > MAX_TREE_DRAFTS:
        raise RequestError(
            "tree must list whole numbers of at least 1, the children of each draft level by level, for at most "
            f"{MAX_TREE_DRAFTS} drafts a row; got {tree!r}."
        )
    if not kind.takes_shape:
        suitable = [name for name, width in DRAFTERS.items() if width.takes_shape]
        raise RequestError(
            f"tree needs a drafter that makes trees, {', '.join(suitable)}; got drafter={drafter!r}."
        )
    if draft_length != AUTO:
        raise RequestError(
            f"tree fixes how much is drafted: leave draft_length out; got draft_length={draft_length!r}."
        )
    return shape


def check_branching(
    target: CausalModel, backend: str, verification: str, rule: Verification, acceptance: float | None
) -> None:
    """Refuse a target, attention, verification or synthetic acceptance that can't handle draft trees."""
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


def refuse_states(draft: CausalModel | None, choice: str) -> None:
    """Refuse a draft model with states for a `choice` that drops tokens of earlier rounds."""
    if draft is not None and draft.has_states:
        raise RequestError(
            f"{draft.name} keeps states and can't go back over several rounds, which {choice} needs from a draft "
            'model: choose method="bass" and drafter="model", or another draft.'
        )


def check_whole(name: str, value: object, low: int, high: int | None) -> None:
    """Accept a whole number from `low` to `high`; if `high` is None, there is no upper limit."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        limits = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} must be a whole number {limits}; got {value!r}.")


def _is_number(value: object) -> TypeGuard[float]:
    """Return whether the value is a finite number."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole or (isinstance(value, float) and math.isfinite(value))
