"""Any number of conversations for the corpus, of many kinds.

Contract: `conversations(seed, count)` is a pure function of its arguments and the installed Python library. None
of its prompts is in the evaluation set, which has topics of its own, and none is taken from a public workload.
"""

from __future__ import annotations

import inspect
import json
import random
import warnings
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

EVALUATION = Path(__file__).parent / "evaluation_prompts.json"

# The prompt templates, the words that fill them, and the library modules whose docstrings are asked about.
WORDS: dict[str, Any] = json.loads((Path(__file__).parent / "words.json").read_text(encoding="utf-8"))
_LANGUAGES = ["Python", "Python", "Python", "Python", "JavaScript", "Java", "C", "C++", "Go", "Bash"]
# The kinds of first turns and their weights. "own": the target makes it up.
_KINDS = {
    "own": 26, "code": 5, "docstring": 3, "instruction": 5, "question": 5, "story": 3, "list": 3, "rewriting": 4,
    "sum": 7, "fact": 8, "role": 3, "puzzle": 3, "translation": 9, "about": 11, "passages": 6,
}  # fmt: skip
# Kinds that quote long texts, and how many parts these have at least and at most.
_QUOTING = {"about": (1, 5), "passages": (3, 5)}
# How likely another turn is, how many there are at most, and how many of the later ones the target makes up.
_AGAIN, _TURNS, _OWN_LATER = 0.45, 7, 0.3
# A part of a text of ours: sentences of news, of German news, characters of Python's manual.
_NEWS, _GERMAN, _MANUAL = (3, 9), (1, 2), 600


@dataclass(frozen=True)
class Turn:
    """What a user says. text None: the target makes it up.

    told: up to so many answers that the target gave in other conversations replace "{text}", and the prompt of one
    of them replaces "{question}".
    """

    text: str | None
    told: int = 0


def conversations(seed: int, count: int) -> list[list[Turn]]:
    """The turns of `count` conversations; other seeds give others. No prompt that is written out begins two.

    Those that quote the target's own answers come last, so that there are answers to quote.
    """
    rng = random.Random(seed)
    found: list[list[Turn]] = []
    taken = {prompt["text"] for prompt in evaluation_prompts()}
    while len(found) < count:
        (kind,) = rng.choices(list(_KINDS), list(_KINDS.values()))
        first = (
            Turn(None) if kind == "own" else _quoting(kind, rng) if kind in _QUOTING else Turn(_make(kind, rng))
        )
        if first.text in taken:
            continue
        if first.text is not None and not first.told:
            taken.add(first.text)
        turns = [first]
        while len(turns) < _TURNS and rng.random() < _AGAIN:
            turns.append(Turn(None if rng.random() < _OWN_LATER else _make("next", rng)))
        found.append(turns)
    return sorted(found, key=lambda turns: turns[0].told > 0)


def evaluation_prompts() -> list[dict[str, str]]:
    """The committed set: 64 prompts {"kind", "text"}, 16 each of code, prose, question and rewriting."""
    loaded: list[dict[str, str]] = json.loads(EVALUATION.read_text(encoding="utf-8"))
    return loaded


def _quoting(kind: str, rng: random.Random) -> Turn:
    """A prompt about a long text: of the target's own answers, of made-up news, or of Python's manual."""
    asked, parts = _make(kind, rng), rng.randint(*_QUOTING[kind])
    source = rng.choice(["answers", "news", "news", "manual"])
    if source == "answers":
        return Turn(asked, parts)
    texts = [_news(rng, "news", _NEWS) if source == "news" else _manual(rng) for _ in range(parts)]
    words = [word.strip(".,;:()[]\"'") for word in rng.choice(texts).split()]
    question = f"What does the text say about {rng.choice([word for word in words if len(word) > 5] or words)}?"
    return Turn(asked.replace("{question}", question).replace("{text}", "\n\n".join(texts)))


def _name(rng: random.Random) -> str:
    """A name that hardly anybody has."""
    return "".join(rng.choices(WORDS["syllables"], k=rng.randint(2, 3))).capitalize()


