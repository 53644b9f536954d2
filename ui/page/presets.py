"""Presets that fill in the whole form with one click, each with a hint for the viewer.

A preset lists only the settings that differ from the form's neutral values. All others get the neutral value
(form.starting_values), so nothing of the previous preset remains. The text of "Long document" is read from this
version's manual when the page is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
DIFFERENT = (
    "Count from one to thirty in words.\n"
    "Name one unusual animal and say why it is unusual.\n"
    "Write a Python function that reverses a string.\n"
    "Why is the sky blue?"
)


@dataclass(frozen=True)
class Preset:
    """One preset.

    Attributes:
        look_for: a hint for the viewer, in one sentence.
        values: values by setting. Settings that are missing get the form's neutral value.
    """

    look_for: str
    values: Mapping[str, Any]


# The preset that the page starts with.
FIRST_PRESET = "Wins"


def presets() -> dict[str, Preset]:
    """Return the presets by name, in the order of their buttons."""
    by_name = {
        FIRST_PRESET: Preset(
            "The answer is in the prompt, so nearly every draft is accepted: watch BASS serve its four rows "
            "at once, and Speculative one after the other.",
            {"prompt": REWRITING, "batch_size": 4, "temperature": 0.0, "draft_length": "3"},
        ),
        "Break-even": Preset(
            "With four sampled rows, a draft costs about as much as it saves: watch how few tokens the automatic "
            "draft length drafts, so that BASS stays close to Regular's pace.",
            {"prompt": CODE, "batch_size": 4, "temperature": 0.7, "draft_length": "auto"},
        ),
        "Loses": Preset(
            "At this temperature most drafts are rejected, but Algorithm 1 keeps drafting: watch the acceptance, "
            "and how much time the rejected drafts cost eight rows.",
            # smollm2's default drafter would draft nothing when its head is unsure.
            {"prompt": UNRELATED, "batch_size": 8, "temperature": 1.5, "draft_length": "bass", "drafter": "model"},
        ),
        "Same words": Preset(
            "All lanes use the same random numbers, so they write the same text even though it is sampled: "
            "compare a row across the lanes, and read the line below it.",
            {"prompt": PROSE, "batch_size": 2, "temperature": 0.9, "verification": "coupled"},
        ),
        "Ragged": Preset(
            "Each row answers its own prompt and accepts drafts at its own pace: watch BASS's rows grow by "
            "different lengths in the same round.",
            {"prompt": DIFFERENT, "prompts": "lines", "batch_size": 4, "temperature": 0.7, "draft_length": "bass"},
        ),
        "On an H100": Preset(
            "This machine writes the texts, but the clock predicts an H100 with the paper's model sizes: watch "
            "BASS win at batch 8 too, because there a round with drafts costs little more than a plain step.",
            {"prompt": REWRITING, "batch_size": 8, "temperature": 0.7, "draft_length": "bass", "clock": "h100"},
        ),
    }
    if MANUAL.is_file():
        by_name["Long document"] = Preset(
            "Eight rows share one long prompt: watch each lane read it before the first token, and see in the "
            "cache chart how much memory copies of it would take.",
            {"prompt": long_document(), "batch_size": 8, "temperature": 0.7},
        )
    return by_name


def long_document() -> str:
    """Return the manual's first paragraphs, at most LONGEST_TEXT characters of them, and a question about them."""
    text = MANUAL.read_text(encoding="utf-8")[:LONGEST_TEXT]
    text = text[: max(text.rfind("\n\n"), text.rfind("\n- "))]
    if text.count(FENCE) % 2:  # the cut is inside a block of code: leave the block out
        text, _, _ = text.rpartition(FENCE)
    return f"{ASKED}\n\n{text.strip()}\n\n{QUESTION}"
