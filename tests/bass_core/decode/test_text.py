"""Text streamed token by token equals the tokenizer's decoding of all tokens at once.

This holds for any token ids, including special tokens and bytes that form no character. A character is shown once
its last byte is there, and is never taken back. No part of a stop string is ever shown, even if the string begins
or ends within a token.
"""

from __future__ import annotations

from functools import cache
from threading import Event, current_thread, main_thread
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers import models as tokenizing
from transformers import PreTrainedTokenizerFast

from bass_core import ModelPair, RequestError, generate, race, stream
from bass_core.decode.text import TextStream
from bass_core.errors import TokenizerError
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
    """Return a tokenizer whose tokens are bytes or, with many merges, span several characters."""
    return byte_tokenizer(TEXTS * 3, merges)


def ids_of(text: str, merges: int) -> list[int]:
    return list(tokenizer(merges)(text, add_special_tokens=False)["input_ids"])


def decoded(ids: list[int], merges: int) -> str:
    return str(tokenizer(merges).decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def streamed(ids: list[int], merges: int) -> TextStream:
    """Push all ids; check that shown text stays and that every token has a piece."""
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


def test_an_incomplete_character_is_shown_at_the_end() -> None:
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
def test_any_text_is_streamed_unchanged(text: str, merges: int) -> None:
    ids = ids_of(text, merges)
    assert streamed(ids, merges).text == decoded(ids, merges) == text


@settings(max_examples=100, deadline=None, derandomize=True)
@example(ids=[0, 1, 0], merges=0)
@given(ids=st.lists(st.integers(0, 257), max_size=30), merges=st.sampled_from([0, 40]))
def test_any_tokens_are_streamed_as_decoded(ids: list[int], merges: int) -> None:
    """A random model also writes bytes that form no character."""
    assert streamed(ids, merges).text == decoded(ids, merges)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    text=st.text("ab\n#👍", max_size=20),
    stop=st.lists(st.text("ab\n#👍", min_size=1, max_size=4), min_size=1, max_size=3),
    merges=st.sampled_from([0, 40]),
)
def test_a_stop_string_ends_the_text_before_it(text: str, stop: list[str], merges: int) -> None:
    streamed_text = TextStream(tokenizer(merges), stop)
    ids = ids_of(text, merges)
    # A row ends with the token that completes a stop string.
    stopped_texts = [
        so_far
        for n in range(len(ids))
        if any(string in (so_far := decoded(ids[: n + 1], merges)) for string in stop)
    ]
    expected = (
        stopped_texts[0][: min(stopped_texts[0].find(string) for string in stop if string in stopped_texts[0])]
        if stopped_texts
        else text
    )
    for token in ids:
        streamed_text.push(token)
        assert expected.startswith(streamed_text.text)
        so_far = decoded(streamed_text.ids, merges)
        assert streamed_text.stopped == any(string in so_far for string in stop)
    streamed_text.end()
    assert streamed_text.text == expected


def byte_fallback_tokenizer() -> Any:
    """Return a tokenizer with byte tokens, as Llama 2 has."""
    words = {"<0x47>": 0, "<0xB7>": 1, "a": 2, "<unk>": 3}
    model = Tokenizer(tokenizing.BPE(words, [], unk_token="<unk>", byte_fallback=True))
    model.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>")


