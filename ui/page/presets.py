"""Presets that fill in the whole form with one click, each with a hint for the viewer.

A preset lists only the settings that differ from the form's neutral values. All others get the neutral value
(form.starting_values), so nothing of the previous preset remains. The text of "A long document" is read from this
version's manual when the page is built. ui/page/first.py chooses the first race.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

MANUAL = Path(__file__).resolve().parents[2] / "docs/usage.md"
# The maximum length in characters. It is about 3,000 tokens for SmolLM2, well within its context of 8,192.
LONGEST_TEXT = 11_000
FENCE = "```"
ASKED = "Read this manual and answer the question below it."
QUESTION = "Question: What does the page show of every token, and what of every lane? Answer in three sentences."

CODE = "Write a Python function that returns the n-th Fibonacci number, with a docstring and two examples."
PROSE = "Write a short story about a lighthouse keeper who finds a message in a bottle."
REWRITING = (
    "Repeat the following text word for word:\n\n"
    "The tide came in slowly over the flat sand. The children ran ahead of the tide and the dog ran after "
    "the children, and when the tide turned, the children turned, and the dog turned with them."
)
# At a high temperature, the draft model can't predict the answer.
UNRELATED = "List forty unrelated words, each from another language."
FOUR_QUESTIONS = (
    "How do I reverse a string in Python?\n"
    "How do I make a simple tomato soup?\n"
    "What is a prime number? Name the first ten.\n"
    "What are the seven days of the week, and where do their names come from?"
)

FOUR_PEOPLE = (
    "Describe a nurse from Lisbon.\n"
    "Describe a retired sailor from Bergen.\n"
    "Describe a young baker from Lyon.\n"
    "Describe a chess champion from Chennai."
)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 18, "maximum": 99},
        "city": {"type": "string", "maxLength": 24},
        "profession": {"type": "string", "maxLength": 40},
        "hobbies": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "age", "city", "profession", "hobbies"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Preset:
    """One preset. Settings that are missing in `values` get the form's neutral value."""

    look_for: str
    values: Mapping[str, Any]
    more: bool = False


REPEAT, QUESTIONS, H100 = "Repeat a text", "Four questions", "On an H100"


@dataclass(frozen=True)
class First:
    """The first race: the preset that the page starts with.

    Attributes:
        rows: the preset's batch size on this machine.
        said: a sentence about the race on this machine, or "".
    """

    name: str = REPEAT
    rows: int = 4
    said: str = ""


def presets(first: First | None = None) -> dict[str, Preset]:
    """Return the presets by name, in the order of their buttons. The `first` one has its rows and its sentence."""
    by_name = _presets()
    if first is not None:
        preset = by_name[first.name]
        fewer = preset.values.get("prompts") == "lines" and first.rows < preset.values["batch_size"]
        look_for = first.said if fewer else " ".join(filter(None, [preset.look_for, first.said]))
        values = {**preset.values, "batch_size": first.rows}
        by_name[first.name] = replace(preset, look_for=look_for, values=values)
    return by_name


def _presets() -> dict[str, Preset]:
    by_name = {
        REPEAT: Preset(
            "The answer is in the prompt, so nearly every draft is accepted.",
            {"prompt": REWRITING, "batch_size": 4, "temperature": 0.0, "draft_length": "3"},
        ),
        "Write code": Preset(
            "Sampled code is harder to guess: the automatic draft length drafts only where that pays.",
            {"prompt": CODE, "batch_size": 4, "temperature": 0.7, "draft_length": "auto"},
        ),
        QUESTIONS: Preset(
            "Each row answers its own question, at its own pace.",
            {
                "prompt": FOUR_QUESTIONS,
                "prompts": "lines",
                "batch_size": 4,
                "temperature": 0.0,
                "draft_length": "auto",
            },
        ),
    }
    if MANUAL.is_file():
        by_name["A long document"] = Preset(
            "Eight rows share one long prompt, which each lane reads once.",
            {"prompt": long_document(), "batch_size": 8, "temperature": 0.7},
        )
    return by_name | {
        "Unrelated words": Preset(
            "At this temperature most drafts are rejected, but Algorithm 1 keeps drafting.",
            # smollm2's default drafter would draft nothing when its head is unsure.
            {"prompt": UNRELATED, "batch_size": 8, "temperature": 1.5, "draft_length": "bass", "drafter": "model"},
            more=True,
        ),
        "Fill in a form": Preset(
            "The schema makes keys and quotes certain: they are drafted without a model, and checked like others.",
            {
                "prompt": FOUR_PEOPLE,
                "prompts": "lines",
                "batch_size": 4,
                "max_new_tokens": 96,
                "temperature": 0.0,
                "json_schema": json.dumps(PERSON, indent=1),
            },
            more=True,
        ),
        "Tell a story": Preset(
            "All lanes use the same random numbers, so they write the same sampled text.",
            {"prompt": PROSE, "batch_size": 2, "temperature": 0.9, "verification": "coupled"},
            more=True,
        ),
        H100: Preset(
            "This machine writes the texts, and the clock predicts an H100 with the paper's model sizes.",
            {"prompt": REWRITING, "batch_size": 8, "temperature": 0.7, "draft_length": "bass", "clock": "h100"},
            more=True,
        ),
    }


def long_document() -> str:
    """Return the manual's first paragraphs, at most LONGEST_TEXT characters of them, and a question about them."""
    text = MANUAL.read_text(encoding="utf-8")[:LONGEST_TEXT]
    text = text[: max(text.rfind("\n\n"), text.rfind("\n- "))]
    if text.count(FENCE) % 2:  # the cut is inside a block of code: leave the block out
        text, _, _ = text.rpartition(FENCE)
    return f"{ASKED}\n\n{text.strip()}\n\n{QUESTION}"
