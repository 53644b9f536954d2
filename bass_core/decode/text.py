"""Incremental detokenization: text that grows token by token, and ends before a stop string.

Contract: the pieces, joined, equal what the tokenizer decodes from all tokens at once, without special tokens, up
to the first stop string. What may still change is held back until it can't: a character until all of its bytes
have come, a run of byte tokens until it ends, and the beginning of a stop string until it is none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

# A token that stands for one byte, as Llama 2's tokenizer spells it.
_BYTE = re.compile("<0x[0-9A-F]{2}>")
# An incomplete character decodes to the replacement character.
_INCOMPLETE = "\ufffd"


class TextStream:
    """The text of one sequence; each new token re-decodes only a short tail.

    stopped: whether one of the strings `stop` has come. The text ends before it, and further tokens add nothing.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop, self.stopped = tokenizer, tuple(stop), False
        self.ids: list[int] = []
        self.pieces: list[str] = []
        self._shown, self._context = 0, 0
        # Whether the text ends in a run of byte tokens; the next token may still change its characters.
        self._in_bytes = False
        # Text that has come and may begin a stop string.
        self._held = ""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def push(self, token: int) -> str:
        """Add a token and return the text that it adds; "" while that may still change."""
        self.ids.append(token)
        self.pieces.append("")
        # A token without text, such as a special one, ends no run.
        self._in_bytes = self._is_byte(token) or (self._in_bytes and not self._decode([token]))
        if self._surely_waits():
            return ""
        new = self._new_text()
        if self.stop and self._cut(self._held + new):
            return self.pieces[-1]
        if not new or new.endswith(_INCOMPLETE) or self._in_bytes:
            return ""
        self._context, self._shown = self._shown, len(self.ids)
        self._show(self._held + new, self._begun(self._held + new))
        return self.pieces[-1]

    def end(self) -> None:
        """Add the held-back text to the last piece, even if its last character is incomplete."""
        if self.pieces and not self.stopped:
            new = self._new_text() if self._shown < len(self.ids) else ""
            self._shown = len(self.ids)
            self._show(self._held + new, 0)

    def _cut(self, text: str) -> bool:
        """Show the text up to the first stop string that it holds, if it holds one, and nothing from then on."""
        found = [place for place in (text.find(one) for one in self.stop) if place >= 0]
        if self.stopped or not found:
            return self.stopped
        self._show(text[: min(found)], 0)
        self.stopped = True
        return True

    def _begun(self, text: str) -> int:
        """How many of the text's last characters may begin a stop string."""
        longest = max(map(len, self.stop), default=1) - 1
        sizes = range(min(longest, len(text)), 0, -1)
        return next((size for size in sizes if any(one.startswith(text[-size:]) for one in self.stop)), 0)

    def _show(self, text: str, held: int) -> None:
        end = len(text) - held
        self.pieces[-1] += text[:end]
        self._held = text[end:]

    def _surely_waits(self) -> bool:
        """Whether a long tail is surely incomplete, judged by its last tokens.

        So it isn't decoded for every token. A character has at most four bytes, and so at most four tokens.
        """
        few = 4 * max(map(len, self.stop), default=1) + 4
        if len(self.ids) - self._shown <= 2 * few:
            return False
        if self._in_bytes:
            return not self.stop
        last = self._decode(self.ids[-few:])
        return (not last or last.endswith(_INCOMPLETE)) and not any(one in last for one in self.stop)

    def _is_byte(self, token: int) -> bool:
        spelled = getattr(self.tokenizer, "convert_ids_to_tokens", lambda ids: None)(token)
        return isinstance(spelled, str) and _BYTE.fullmatch(spelled) is not None

    def _new_text(self) -> str:
        before = self._decode(self.ids[self._context : self._shown])
        return self._decode(self.ids[self._context :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class StopStrings:
    """Called with each token of a row in turn: whether its text now holds one of the strings `stop`."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._text = TextStream(tokenizer, stop)

    def __call__(self, token: int) -> bool:
        self._text.push(token)
        return self._text.stopped