def _news(rng: random.Random, templates: str, sentences: tuple[int, int]) -> str:
    """A paragraph about people and places with rare names; `sentences`: how many at least and at most."""

    def pick(words: str) -> str:
        return rng.choice(WORDS[words])

    names = {
        "person": f"{pick('names')} {_name(rng)}",
        "second": f"{_name(rng)} {_name(rng)}",
        "third": _name(rng),
        "city": _name(rng),
        "town": rng.choice([_name(rng), pick("lands")]),
        "company": f"{_name(rng)} {rng.choice(['Group', 'Ltd', 'Airways', 'Foods', 'Bank', 'Energy'])}",
    }
    days = "german_days" if templates == "german_news" else "days"
    text = []
    for sentence in rng.sample(WORDS[templates], rng.randint(*sentences)):
        facts = {
            "n": rng.randint(19, 92),
            "m": rng.randint(11, 480),
            "k": rng.randint(2, 12),
            "year": rng.randint(1890, 2024),
            "day": pick(days),
            "month": rng.choice(["January", "March", "April", "June", "August", "September", "November"]),
            "street": pick("streets"),
            "pet": pick("pets"),
            "topic": pick("topics"),
        }
        text.append(sentence.format(**names, **facts))
    return " ".join(text)


def _manual(rng: random.Random) -> str:
    """A passage of the Python manual that comes with the interpreter."""
    text = rng.choice(sorted(topics.items()))[1]
    start = rng.randrange(max(1, len(text) - _MANUAL))
    return text[start : start + _MANUAL].partition(" ")[2].rpartition(" ")[0]


def _make(kind: str, rng: random.Random) -> str:
    def pick(words: str) -> str:
        return rng.choice(WORDS[words])

    if kind == "docstring":
        name, signature, doc = rng.choice(_docstrings())
        style = rng.randrange(3)
        if style == 0:
            return f'Complete this Python function:\n\ndef {name}{signature}:\n    """{doc}"""\n'
        if style == 1:
            return f"Write a Python function `{name}` that does the following: {doc}"
        return f"Explain what this Python function does and show how to use it.\n\n{name}{signature}: {doc}"
    if kind == "rewriting":
        _, _, doc = rng.choice(_docstrings())
        about = f"{pick('people').capitalize()} lived {pick('places')} and knew everything about {pick('topics')}."
        plain = " ".join(rng.sample(WORDS["sentences"], rng.randint(2, 5)))
        text = rng.choice([doc, plain, plain, f"{about} {plain}"])
        return rng.choice(WORDS["rewrites"]).format(text=text)
    friends = rng.sample(WORDS["names"], 3)
    german = " ".join(rng.sample(WORDS["german"], rng.randint(1, 3)))
    words = {
        "name": friends[0],
        "friend": friends[1],
        "third": friends[2],
        "goods": pick("goods"),
        "other_goods": pick("goods"),
        "a": rng.randint(20, 200),
        "b": rng.randint(4, 40),
        "c": rng.randint(2, 12),
        "d": rng.randint(2, 9),
        "thing": pick("things"),
        "land": pick("lands"),
        "role": pick("roles"),
        "german": rng.choice([german, _news(rng, "german_news", _GERMAN)]),
        "foreign": pick("foreign"),
        "sentence": pick("sentences"),
        "text": "{text}",
        "question": "{question}",
        "topic": pick("topics"),
        "other": pick("topics"),
        "person": pick("people"),
        "stranger": pick("people"),
        "place": pick("places"),
        "code": pick("code"),
        "language": rng.choice(_LANGUAGES),
    }
    return rng.choice(WORDS["templates"][kind]).format(**words)


@cache
def _docstrings() -> list[tuple[str, str, str]]:
    """(name, signature, first paragraph of the docstring) of the public functions of the Python library."""
    found: dict[str, tuple[str, str, str]] = {}
    for module_name in WORDS["modules"]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = import_module(module_name)
        except ImportError:
            continue
        for name, member in sorted(vars(module).items()):
            if name.startswith("_") or not callable(member):
                continue
            doc = (inspect.getdoc(member) or "").split("\n\n")[0].replace("\n", " ").strip()
            if not 40 <= len(doc) <= 400:
                continue
            try:
                signature = str(inspect.signature(member))
            except (ValueError, TypeError):
                signature = "(...)"
            # Some defaults are objects, which print their addresses.
            if len(signature) < 120 and " at 0x" not in signature:
                found.setdefault(name, (name, signature, doc))
    return list(found.values())
