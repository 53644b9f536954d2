"""Incremental detokenization: text that grows token by token.

Contract: the pieces, joined, equal what the tokenizer decodes from all tokens at once, without special tokens. A
character is held back until all of its bytes have come.
"""

from __future__ import annotations

from typing import Any


class TextStream:
    """The text of one sequence; each new token re-decodes only a short tail."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.pieces: list[str] = []
        self._shown, self._context = 0, 0

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def push(self, token: int) -> str:
        """Add a token and return the text that it adds; "" while a character is incomplete."""
        self.ids.append(token)
        piece = self._new_text()
        # An incomplete character decodes to the replacement character.
        if piece.endswith("\ufffd"):
            piece = ""
        if piece:
            self._context, self._shown = self._shown, len(self.ids)
        self.pieces.append(piece)
        return piece

    def end(self) -> None:
        """Add the held-back text to the last piece, even if its last character is incomplete."""
        if self.pieces:
            self.pieces[-1] += self._new_text() if self._shown < len(self.ids) else ""
            self._shown = len(self.ids)

    def _new_text(self) -> str:
        before = self._decode(self.ids[self._context : self._shown])
        return self._decode(self.ids[self._context :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
