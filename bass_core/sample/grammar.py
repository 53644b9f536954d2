"""Grammars: which tokens may follow a text. `compile_grammars` compiles them; a `Matcher` follows one row's text.

Every decoder samples from the target's logits with the forbidden tokens at -inf (shaping.py), so a decoder with
drafts has the law of masked regular decoding. docs/formulas.md compares it with the target's law given that the
whole text fits the grammar, which is another one.

llguidance compiles the grammars and computes the masks.
"""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError, RequestError
from ..sequence import Sequence

# The options that give a grammar, and the layout of JSON that json.dumps writes. The keys of an object are then
# certain tokens. A schema's own "x-guidance" takes precedence.
KINDS = ("json_schema", "regex", "grammar")
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# An llguidance LLTokenizer for each tokenizer, and the number of ids that it was prepared for.
_prepared: weakref.WeakKeyDictionary[Any, tuple[int, Any]] = weakref.WeakKeyDictionary()
_preparing = threading.Lock()

Bits = NDArray[np.int32]


class Matcher:
    """Follows one row's text, and knows which tokens may come next.

    Only `write` moves it. Drafts are read by copies, which are thrown away: llguidance can't take tokens back in
    every grammar, nor after a draft that leads beyond its limits.

    Args:
        start: an llguidance matcher that has read nothing; it is copied.
        tokenizer: its LLTokenizer.
        eos: the ids that end the text. They are allowed wherever the grammar may end, and nowhere else.
        vocab: number of ids that the model has; by default those of the tokenizer and `eos`.
    """

    def __init__(self, start: Any, tokenizer: Any, eos: frozenset[int], vocab: int | None = None) -> None:
        self._matcher, self.eos, self.size = start.deep_copy(), eos, tokenizer.vocab_size
        self._own_eos = list(tokenizer.eos_tokens)
        self._ends = self.eos.union(self._own_eos)
        self.vocab = max([self.size, *(end + 1 for end in eos)]) if vocab is None else vocab
        # The certain tokens after the text, once they are known: a round asks for them several times.
        self._forced: list[int] | None = None

    @property
    def complete(self) -> bool:
        """Whether the text so far fits the grammar as a whole."""
        return bool(self._matcher.is_accepting())

    def is_stuck(self, drafts: list[int]) -> bool:
        """Return whether no token can follow these drafts, and the text does not fit."""
        mask = self.next_mask(drafts)
        return mask is not None and not mask.any()

    def write(self, token: int) -> bool:
        """Add a token to the text, and return whether the text is complete and nothing can follow.

        Raises:
            ModelError: if the grammar forbids the token, or exceeds llguidance's limits.
        """
        # A forbidden token would leave llguidance's matcher in an error state for ever.
        if not self._read(self._matcher, [token]):
            self._refuse_broken()
            raise ModelError(f"The token {token} was written, and the grammar forbids it: report this as a fault.")
        self._matcher.consume_token(token)
        self._refuse_broken()
        self._forced = None
        return _over(self._matcher)

    def forced(self) -> list[int]:
        """Return the tokens that are certain to follow, because the mask of each allows only one."""
        if self._forced is None:
            tokens = self._matcher.compute_ff_tokens()
            lacking = (i for i, token in enumerate(tokens) if token >= self.vocab)
            self._forced = list(tokens[: next(lacking, len(tokens))])
        return self._forced

    def fitting(self, drafts: list[int]) -> int:
        """Return how many of the first drafts are allowed; those after an end are not."""
        count = self._read(self._matcher, drafts)
        if count == len(drafts) or drafts[count] not in self.eos:
            return count
        return count + bool(self._after(drafts[:count]).is_accepting())

    def masks(
        self, drafts: Seq[int], parents: Seq[int] | None = None, likeliest: Seq[int] | None = None
    ) -> list[Bits | None]:
        """Return the mask of the next token, and of the token after each draft.

        A mask has one bit per token id, 1 if it is allowed. It is None after a forbidden draft, and after the end
        of the text, where no token is written.

        Args:
            parents: the draft that each draft follows, -1 for the text; None for a chain.
            likeliest: the token with the largest logit at each place. A mask that allows it is None too: greedy
                decoding chooses this token without it, and it takes about 30 times as long as this check.

        Raises:
            ModelError: if the grammar exceeds llguidance's limits after the text.
        """
        masks: list[Bits | None] = [None] * (len(drafts) + 1)
        masks[0] = self._mask(self._matcher, None if likeliest is None else likeliest[0])
        self._refuse_broken()
        children: list[list[int]] = [[] for _ in range(len(drafts) + 1)]
        for draft in range(len(drafts) if parents is None else len(parents)):
            children[draft if parents is None else parents[draft] + 1].append(draft)
        # Drafts with the same parent, and a matcher that has read the drafts before them. The last takes it over.
        ahead = [(children[0], self._after([]))] if children[0] else []
        while ahead:
            siblings, before = ahead.pop()
            for draft in siblings:
                if not self._read(before, [drafts[draft]]):
                    continue
                here = before if draft == siblings[-1] else before.deep_copy()
                here.consume_token(drafts[draft])
                masks[draft + 1] = self._mask(here, None if likeliest is None else likeliest[draft + 1])
                if children[draft + 1]:
                    ahead.append((children[draft + 1], here))
        return masks

    def next_mask(self, drafts: list[int]) -> Bits | None:
        """Return the mask after these drafts, or None, as in `masks`."""
        if self._read(self._matcher, drafts) < len(drafts):
            return None
        return self._mask(self._after(drafts))

    def _after(self, drafts: list[int]) -> Any:
        """Return a copy of llguidance's matcher that has read these drafts too."""
        ahead = self._matcher.deep_copy()
        ahead.consume_tokens(drafts)
        return ahead

    def _read(self, matcher: Any, tokens: list[int]) -> int:
        """Return how many of the first tokens are allowed after a matcher's text, and do not end it."""
        # Even validating an id that the tokenizer lacks would leave llguidance's matcher in an error state.
        most = min(self.size, self.vocab)
        stops = (i for i, token in enumerate(tokens) if token in self._ends or not 0 <= token < most)
        return int(matcher.validate_tokens(tokens[: next(stops, len(tokens))]))

    def _mask(self, matcher: Any, likeliest: int | None = None) -> Bits | None:
        """Return the mask after a matcher's text, int32 [ids / 32], or None as in `masks`."""
        if _over(matcher) or matcher.is_error():
            return None
        if likeliest is not None and (
            matcher.is_accepting() if likeliest in self.eos else self._read(matcher, [likeliest])
        ):
            return None
        bits, own = np.zeros((max(self.size, self.vocab) + 31) // 32, np.int32), (self.size + 31) // 32
        if not matcher.is_stopped():
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, 4 * own)
        # llguidance also allows its own end of text, where it finds no token that fits.
        _set(bits, self._own_eos, False)
        _set(bits, [token for token in self.eos if token < self.vocab], matcher.is_accepting())
        # Ids that the model lacks.
        bits = bits[: (self.vocab + 31) // 32]
        if self.vocab < self.size:
            _set(bits, range(self.vocab, 32 * len(bits)), False)
        return None if matcher.is_error() else bits

    def _refuse_broken(self) -> None:
        """Raise a ModelError if llguidance can't follow the text any more."""
        if self._matcher.is_error():
            reason = _in_one_line(self._matcher.get_error())
            raise ModelError(f"llguidance can't follow a row's grammar any further ({reason}): simplify it.")


def _over(matcher: Any) -> bool:
    """Return whether an llguidance matcher's text is complete and nothing can follow."""
    return bool(matcher.is_stopped() and matcher.is_accepting())


def _set(bits: Bits, tokens: Seq[int], value: bool) -> None:
    """Set the tokens' bits."""
    octets = bits.view(np.uint8)
    for token in tokens:
        octets[token >> 3] = octets[token >> 3] & ~np.uint8(1 << (token & 7)) | np.uint8(value << (token & 7))


def refuse_stuck(
    rows: Seq[Sequence], tokens: Seq[int], shaped: bool, accepted: Callable[[int], list[int]] = lambda row: []
) -> None:
    """Check that no row has a grammar that leaves it no token.

    Args:
        tokens: the rows' next tokens, below 0 if there is none that can be chosen.
        shaped: whether penalties, biases or bad words change the logits.
        accepted: returns the drafts that a row accepts before its token, which its matcher hasn't read yet.

    Raises:
        RequestError: if penalties, biases or bad words forbid all tokens that a row's grammar allows.
        ModelError: if the tokenizer can't spell what must follow.
    """
    for r, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        if token >= 0 or row.grammar is None:
            continue
        if row.grammar.is_stuck(accepted(r)):
            raise ModelError(
                f"The tokenizer has no token that row {row.index}'s grammar allows, except perhaps one that ends "
                "texts: change the grammar, or eos_token_id."
            )
        if shaped:
            raise RequestError(
                f"logit_bias or bad_words forbid all tokens that row {row.index}'s grammar allows, so its text "
                "ends here: change one of them."
            )


class Grammar:
    """A compiled grammar, which makes the matchers of the rows that have it."""

    def __init__(self, start: Any, tokenizer: Any, vocab: int | None = None) -> None:
        self._start, self._tokenizer, self._vocab = start, tokenizer, vocab

    def matcher(self, eos: frozenset[int]) -> Matcher:
        """Return a matcher for a new text."""
        return Matcher(self._start, self._tokenizer, eos, self._vocab)


def check_grammars(options: Any) -> None:
    """Check the grammars of Options as far as that needs no pair.

    Raises:
        RequestError: if one can't be used, with llguidance's reason and the place.
    """
    for kind in [kind for kind in KINDS if getattr(options, kind) is not None]:
        value = getattr(options, kind)
        for row, each in enumerate(value) if isinstance(value, list | tuple) else [(None, value)]:
            if each is not None:
                _source(kind, each, row)


def compile_grammars(
    options: Any, tokenizer: Any, rows: int, eos: frozenset[int], vocab: int
) -> tuple[Grammar | None, ...]:
    """Return the grammar of each row, or () if no row has one.

    Args:
        options: its `json_schema`, `regex` and `grammar` are one value for all rows, or a list with one per row.
        vocab: number of ids that the model has.

    Raises:
        RequestError: if a grammar can't be used, or a row has several.
    """
    sources: list[str | None] = [None] * rows
    for kind in [kind for kind in KINDS if getattr(options, kind) is not None]:
        for row, value in enumerate(_spread(kind, getattr(options, kind), rows)):
            if value is None:
                continue
            if sources[row] is not None:
                raise RequestError(f"Row {row} has several grammars: give it one of {', '.join(KINDS)}.")
            sources[row] = _source(kind, value, row if isinstance(getattr(options, kind), list | tuple) else None)
    if not any(sources):
        return ()
    prepared = prepared_tokenizer(tokenizer)
    unique = [source for source in dict.fromkeys(sources) if source is not None]
    grammars = {source: compiled(source, prepared, eos, vocab) for source in unique}
    return tuple(None if source is None else grammars[source] for source in sources)


def compiled(source: str, tokenizer: Any, eos: frozenset[int], vocab: int | None = None) -> Grammar:
    """Return the grammar of llguidance's `source` for an LLTokenizer; `vocab` as in Matcher.

    Raises:
        RequestError: if it allows no text that can be written with this tokenizer and these ends.
    """
    start = _llguidance().LLMatcher(tokenizer, source, log_level=0)
    if start.is_error():
        raise RequestError(f"A grammar can't be used: {_in_one_line(start.get_error())}.")
    grammar = Grammar(start, tokenizer, vocab)
    try:
        (mask,) = grammar.matcher(eos).masks([])
    except ModelError as error:
        raise RequestError(str(error)) from None
    if mask is None or not mask.any():
        raise RequestError("A grammar allows no text that the model can write: change it.")
    return grammar


def prepared_tokenizer(tokenizer: Any) -> Any:
    """Return llguidance's LLTokenizer of a pair's tokenizer, prepared once per process.

    Raises:
        RequestError: if it can't be prepared.
    """
    if tokenizer is None:
        raise RequestError("A grammar needs a tokenizer, and this pair has none: leave the grammar out.")
    _llguidance()
    from llguidance.hf import from_tokenizer

    with _preparing:
        size, prepared = _prepared.get(tokenizer, (-1, None))
        if size != len(tokenizer):
            try:
                prepared = from_tokenizer(tokenizer)
            except ValueError as error:
                raise RequestError(
                    f"llguidance can't read this pair's tokenizer ({_in_one_line(str(error))}): use a fast "
                    "tokenizer, or leave the grammar out."
                ) from error
            _prepared[tokenizer] = len(tokenizer), prepared
    return prepared


def _llguidance() -> Any:
    """Return the package llguidance.

    Raises:
        RequestError: if it is not installed.
    """
    try:
        import llguidance
    except ImportError:
        raise RequestError(
            "json_schema, regex and grammar need the package llguidance: install it with pip install llguidance."
        ) from None
    return llguidance


def _spread(kind: str, value: Any, rows: int) -> Seq[Any]:
    """Return an option's values, one per row."""
    if not isinstance(value, list | tuple):
        return [value] * rows
    if len(value) != rows:
        raise RequestError(f"{kind} must be one value, or a list of {rows}, one per row; got {len(value)}.")
    return value


def _source(kind: str, value: Any, row: int | None) -> str:
    """Return llguidance's form of a grammar that can be compiled; `row` is for messages, None for all rows."""
    matcher, name = _llguidance().LLMatcher, kind if row is None else f"{kind} of row {row}"
    if kind == "json_schema":
        schema = _schema(name, value)
        source = _schema_source(schema)
    else:
        if not isinstance(value, str):
            raise RequestError(f"{name} must be a text; got {value!r:.80}.")
        try:
            source = matcher.grammar_from_regex(value) if kind == "regex" else matcher.grammar_from_lark(value)
        except ValueError as error:  # e.g. half of a surrogate pair
            raise RequestError(f"{name} can't be read ({_in_one_line(str(error))}): correct it.") from None
    if reason := _fault(source):
        place = _place(schema, reason) if kind == "json_schema" else ""
        raise RequestError(f"{name} can't be compiled{place}: {_in_one_line(reason)}.")
    return str(source)


def _schema(name: str, value: Any) -> dict[str, Any]:
    """Return a JSON schema as a dictionary."""
    if hasattr(value, "model_json_schema"):
        try:
            value = value.model_json_schema()
        except Exception as error:  # pydantic has several kinds
            raise RequestError(
                f"{name} has no JSON schema ({_in_one_line(str(error))}): change the model."
            ) from None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{name} is not JSON ({error}): correct it.") from None
    if not isinstance(value, Mapping):
        raise RequestError(
            f"{name} must be a dictionary, the JSON text of an object, or a pydantic model; got {value!r:.80}."
        )
    return dict(value)


def _schema_source(schema: Mapping[str, Any]) -> str:
    try:
        source = _llguidance().LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=LAYOUT)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"json_schema can't be read ({_in_one_line(str(error))}): correct it.") from None
    return str(source)


