"""Conversations for the corpus, of many kinds and in any number. Call `conversations`.

The result depends only on the arguments and the installed Python library. No prompt is in the evaluation set, and
none comes from a public workload.
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

# The prompt templates, the words to fill them, and the library modules whose docstrings appear in prompts.
WORDS: dict[str, Any] = json.loads((Path(__file__).parent / "words.json").read_text(encoding="utf-8"))
_LANGUAGES = ["Python", "Python", "Python", "Python", "JavaScript", "Java", "C", "C++", "Go", "Bash"]
# The kinds of first turns and their weights; the target invents turns of kind "own".
_KINDS = {
    "own": 20, "code": 5, "docstring": 3, "instruction": 11, "question": 10, "story": 5, "list": 3, "rewriting": 4,
    "sum": 6, "fact": 10, "role": 4, "puzzle": 3, "translation": 8, "about": 11, "passages": 7,
}  # fmt: skip
# Kinds that quote long texts; for each kind, the least and greatest number of parts of such a text.
_QUOTING = {"about": (1, 5), "passages": (3, 5)}
# The probability that another turn follows, the maximum number of turns, and the share of turns after the first
# that the target invents.
_AGAIN, _TURNS, _OWN_LATER = 0.45, 7, 0.3
# The length of a part of a text: sentences of news and of German news, characters of Python's manual.
_NEWS_SENTENCES, _GERMAN_SENTENCES, _MANUAL_CHARS = (3, 9), (1, 2), 600
# The share of topics that come from words.json, and the share of rare names that are words of the target's
# vocabulary.
_OUR_TOPICS, _NAMED_BY_WORDS = 0.3, 0.5


@dataclass(frozen=True)
class Turn:
    """A user's turn.

    Attributes:
        text: the user's text; None if the target is to invent it.
        quotes: up to this many of the target's answers in other conversations replace "{text}", and the prompt of
            one of them replaces "{question}".
    """

    text: str | None
    quotes: int = 0


def conversations(seed: int, count: int, words: Sequence[str] = ()) -> list[list[Turn]]:
    """Return the turns of `count` conversations. No two begin with the same written prompt.

    Conversations that quote the target's answers come last, so that there are answers to quote.

    Args:
        seed: other seeds give other conversations.
        count: the number of conversations.
        words: words of the target's vocabulary. They become topics and names, to vary the subjects of its answers.
    """
    rng = random.Random(seed)
    make = _Maker(rng, words)
    chosen: list[list[Turn]] = []
    taken = {prompt["text"] for prompt in evaluation_prompts()}
    while len(chosen) < count:
        (kind,) = rng.choices(list(_KINDS), list(_KINDS.values()))
        first = (
            Turn(None) if kind == "own" else make.quoting(kind) if kind in _QUOTING else Turn(make.prompt(kind))
        )
        if first.text in taken:
            continue
        if first.text is not None and not first.quotes:
            taken.add(first.text)
        turns = [first]
        while len(turns) < _TURNS and rng.random() < _AGAIN:
            turns.append(Turn(None if rng.random() < _OWN_LATER else make.prompt("next")))
        chosen.append(turns)
    return sorted(chosen, key=lambda turns: turns[0].quotes > 0)


def evaluation_prompts() -> list[dict[str, str]]:
    """Return the committed set: 64 prompts {"kind", "text"}, 16 each of code, prose, question and rewriting."""
    loaded: list[dict[str, str]] = json.loads(EVALUATION.read_text(encoding="utf-8"))
    return loaded


@dataclass(frozen=True)
class _Maker:
    """Makes prompts. The arguments are those of `conversations`."""

    rng: random.Random
    words: Sequence[str]

    def pick(self, words: str) -> str:
        chosen: str = self.rng.choice(WORDS[words])
        return chosen

    def topic(self) -> str:
        """Return a topic from words.json, or one or two words of the target's vocabulary."""
        if not self.words or self.rng.random() < _OUR_TOPICS:
            return self.pick("topics")
        first, second = self.rng.choice(self.words), self.rng.choice(self.words)
        return self.rng.choice([first, first, f"{first} {second}", f"{first} and {second}"])

    def name(self) -> str:
        """Return an invented, rare name, or a word as a name."""
        if self.words and self.rng.random() < _NAMED_BY_WORDS:
            return self.rng.choice(self.words).capitalize()
        return "".join(self.rng.choices(WORDS["syllables"], k=self.rng.randint(2, 3))).capitalize()

    def quoting(self, kind: str) -> Turn:
        """Return a prompt about a long text: the target's own answers, invented news, or Python's manual."""
        rng, template = self.rng, self.prompt(kind)
        parts, source = rng.randint(*_QUOTING[kind]), rng.choice(["answers", "answers", "news", "manual"])
        if source == "answers":
            return Turn(template, parts)
        texts = [self.news("news", _NEWS_SENTENCES) if source == "news" else self.manual() for _ in range(parts)]
        words = [word.strip(".,;:()[]\"'") for word in rng.choice(texts).split()]
        long = [word for word in words if len(word) > 5] or words
        question = f"What does the text say about {rng.choice(long)}?"
        return Turn(template.replace("{question}", question).replace("{text}", "\n\n".join(texts)))

    def news(self, templates: str, sentences: tuple[int, int]) -> str:
        """Return a paragraph about people and places with rare names.

        Args:
            templates: the key of its templates in words.json.
            sentences: the least and greatest number of sentences.
        """
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
        """Return a passage of the Python manual that comes with the interpreter."""
        text = self.rng.choice(sorted(topics.items()))[1]
        start = self.rng.randrange(max(1, len(text) - _MANUAL_CHARS))
        return text[start : start + _MANUAL_CHARS].partition(" ")[2].rpartition(" ")[0]

    def prompt(self, kind: str) -> str:
        """Return a prompt of this kind; in quoting kinds, "{text}" and "{question}" remain to be filled."""
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
            "german": rng.choice([german, self.news("german_news", _GERMAN_SENTENCES)]),
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
    """Return (name, signature, first paragraph of the docstring) of public functions of the Python library."""
    by_name: dict[str, tuple[str, str, str]] = {}
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
            # Leave out defaults that print an object's address.
            if len(signature) < 120 and " at 0x" not in signature:
                by_name.setdefault(name, (name, signature, doc))
    return list(by_name.values())
