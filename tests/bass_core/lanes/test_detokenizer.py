"""Text that is streamed token by token ends up as the tokenizer's decoding of all tokens at once.

Contract: this holds for any text and any token ids, special tokens and broken bytes included. A character is shown
once its last byte is there, never before, and text that was shown is never taken back.
"""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from bass_core.lanes.text import TextStream

from ...models import byte_tokenizer

TEXTS = (
    "👩‍👩‍👧‍👦 family",  # joined by zero-width joiners
    "e\u0301tude, nai\u0308ve, क्षि",  # combining characters
    "🇨🇭🏴\U000e0067\U000e0062👍🏽",
    "日本語と한국어",
    " leading, trailing \n\n",
    "\ufffd is a character too: \ufffd",
    "",
)


@cache
def tokenizer(merges: int) -> PreTrainedTokenizerFast:
    """With 0 merges every byte is a token; with many, tokens span parts of several characters."""
    return byte_tokenizer(TEXTS * 3, merges)


def ids_of(text: str, merges: int) -> list[int]:
    return list(tokenizer(merges)(text, add_special_tokens=False)["input_ids"])


def decoded(ids: list[int], merges: int) -> str:
    return str(tokenizer(merges).decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def streamed(ids: list[int], merges: int) -> TextStream:
    """Push all ids, checking that shown text stays and that each piece belongs to one token."""
    stream, shown = TextStream(tokenizer(merges)), ""
    for count, token in enumerate(ids, start=1):
        piece = stream.push(token)
        assert stream.text == shown + piece
        assert len(stream.pieces) == count
        shown = stream.text
    stream.end()
    assert stream.text.startswith(shown)
    assert len(stream.pieces) == len(ids)
    return stream


@pytest.mark.parametrize("text", ["aé👍b", "👍👍", "\u0928\u093f x"])
def test_a_character_comes_with_its_last_byte(text: str) -> None:
    pieces = streamed(ids_of(text, 0), 0).pieces
    expected = [piece for character in text for piece in [""] * (len(character.encode()) - 1) + [character]]
    assert pieces == expected


def test_what_is_never_completed_comes_at_the_end() -> None:
    stream = TextStream(tokenizer(0))
    for token in ids_of("ok👍", 0)[:-1]:
        stream.push(token)
    assert stream.text == "ok"
    stream.end()
    assert stream.text == decoded(stream.ids, 0) == "ok\ufffd"
    stream.end()
    assert stream.text == "ok\ufffd"


def test_special_tokens_have_no_text() -> None:
    end = tokenizer(0).eos_token_id
    stream = streamed([*ids_of("a", 0), end, *ids_of("👍", 0), end], 0)
    assert stream.text == "a👍" and stream.pieces[-1] == ""


@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=st.text() | st.sampled_from(TEXTS), merges=st.sampled_from([0, 40]))
def test_any_text(text: str, merges: int) -> None:
    ids = ids_of(text, merges)
    assert streamed(ids, merges).text == decoded(ids, merges) == text


@settings(max_examples=100, deadline=None, derandomize=True)
@example(ids=[0, 1, 0], merges=0)
@given(ids=st.lists(st.integers(0, 257), max_size=30), merges=st.sampled_from([0, 40]))
def test_any_tokens(ids: list[int], merges: int) -> None:
    """A random model also writes bytes that form no character."""
    assert streamed(ids, merges).text == decoded(ids, merges)
