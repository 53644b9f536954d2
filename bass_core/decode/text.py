"""Incremental detokenization: text that grows token by token and ends before a stop string.

The joined pieces equal the tokenizer's decoding of all tokens at once, without special tokens. Text that may still
change is held back: incomplete characters, runs of byte tokens, and a possible beginning of a stop string.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..errors import ask_tokenizer

# A token for one byte, as Llama 2's tokenizer spells it.
_BYTE = re.compile("<0x[0-9A-F]{2}>")
# An incomplete character decodes to the replacement character.
_INCOMPLETE = "\ufffd"


class TextStream:
    """The text of one sequence. After each new token, only a short tail is decoded again.

    Attributes:
        stopped: whether a stop string has appeared. The text ends before it, and further tokens add nothing.
        pieces: the text that each token added.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop, self.stopped = tokenizer, tuple(stop), False
        self.ids: list[int] = []
        self.pieces: list[str] = []
        self._shown, self._context = 0, 0
        # Whether the text ends in a run of byte tokens; the next token may still change its characters.
        self._in_bytes = False
        # The end of the text, if it may begin a stop string.
        self._held_back = ""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def push(self, token: int) -> str:
        """Add a token and return the text that it adds, or "" while that may still change."""
        self.ids.append(token)
        self.pieces.append("")
        # A token without text, e.g. a special one, does not end a run.
        self._in_bytes = self._is_byte(token) or (self._in_bytes and not self._decode([token]))
        if self._must_wait():
            return ""
        new = self._new_text()
        if self.stop and self._cut(self._held_back + new):
            return self.pieces[-1]
        if not new or new.endswith(_INCOMPLETE) or self._in_bytes:
            return ""
        self._context, self._shown = self._shown, len(self.ids)
        self._show(self._held_back + new, self._stop_prefix_len(self._held_back + new))
        return self.pieces[-1]

    def end(self) -> None:
        """Add the held-back text to the last piece, even if its last character is incomplete."""
        if self.pieces and not self.stopped:
            new = self._new_text() if self._shown < len(self.ids) else ""
            self._shown = len(self.ids)
            self._show(self._held_back + new, 0)

    def _cut(self, text: str) -> bool:
        """Show the text up to its first stop string, if it contains one; return whether the text has ended."""
        places = [place for place in (text.find(stop) for stop in self.stop) if place >= 0]
        if self.stopped or not places:
            return self.stopped
        self._show(text[: min(places)], 0)
        self.stopped = True
        return True

    def _stop_prefix_len(self, text: str) -> int:
        """Return how many of the text's last characters may begin a stop string."""
        longest = max(map(len, self.stop), default=1) - 1
        sizes = range(min(longest, len(text)), 0, -1)
        return next((size for size in sizes if any(stop.startswith(text[-size:]) for stop in self.stop)), 0)

    def _show(self, text: str, num_held_back: int) -> None:
        end = len(text) - num_held_back
        self.pieces[-1] += text[:end]
        self._held_back = text[end:]

    def _must_wait(self) -> bool:
        """Return whether the last four tokens (a character has at most four) show a long tail to be incomplete."""
        tail_len = 4 * max(map(len, self.stop), default=1) + 4
        if len(self.ids) - self._shown <= 2 * tail_len:
            return False
        if self._in_bytes:
            return not self.stop
        last = self._decode(self.ids[-tail_len:])
        return (not last or last.endswith(_INCOMPLETE)) and not any(stop in last for stop in self.stop)

    def _is_byte(self, token: int) -> bool:
        spelled = ask_tokenizer(getattr(self.tokenizer, "convert_ids_to_tokens", lambda ids: None), token)
        return isinstance(spelled, str) and _BYTE.fullmatch(spelled) is not None

    def _new_text(self) -> str:
        before = self._decode(self.ids[self._context : self._shown])
        return self._decode(self.ids[self._context :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        if not ids:  # some decoders of the tokenizers library panic on an empty list
            return ""
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(ask_tokenizer(self.tokenizer.decode, ids, **options))


class StopStrings:
    """Called with each token of a row in turn; returns whether the text now contains a string of `stop`."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._text = TextStream(tokenizer, stop)

    def __call__(self, token: int) -> bool:
        self._text.push(token)
        return self._text.stopped