@pytest.mark.parametrize("stop", [(), ("ab",)], ids=["", "a stop string"])
@pytest.mark.parametrize("run", ["lone bytes", "no text", "bytes spelled"])
def test_a_long_incomplete_tail_is_not_decoded_repeatedly(
    run: str, stop: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_tokenizer = byte_fallback_tokenizer() if run == "bytes spelled" else tokenizer(0)
    bytes_ = ids_of("👍", 0)
    ids = {"lone bytes": bytes_[1:2], "no text": [run_tokenizer.all_special_ids[0]], "bytes spelled": [1]}[
        run
    ] * 500
    if stop and run == "bytes spelled":
        pytest.skip("a stop string may be spelled in the run, so all of it is decoded")
    text, num_decoded, decode = TextStream(run_tokenizer, stop), 0, type(run_tokenizer).decode

    def counting_decode(self: Any, tokens: list[int], **options: Any) -> Any:
        nonlocal num_decoded
        num_decoded += len(tokens)
        return decode(self, tokens, **options)

    expected = run_tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    monkeypatch.setattr(type(run_tokenizer), "decode", counting_decode)
    for token in ids:
        text.push(token)
    text.end()
    assert text.text == expected and num_decoded < 50 * len(ids)


def test_bytes_are_shown_only_once_their_run_is_complete() -> None:
    # Adjacent byte tokens form a run and are decoded together. If the run is not UTF-8, each of its bytes becomes
    # one replacement character. A special token has no text and does not end a run.
    spelled = byte_fallback_tokenizer()
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
def test_a_stop_string_may_end_a_row_within_its_accepted_drafts(pair: ModelPair, method: str) -> None:
    options: Any = {"method": method, "max_new_tokens": 40, "eos_token_id": None, "draft_length": 5}
    prompts = [[5, 6, 7], [9, 10, 11, 12]]
    uncut = generate(pair, prompts, **options).sequences
    # The stop string is two characters of the first row's text. In methods that draft, its second character is a
    # draft.
    texts = [sequence.text or "" for sequence in uncut]
    begin = next(i for i in range(6, 30) if texts[0].find(texts[0][i : i + 2]) == i)
    stop = texts[0][begin : begin + 2]
    cut = generate(pair, prompts, stop=["never", stop], **options).sequences
    for before, after in zip(uncut, cut, strict=True):
        assert before.text is not None
        position = before.text.find(stop)
        assert after.text == (before.text if position < 0 else before.text[:position])
        assert after.finish_reason == ("length" if position < 0 else "stop")
        assert before.token_ids[: len(after.token_ids)] == after.token_ids
    assert cut[0].finish_reason == "stop"
    if method == "regular":
        rounds = list(stream(pair, prompts, stop=stop, **options))
        assert sum(len(row.tokens) for round_ in rounds for row in round_.rows if row.sequence == 0) == len(
            cut[0].token_ids
        )


def test_a_race_shows_no_part_of_a_stop_string(pair: ModelPair) -> None:
    uncut = generate(pair, [[5, 6, 7]], max_new_tokens=30, eos_token_id=None).sequences[0].text or ""
    stop = uncut[10:14]
    expected = uncut[: uncut.find(stop)]
    for snapshot in race(pair, [[5, 6, 7]], max_new_tokens=30, eos_token_id=None, stop=stop):
        for lane in snapshot["lanes"].values():
            assert expected.startswith(lane["sequences"][0]["text"] or "")
    assert all(lane["sequences"][0]["finish_reason"] == "stop" for lane in snapshot["lanes"].values())
    assert all(lane["sequences"][0]["text"] == expected for lane in snapshot["lanes"].values())


@pytest.mark.parametrize("stop", ["", [""], [3], 3, {"a": 1}])
def test_invalid_stop_strings_are_refused(pair: ModelPair, stop: Any) -> None:
    with pytest.raises(RequestError, match="stop must be a non-empty string"):
        generate(pair, [3], stop=stop)
    with pytest.raises(RequestError, match="stop needs a tokenizer"):
        generate(ModelPair(pair.target), [3], stop="a")


class PanicException(BaseException):
    """Like pyo3's, which libraries written in Rust raise: no Exception."""


class Timeout(BaseException):
    """Like those of gevent and pytest-timeout: a request to stop."""


class Broken:
    """A tokenizer whose decode fails from the fifth call on."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.tokenizer, self.calls, self.failed = error, byte_tokenizer(), 0, Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __len__(self) -> int:
        return len(self.tokenizer)

    def decode(self, ids: list[int], **options: Any) -> str:
        self.calls += 1
        if self.calls > 4:
            self.failed.set()
            raise self.error
        return str(self.tokenizer.decode(ids, **options))


@pytest.mark.parametrize(
    "method, error",
    [("bass", KeyError(7)), *((name, PanicException("out")) for name in ("bass", "amusd", "transformers"))],
)
def test_a_tokenizer_that_fails_is_named_in_one_sentence(method: str, error: BaseException) -> None:
    pair, options = tiny_pair(tokenizer=(broken := Broken(error))), {"max_new_tokens": 8, "eos_token_id": None}
    for stop in (None, ["\0never"]):
        with pytest.raises(TokenizerError, match=f"The tokenizer's decode failed .{type(error).__name__}: "):
            generate(pair, [5, 6, 7], method=method, stop=stop, **options)
    for scheduling in ("fair", "overlap", "in_turn"):
        last = list(race(pair, [5, 6, 7], lanes=[method], scheduling=scheduling, **options))[-1]
        assert last["done"]
        assert "The tokenizer's decode failed" in str(last["lanes"][method]["error"])
    broken.failed.clear()
    steps = []

    def stopped() -> bool:
        """After the two steps up to the first token, let the lane's thread wait for a snapshot, which fails."""
        if current_thread() is not main_thread():
            steps.append(len(steps))
            assert len(steps) < 3 or broken.failed.wait(20)
        return False

    last = list(race(pair, [5, 6, 7], lanes=[method], scheduling="overlap", stopped=stopped, **options))[-1]
    assert "The tokenizer's decode failed" in str(last["lanes"][method]["error"])


@pytest.mark.parametrize("method", ["bass", "transformers"])
def test_an_error_that_asks_to_stop_is_raised(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, options = tiny_pair(tokenizer=Broken(Timeout())), {"max_new_tokens": 8, "eos_token_id": None}
    with pytest.raises(Timeout):
        generate(pair, [5, 6, 7], method=method, stop=["never"], **options)
    with pytest.raises(Timeout):
        list(race(pair, [5, 6, 7], lanes=[method], stop=["never"], **options))
    monkeypatch.setattr(Broken, "__call__", raising, raising=False)
    with pytest.raises(Timeout):
        generate(pair, "hello", max_new_tokens=2)


def raising(self: Broken, text: str) -> Any:
    raise self.error


def test_a_tokenizer_that_panics_on_a_prompt_is_named_in_one_sentence() -> None:
    class Refusing(Broken):
        def __call__(self, text: str) -> Any:
            raise self.error

    pair = tiny_pair(tokenizer=Refusing(PanicException("out of bounds")))
    with pytest.raises(RequestError, match=r"can't read this prompt: .*PanicException: out of bounds"):
        generate(pair, "hello", max_new_tokens=2)


def test_an_empty_text_is_never_decoded() -> None:
    """Strip, a decoder of the tokenizers library, panics on an empty list; Llama 2's tokenizer has one."""
    tokenizer = byte_tokenizer()
    steps = [decoders.ByteLevel(), decoders.Fuse(), decoders.Strip(" ", 0, 1)]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(steps)
    written = generate(tiny_pair(tokenizer=tokenizer), [5, 6, 7], max_new_tokens=4, eos_token_id=None)
    assert written.sequences[0].text
