"""Text that is streamed token by token ends up as the tokenizer's decoding of all tokens at once.

Contract: this holds for any text and any token ids, special tokens and broken bytes included. A character is shown
once its last byte is there, never before, and text that was shown is never taken back. A stop string ends the text
before it, wherever tokens begin and end, and no part of it is ever shown.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers import models as tokenizing
from transformers import PreTrainedTokenizerFast

from bass_core import ModelPair, RequestError, generate, race, stream
from bass_core.decode.text import TextStream
from tests.support.models import byte_tokenizer, tiny_pair

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


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    text=st.text("ab\n#👍", max_size=20),
    stop=st.lists(st.text("ab\n#👍", min_size=1, max_size=4), min_size=1, max_size=3),
    merges=st.sampled_from([0, 40]),
)
def test_a_stop_string_ends_the_text_before_it(text: str, stop: list[str], merges: int) -> None:
    whole = TextStream(tokenizer(merges), stop)
    ids = ids_of(text, merges)
    # A row ends with the token that completes a stop string.
    held = [
        so_far for n in range(len(ids)) if any(one in (so_far := decoded(ids[: n + 1], merges)) for one in stop)
    ]
    wanted = held[0][: min(held[0].find(one) for one in stop if one in held[0])] if held else text
    for token in ids:
        whole.push(token)
        assert wanted.startswith(whole.text)
        so_far = decoded(whole.ids, merges)
        assert whole.stopped == any(one in so_far for one in stop)
    whole.end()
    assert whole.text == wanted


def fallback() -> Any:
    """A tokenizer that spells a byte as Llama 2's does."""
    words = {"<0x47>": 0, "<0xB7>": 1, "a": 2, "<unk>": 3}
    model = Tokenizer(tokenizing.BPE(words, [], unk_token="<unk>", byte_fallback=True))
    model.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>")


@pytest.mark.parametrize("stop", [(), ("ab",)], ids=["", "a stop string"])
@pytest.mark.parametrize("run", ["lone bytes", "no text", "bytes spelled"])
def test_a_long_tail_that_waits_is_not_decoded_again_and_again(
    run: str, stop: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    some = fallback() if run == "bytes spelled" else tokenizer(0)
    bytes_ = ids_of("👍", 0)
    ids = {"lone bytes": bytes_[1:2], "no text": [some.all_special_ids[0]], "bytes spelled": [1]}[run] * 500
    if stop and run == "bytes spelled":
        pytest.skip("a stop string may be spelled in it, so all of the run is looked at")
    text, read, decode = TextStream(some, stop), 0, type(some).decode

    def counted(self: Any, tokens: list[int], **options: Any) -> Any:
        nonlocal read
        read += len(tokens)
        return decode(self, tokens, **options)

    wanted = some.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    monkeypatch.setattr(type(some), "decode", counted)
    for token in ids:
        text.push(token)
    text.end()
    assert text.text == wanted and read < 50 * len(ids)


def test_bytes_that_form_no_character_in_the_end_were_not_shown_as_one() -> None:
    # Byte tokens are decoded in runs: a run that is not UTF-8 is a replacement character for each byte. A special
    # token has no text and stands in the way of no run.
    spelled = fallback()
    for ids, pieces in (
        ([0, 1, 2], ["", "", "\ufffd\ufffda"]),
        ([0, 2], ["", "Ga"]),
        ([2, 0], ["a", "G"]),
        ([0, 3, 1], ["", "", "\ufffd\ufffd"]),
        ([0, 3, 3, 2, 3, 1], ["", "", "", "Ga", "", "\ufffd"]),
    ):
        text = TextStream(spelled)
        for token in ids:
            text.push(token)
        text.end()
        assert text.pieces == pieces and text.text == spelled.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return tiny_pair(0.01, tokenizer=byte_tokenizer())


METHODS = ("regular", "speculative", "bass", "amusd")


@pytest.mark.parametrize("method", METHODS)
def test_a_stop_string_ends_a_row_within_an_accepted_span(pair: ModelPair, method: str) -> None:
    options: Any = {"method": method, "max_new_tokens": 40, "eos_token_id": None, "draft_length": 5}
    prompts = [[5, 6, 7], [9, 10, 11, 12]]
    whole = generate(pair, prompts, **options).sequences
    # Two characters of the first row's text, of which the second is an accepted draft wherever drafts are.
    texts = [one.text or "" for one in whole]
    at = next(i for i in range(6, 30) if texts[0].find(texts[0][i : i + 2]) == i)
    stop = texts[0][at : at + 2]
    cut = generate(pair, prompts, stop=["never", stop], **options).sequences
    for before, after in zip(whole, cut, strict=True):
        assert before.text is not None
        found = before.text.find(stop)
        assert after.text == (before.text if found < 0 else before.text[:found])
        assert after.finish_reason == ("length" if found < 0 else "stop")
        assert before.token_ids[: len(after.token_ids)] == after.token_ids
    assert cut[0].finish_reason == "stop"
    if method == "regular":
        rounds = list(stream(pair, prompts, stop=stop, **options))
        assert sum(len(row.tokens) for round_ in rounds for row in round_.rows if row.sequence == 0) == len(
            cut[0].token_ids
        )


def test_a_race_shows_no_part_of_a_stop_string(pair: ModelPair) -> None:
    whole = generate(pair, [[5, 6, 7]], max_new_tokens=30, eos_token_id=None).sequences[0].text or ""
    stop = whole[10:14]
    wanted = whole[: whole.find(stop)]
    for snapshot in race(pair, [[5, 6, 7]], max_new_tokens=30, eos_token_id=None, stop=stop):
        for lane in snapshot["lanes"].values():
            assert wanted.startswith(lane["sequences"][0]["text"] or "")
    assert all(one["sequences"][0]["finish_reason"] == "stop" for one in snapshot["lanes"].values())
    assert all(one["sequences"][0]["text"] == wanted for one in snapshot["lanes"].values())


@pytest.mark.parametrize("stop", ["", [""], [3], 3, {"a": 1}])
def test_what_is_no_stop_string_is_refused(pair: ModelPair, stop: Any) -> None:
    with pytest.raises(RequestError, match="stop must be a non-empty string"):
        generate(pair, [3], stop=stop)
    with pytest.raises(RequestError, match="stop needs a tokenizer"):
        generate(ModelPair(pair.target), [3], stop="a")
