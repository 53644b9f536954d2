"""The examples that fill in the form with one click.

Contract: an example is a value for each setting that it changes. The long one is read from this program's own
manual when the page is made, so that it says what is true of this version.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

MANUAL = Path(__file__).resolve().parents[2] / "docs/usage.md"
# About 3,000 tokens of SmolLM2's, well within its context of 8,192.
LONGEST_TEXT = 11_000
ASKED = "Read this manual and answer the question below it."
QUESTION = "Question: What does the page show of every token, and what of every lane? Answer in three sentences."


def examples() -> dict[str, dict[str, Any]]:
    """The examples by name: their values by setting."""
    return {
        "Code": {"prompt": CODE},
        "Prose": {"prompt": "Write a short story about a lighthouse keeper who finds a message in a bottle."},
        "Question": {"prompt": "Why is the sky blue? Explain it to a ten-year-old."},
        "Rewriting": {
            "prompt": "Repeat the following text word for word:\n\n"
            "The tide came in slowly over the flat sand. The children ran ahead of the tide and the dog ran after "
            "the children, and when the tide turned, the children turned, and the dog turned with them."
        },
        # At a high temperature the draft can't predict this text.
        "Losing": {"prompt": "List forty unrelated words, each from another language.", "temperature": 1.5},
        "Long document": {"prompt": long_document(), "batch_size": 8, "max_new_tokens": 64},
    }


CODE = "Write a Python function that returns the n-th Fibonacci number, with a docstring and two examples."


def long_document() -> str:
    """The manual's first sections, as many as LONGEST_TEXT characters hold, and a question on them."""
    first, *sections = MANUAL.read_text(encoding="utf-8").split("\n## ")
    text = first
    for section in sections:
        if len(text) + len(section) > LONGEST_TEXT:
            break
        text += f"\n## {section}"
    return f"{ASKED}\n\n{text.strip()}\n\n{QUESTION}"
