"""Prompts for the batches of the benches: all different, so that rows differ in acceptance."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

MIXED = [
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Explain in three sentences why the sky is blue.",
    "List five things to pack for a week in the mountains, and say why each is needed.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "What is the difference between a list and a tuple in Python? Give an example of each.",
    "Describe how bread is made, step by step.",
    "Write a polite e-mail that asks a landlord to repair a window.",
    "Who was Marie Curie, and what is she known for?",
    "Write a Python class for a bank account with deposit and withdraw methods.",
    "Give me a recipe for a simple tomato soup.",
    "Summarise the plot of Romeo and Juliet in one paragraph.",
    "How do vaccines work? Explain it to a ten-year-old.",
    "Write a haiku about the sea, then explain it.",
    "Name the planets of the solar system in order and one fact about each.",
    "Write a SQL query that finds the three customers who spent the most.",
    "What should a beginner know about growing tomatoes?",
]

# The prompts above by topic: programs, with a few more prompts, and text.
CODE = [
    *(prompt for prompt in MIXED if "Python" in prompt or "SQL" in prompt),
    "Write a Python function that checks whether a string is a palindrome, with three tests.",
    "Write a JavaScript function that groups a list of objects by a key.",
    "Write a C function that reverses a linked list in place, and explain each line.",
    "Write a Python script that counts the words of a text file and prints the ten most frequent.",
    "Write a shell script that renames all files of a folder to lower case.",
    "Implement binary search in Java, and say how long it takes.",
    "Write a Python decorator that prints how long a function took.",
    "Write the HTML and CSS of a page with two columns and a footer.",
]
CHAT = [prompt for prompt in MIXED if prompt not in CODE]

_SENTENCES = (
    "The harbour was quiet in the early morning.",
    "Three boats lay at the pier, and a cat slept on a coil of rope.",
    "When the sun rose above the hills, the fishermen came down the narrow street, carrying their nets and "
    "talking about the weather.",
    "By noon the boats were far out at sea, and the cat had moved into the shade.",
)
# The model is to repeat the sentences, in each of their 24 orders; the first is the natural one.
REPEAT_ALL = [
    "Repeat the following text word for word, and write nothing else:\n\n" + " ".join(order)
    for order in permutations(_SENTENCES)
]
REPEAT = REPEAT_ALL[0]


def mixed(count: int) -> list[str]:
    """Return `count` different prompts: the 16 of MIXED, then numbered variants of them."""
    return varied(MIXED, count)


def varied(prompts: list[str], count: int) -> list[str]:
    """Return `count` different prompts: those given, then numbered variants of them."""
    size = len(prompts)
    return [prompts[i % size] + (f" (variant {i // size + 1})" if i >= size else "") for i in range(count)]


class Question(NamedTuple):
    """A user's question: its category, for example "writing", and the user's messages, turn by turn."""

    category: str
    turns: list[str]


def questions(file: Path) -> list[Question]:
    """Return the questions of a file in the format of Spec-Bench (Xia et al., arXiv 2401.07851), in its order.

    The file has one JSON object per line, with "category" and "turns".
    """
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [Question(entry["category"], entry["turns"]) for entry in map(json.loads, lines)]
