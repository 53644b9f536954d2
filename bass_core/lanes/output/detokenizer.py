"""Text that grows with its tokens.

Contract: the pieces returned by `push` and `end` joined are what the tokenizer makes of all tokens at once,
special tokens left out. A character whose bytes are not all there yet is held back.
"""

from __future__ import annotations

from typing import Any


class TextStream:
    """The text of one sequence, token by token; only a short tail is decoded again for each token."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.pieces: list[str] = []
        self._shown, self._context = 0, 0

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def push(self, token: int) -> str:
        """What this token adds; "" while a character is incomplete."""
        self.ids.append(token)
        piece = self._new_text()
        # A character that is still incomplete decodes to the replacement character.
        if piece.endswith("\ufffd"):
            piece = ""
        if piece:
            self._context, self._shown = self._shown, len(self.ids)
        self.pieces.append(piece)
        return piece

    def end(self) -> None:
        """Give the last piece what was held back, complete or not."""
        if self.pieces:
            self.pieces[-1] += self._new_text() if self._shown < len(self.ids) else ""
            self._shown = len(self.ids)

    def _new_text(self) -> str:
        before = self._decode(self.ids[self._context : self._shown])
        return self._decode(self.ids[self._context :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
