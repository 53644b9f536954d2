"""Find conversations whose prompts resemble questions of a public test set: `without_test_questions`."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from bass_core import ModelPair

from .batches import Row

# A prompt resembles a question if it has this many consecutive words of it, or all words of a shorter question.
# Numbers count as equal. With 5 words, 7 % of the prompts of prompts.py would resemble one of Spec-Bench, because
# of common phrases such as "What is the most important"; with 6 words, 0.05 % do, and with 8 words none.
WORDS = 6
# Shorter questions are too common to mean anything, for example "Can you parallelize it?".
FEWEST_WORDS = 5


def read_questions(path: Path) -> list[str]:
    """Return the turns of a file in the form of Spec-Bench's question.jsonl."""
    return [turn for line in path.read_text(encoding="utf-8").splitlines() for turn in json.loads(line)["turns"]]


class Questions:
    """Questions of a test set."""

    def __init__(self, questions: Sequence[str]) -> None:
        # For each number of words, the sequences that a prompt must not have.
        self._sequences: dict[int, set[tuple[str, ...]]] = defaultdict(set)
        for question in questions:
            words = _words(question)
            if len(words) >= FEWEST_WORDS:
                size = min(WORDS, len(words))
                self._sequences[size].update(_sequences(words, size))

    def resemble(self, prompt: str) -> bool:
        """Return whether one of the questions resembles the prompt."""
        words = _words(prompt)
        return any(
            not sequences.isdisjoint(_sequences(words, size)) for size, sequences in self._sequences.items()
        )


def without_test_questions(rows: list[Row], questions: Sequence[str], pair: ModelPair) -> list[Row]:
    """Return the rows whose prompts resemble none of the questions."""
    found = Questions(questions)
    prompts = [row.tokens[~row.scored.roll(1)].tolist() for row in rows]
    texts = pair.tokenizer.batch_decode(prompts, skip_special_tokens=True)
    return [row for row, text in zip(rows, texts, strict=True) if not found.resemble(text)]


def _words(text: str) -> list[str]:
    return ["0" if word.isdecimal() else word for word in re.findall(r"[^\W_]+", text.lower())]


def _sequences(words: list[str], size: int) -> list[tuple[str, ...]]:
    return list(zip(*(words[start:] for start in range(size)), strict=False))
