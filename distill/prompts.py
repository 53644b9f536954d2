"""Any number of prompts for the corpus: code, instructions, questions, stories, lists and rewriting.

Contract: `corpus_prompts(seed, count)` is a pure function of its arguments and the installed Python library. None
of its prompts is in the evaluation set, which has topics of its own, and none is taken from HumanEval.
"""

from __future__ import annotations

import inspect
import json
import random
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

EVALUATION = Path(__file__).parent / "evaluation_prompts.json"

# The prompt templates, the words that fill them, and the library modules whose docstrings are asked about.
WORDS: dict[str, Any] = json.loads((Path(__file__).parent / "words.json").read_text(encoding="utf-8"))
_LANGUAGES = ["Python", "Python", "Python", "Python", "JavaScript", "Java", "C", "C++", "Go", "Bash"]


def corpus_prompts(seed: int, count: int) -> list[str]:
    """`count` different prompts, the kinds in turn; other seeds give other prompts."""
    rng = random.Random(seed)
    kinds = ["code", "docstring", "instruction", "question", "story", "list", "rewriting", "rewriting"]
    prompts: list[str] = []
    taken = {prompt["text"] for prompt in evaluation_prompts()}
    while len(prompts) < count:
        prompt = _make(kinds[len(prompts) % len(kinds)], rng)
        if prompt not in taken:
            taken.add(prompt)
            prompts.append(prompt)
    return prompts


def evaluation_prompts() -> list[dict[str, str]]:
    """The committed set: 64 prompts {"kind", "text"}, 16 each of code, prose, question and rewriting."""
    loaded: list[dict[str, str]] = json.loads(EVALUATION.read_text(encoding="utf-8"))
    return loaded


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
    words = {
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
            if len(signature) < 120:
                found.setdefault(name, (name, signature, doc))
    return list(found.values())
