"""Any number of conversations for the corpus, of many kinds.

Contract: `conversations(seed, count, words)` is a pure function of its arguments and the installed Python library.
No prompt is in the evaluation set, and none is taken from a public workload.
"""

from __future__ import annotations

import inspect
import json
import random
import warnings
from collections.abc import Sequence
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
    "own": 20, "code": 5, "docstring": 3, "instruction": 11, "question": 10, "story": 5, "list": 3, "rewriting": 4,
    "sum": 6, "fact": 10, "role": 4, "puzzle": 3, "translation": 8, "about": 11, "passages": 7,
}  # fmt: skip
# Kinds that quote long texts, and how many parts these have at least and at most.
_QUOTING = {"about": (1, 5), "passages": (3, 5)}
# How likely another turn is, how many there are at most, and how many of the later ones the target makes up.
_AGAIN, _TURNS, _OWN_LATER = 0.45, 7, 0.3
# A part of a text of ours: sentences of news, of German news, characters of Python's manual.
_NEWS, _GERMAN, _MANUAL = (3, 9), (1, 2), 600
# How many topics are ours, and how many rare names are words.
_OUR_TOPICS, _NAMED_BY_WORDS = 0.3, 0.5


@dataclass(frozen=True)
class Turn:
    """What a user says. text None: the target makes it up.

    told: up to so many answers that the target gave in other conversations replace "{text}", and the prompt of one
    of them replaces "{question}".
    """

    text: str | None
    told: int = 0


def conversations(seed: int, count: int, words: Sequence[str] = ()) -> list[list[Turn]]:
    """The turns of `count` conversations; other seeds give others. No prompt that is written out begins two.

    words: of the target's vocabulary. They become topics and names, so that its answers are about everything.
    Conversations that quote the target's own answers come last, so that there are answers to quote.
    """
    rng = random.Random(seed)
    make = _Maker(rng, words)
    found: list[list[Turn]] = []
    taken = {prompt["text"] for prompt in evaluation_prompts()}
    while len(found) < count:
        (kind,) = rng.choices(list(_KINDS), list(_KINDS.values()))
        first = (
            Turn(None) if kind == "own" else make.quoting(kind) if kind in _QUOTING else Turn(make.prompt(kind))
        )
        if first.text in taken:
            continue
        if first.text is not None and not first.told:
            taken.add(first.text)
        turns = [first]
        while len(turns) < _TURNS and rng.random() < _AGAIN:
            turns.append(Turn(None if rng.random() < _OWN_LATER else make.prompt("next")))
        found.append(turns)
    return sorted(found, key=lambda turns: turns[0].told > 0)


def evaluation_prompts() -> list[dict[str, str]]:
    """The committed set: 64 prompts {"kind", "text"}, 16 each of code, prose, question and rewriting."""
    loaded: list[dict[str, str]] = json.loads(EVALUATION.read_text(encoding="utf-8"))
    return loaded


@dataclass(frozen=True)
class _Maker:
    """Makes prompts; arguments as for `conversations`."""

    rng: random.Random
    words: Sequence[str]

    def pick(self, words: str) -> str:
        chosen: str = self.rng.choice(WORDS[words])
        return chosen

    def topic(self) -> str:
        """One of ours, or a word or two of the target's vocabulary."""
        if not self.words or self.rng.random() < _OUR_TOPICS:
            return self.pick("topics")
        first, second = self.rng.choice(self.words), self.rng.choice(self.words)
        return self.rng.choice([first, first, f"{first} {second}", f"{first} and {second}"])

    def name(self) -> str:
        """A name that hardly anybody has, or a word as a name."""
        if self.words and self.rng.random() < _NAMED_BY_WORDS:
            return self.rng.choice(self.words).capitalize()
        return "".join(self.rng.choices(WORDS["syllables"], k=self.rng.randint(2, 3))).capitalize()

    def quoting(self, kind: str) -> Turn:
        """A prompt about a long text: of the target's own answers, of made-up news, or of Python's manual."""
        rng, asked = self.rng, self.prompt(kind)
        parts, source = rng.randint(*_QUOTING[kind]), rng.choice(["answers", "answers", "news", "manual"])
        if source == "answers":
            return Turn(asked, parts)
        texts = [self.news("news", _NEWS) if source == "news" else self.manual() for _ in range(parts)]
        words = [word.strip(".,;:()[]\"'") for word in rng.choice(texts).split()]
        long = [word for word in words if len(word) > 5] or words
        question = f"What does the text say about {rng.choice(long)}?"
        return Turn(asked.replace("{question}", question).replace("{text}", "\n\n".join(texts)))

    def news(self, templates: str, sentences: tuple[int, int]) -> str:
        """A paragraph about people and places with rare names; `sentences`: how many at least and at most."""
        rng, pick, german = self.rng, self.pick, templates == "german_news"
        names = {
            "person": f"{pick('names')} {self.name()}",
            "second": f"{self.name()} {self.name()}",
            "third": self.name(),
            "city": self.name(),
            "town": self.name() if german else rng.choice([self.name(), pick("lands")]),
            "company": f"{self.name()} {rng.choice(['Group', 'Ltd', 'Airways', 'Foods', 'Bank', 'Energy'])}",
        }
        days = "german_days" if german else "days"
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
                "topic": self.topic(),
            }
            text.append(sentence.format(**names, **facts))
        return " ".join(text)

    def manual(self) -> str:
        """A passage of the Python manual that comes with the interpreter."""
        text = self.rng.choice(sorted(topics.items()))[1]
        start = self.rng.randrange(max(1, len(text) - _MANUAL))
        return text[start : start + _MANUAL].partition(" ")[2].rpartition(" ")[0]

    def prompt(self, kind: str) -> str:
        """One of this kind; where it quotes, "{text}" and "{question}" are left to be filled."""
        rng, pick = self.rng, self.pick
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
            about = (
                f"{pick('people').capitalize()} lived {pick('places')} and knew everything about {self.topic()}."
            )
            plain = " ".join(rng.sample(WORDS["sentences"], rng.randint(2, 5)))
            text = rng.choice([doc, plain, plain, f"{about} {plain}"])
            return rng.choice(WORDS["rewrites"]).format(text=text)
        friends = rng.sample(WORDS["names"], 3)
        german = " ".join(rng.sample(WORDS["german"], rng.randint(1, 3)))
        words = {
            "name": friends[0],
            "friend": friends[1],
            "third": friends[2],
            "rare": self.name(),
            "other_rare": self.name(),
            "goods": pick("goods"),
            "other_goods": pick("goods"),
            "a": rng.randint(20, 200),
            "b": rng.randint(4, 40),
            "c": rng.randint(2, 12),
            "d": rng.randint(2, 9),
            "thing": pick("things"),
            "land": pick("lands"),
            "role": pick("roles"),
            "german": rng.choice([german, self.news("german_news", _GERMAN)]),
            "foreign": pick("foreign"),
            "sentence": pick("sentences"),
            "text": "{text}",
            "question": "{question}",
            "topic": self.topic(),
            "other": self.topic(),
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
