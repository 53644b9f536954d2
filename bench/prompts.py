"""Prompts with which the benches fill a batch: all different, so that rows differ in acceptance."""

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

_TEXT = (
    "The harbour was quiet in the early morning. Three boats lay at the pier, and a cat slept on a coil of rope. "
    "When the sun rose above the hills, the fishermen came down the narrow street, carrying their nets and "
    "talking about the weather. By noon the boats were far out at sea, and the cat had moved into the shade."
)

REPEAT = f"Repeat the following text word for word, and write nothing else:\n\n{_TEXT}"


def mixed(count: int) -> list[str]:
    """`count` different prompts: 16 of them, then numbered variants."""
    return [
        MIXED[i % len(MIXED)] + (f" (variant {i // len(MIXED) + 1})" if i >= len(MIXED) else "")
        for i in range(count)
    ]