def _fault(source: str) -> str:
    """Return llguidance's reason why a grammar can't be compiled, or ""."""
    failed, reasons = _llguidance().LLMatcher.validate_grammar_with_warnings(source)
    return str(reasons[0]) if failed else ""


def _place(schema: dict[str, Any], reason: str) -> str:
    """Return " at #/...", the innermost part of the schema that fails for this reason."""
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    faulty = [path for path, part in _parts(schema, "") if _fault(_schema_source({**shared, **part})) == reason]
    return f" at #{faulty[-1]}" if faulty and faulty[-1] else ""


def _parts(value: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the places and values of all objects in a value of JSON, outer ones first."""
    if isinstance(value, dict):
        yield path, value
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(each, dict | list):
            yield from _parts(each, f"{path}/{key}")


def _in_one_line(reason: str) -> str:
    """Return llguidance's reason as part of a sentence. It may show the place below a line of the grammar."""
    reason = reason.split("\n<state>")[0]
    if parsed := re.search(r"regex parse error:\n(.*)\n( *)\^+\n(?:.*\n)*?error: (.*)", reason):
        indent = len(parsed[1]) - len(parsed[1].lstrip())
        return f"{parsed[3]}, at character {len(parsed[2]) - indent + 1} of {parsed[1].strip()}"
    first = next(iter(reason.strip().splitlines()), "")
    return re.sub(r"^(?:at )?(\d+)\((\d+)\): ", r"line \1, column \2: ", first).rstrip(".")
