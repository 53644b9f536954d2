"""The presets that fill in the whole form with one click, each with a sentence of what to look for.

Contract: a preset names what differs from the form's neutral values, which all other settings get
(form.starting), so that nothing of the former preset stays. The long one is read from this program's manual when
the page is made, so that it says what is true of this version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANUAL = Path(__file__).resolve().parents[2] / "docs/usage.md"
# About 3,000 tokens of SmolLM2's, well within its context of 8,192.
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
# At a high temperature the draft can't predict this text.
UNRELATED = "List forty unrelated words, each from another language."
DIFFERENT = (
    "Count from one to thirty in words.\n"
    "Name one unusual animal and say why it is unusual.\n"
    "Write a Python function that reverses a string.\n"
    "Why is the sky blue?"
)


@dataclass(frozen=True)
class Preset:
    """look_for: one sentence. values: by setting; what is not named has the form's neutral value."""

    look_for: str
    values: Mapping[str, Any]


# The preset that the page starts with.
FIRST = "Wins"


def presets() -> dict[str, Preset]:
    """The presets by name, in the order of their buttons."""
    made = {
        FIRST: Preset(
            "The answer stands in the prompt, so nearly every draft is accepted: watch BASS serve its four rows "
            "at once, and Speculative one after another.",
            {"prompt": REWRITING, "batch_size": 4, "temperature": 0.0, "draft_length": "3"},
        ),
        "Break-even": Preset(
            "With four sampled rows a draft costs about what it brings: watch how few tokens the automatic draft "
            "length drafts, so that BASS stays near Regular's pace.",
            {"prompt": CODE, "batch_size": 4, "temperature": 0.7, "draft_length": "auto"},
        ),
        "Loses": Preset(
            "At this temperature most drafts are rejected, and Algorithm 1 drafts on all the same: watch the "
            "acceptance, and the time that the rejected drafts cost eight rows.",
            # smollm2's own drafter would keep silent where its head is unsure.
            {"prompt": UNRELATED, "batch_size": 8, "temperature": 1.5, "draft_length": "bass", "drafter": "model"},
        ),
        "Same words": Preset(
            "All lanes use the same random numbers, so they write the same text although it is sampled: compare "
            "the words of a row across the lanes, and the line below it.",
            {"prompt": PROSE, "batch_size": 2, "temperature": 0.9, "verification": "coupled"},
        ),
        "Ragged": Preset(
            "Each row answers a prompt of its own and accepts at its own pace: watch BASS's rows grow by "
            "different lengths in the same round.",
            {"prompt": DIFFERENT, "prompts": "lines", "batch_size": 4, "temperature": 0.7, "draft_length": "bass"},
        ),
        "On an H100": Preset(
            "This machine writes the texts, and the clock is that of a predicted H100 with the paper's model "
            "sizes: watch BASS win at batch 8 too, because there a round with drafts costs little more than a "
            "plain step.",
            {"prompt": REWRITING, "batch_size": 8, "temperature": 0.7, "draft_length": "bass", "clock": "h100"},
        ),
    }
    if MANUAL.is_file():
        made["Long document"] = Preset(
            "Eight rows share one long prompt: watch each lane read it before the first token, and what the cache "
            "chart says copies of it would take.",
            {"prompt": long_document(), "batch_size": 8, "temperature": 0.7},
        )
    return made


def long_document() -> str:
    """The manual's first paragraphs and items, as many as LONGEST_TEXT characters hold, and a question on them."""
    text = MANUAL.read_text(encoding="utf-8")[:LONGEST_TEXT]
    text = text[: max(text.rfind("\n\n"), text.rfind("\n- "))]
    if text.count(FENCE) % 2:  # the cut is inside a block of code: leave the block out
        text, _, _ = text.rpartition(FENCE)
    return f"{ASKED}\n\n{text.strip()}\n\n{QUESTION}"
