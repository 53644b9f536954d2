"""Prompts for the corpus: code, instructions, questions, stories, lists and rewriting, without end.

Contract: `corpus_prompts(seed, count)` is a pure function of its arguments and the installed Python library. No
prompt of it is in the evaluation set, whose topics are listed apart, and none is taken from HumanEval.
"""

from __future__ import annotations

import inspect
import json
import random
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path

EVALUATION = Path(__file__).parent / "evaluation_prompts.json"

_MODULES = [
    "argparse",
    "array",
    "ast",
    "base64",
    "bisect",
    "calendar",
    "cmath",
    "collections",
    "colorsys",
    "configparser",
    "contextlib",
    "copy",
    "csv",
    "datetime",
    "decimal",
    "difflib",
    "dis",
    "email.utils",
    "enum",
    "fileinput",
    "filecmp",
    "fnmatch",
    "fractions",
    "functools",
    "gettext",
    "glob",
    "gzip",
    "hashlib",
    "heapq",
    "hmac",
    "html",
    "http.cookies",
    "imaplib",
    "inspect",
    "io",
    "ipaddress",
    "itertools",
    "json",
    "keyword",
    "linecache",
    "locale",
    "logging",
    "mailbox",
    "math",
    "mimetypes",
    "numbers",
    "operator",
    "os",
    "os.path",
    "pathlib",
    "pickle",
    "platform",
    "plistlib",
    "posixpath",
    "pprint",
    "quopri",
    "random",
    "re",
    "reprlib",
    "sched",
    "secrets",
    "shelve",
    "shlex",
    "shutil",
    "signal",
    "smtplib",
    "socket",
    "sqlite3",
    "statistics",
    "string",
    "struct",
    "subprocess",
    "sys",
    "sysconfig",
    "tarfile",
    "tempfile",
    "textwrap",
    "threading",
    "time",
    "timeit",
    "tokenize",
    "traceback",
    "types",
    "typing",
    "unicodedata",
    "urllib.parse",
    "urllib.request",
    "uuid",
    "warnings",
    "wave",
    "weakref",
    "webbrowser",
    "xml.dom.minidom",
    "xml.etree.ElementTree",
    "zipfile",
    "zlib",
]

_TOPICS = """the water cycle|photosynthesis|the French Revolution|electric cars|chess|black holes|the immune system
the stock market|renewable energy|ancient Egypt|machine learning|the human heart|volcanoes|jazz music|the Silk Road
bees and pollination|the printing press|sleep|coral reefs|democracy|inflation|gravity|the Great Wall of China
plate tectonics|antibiotics|the internet|bicycles|coffee|tea ceremonies|public libraries|evolution|the moon landing
cloud computing|recycling|nutrition|meditation|the Renaissance|glaciers|dinosaurs|operating systems|databases
encryption|probability|the Pythagorean theorem|prime numbers|linear regression|genetics|the solar system|comets
satellites|airplanes|trains|bridges|skyscrapers|urban gardening|composting|beekeeping|pottery|photography|painting
classical music|the violin|theatre|poetry|journalism|advertising|small businesses|remote work|job interviews
time management|friendship|parenting|teaching children to read|learning a language|travelling alone|camping|hiking
swimming|yoga|football|basketball|tennis|marathons|cooking pasta|baking cakes|vegetarian food|street
markets|festivals the desert|rain forests|the
Arctic|whales|wolves|owls|butterflies|horses|cats|dogs|goldfish|house plants|roses|oak trees the ocean
tides|lightning|earthquakes|rainbows|clocks|maps|money|taxes|insurance|mortgages|startups|robots|3D printing
virtual reality|video games|podcasts|e-books|newspapers|television|museums|castles|pirates|knights|samurai|Vikings
the Roman Empire|the Industrial Revolution|the Cold War|the United Nations|human rights|voting|law
courts|hospitals
nurses|firefighters|farmers|fishing|forestry|mining|steel|glass|paper|cotton|silk|bread|cheese|chocolate|salt|honey"""

_PEOPLE = """a retired clockmaker|two sisters|a young astronaut|a lonely dragon|an old fisherman|a clever fox
a baker who cannot sleep|a boy with a paper boat|a scientist on an island|a travelling musician|a shy robot
a detective in the rain|a gardener and a talking bird|a princess who likes mathematics|a bus driver|a lost tourist
a painter without colours|a librarian at night|a nurse on her first day|a shepherd in the mountains|a street cat
an inventor of useless machines|a king who lost his shadow|a student before an exam|a mother and her daughter
a soldier coming home|a chef with no sense of taste|a train conductor|a ghost who is afraid of people|a
beekeeper"""

_PLACES = """in a small village by the sea|on a space station|in a forgotten library|during a long winter|in a
busy city on a train at night|in a desert town|at the edge of a forest|in an old theatre|on top of a mountain|in a
hospital at a crowded market|on a sinking ship|in a school after dark|under the sea|in a house with too many
doors"""

_CODE = """reverses a linked list|checks whether a string is a valid IPv4 address|merges overlapping intervals
computes the greatest common divisor of two numbers|finds the longest common subsequence of two strings
sorts a list of dictionaries by a key|implements binary search|parses a date in the form YYYY-MM-DD
converts a temperature from Celsius to Fahrenheit|removes vowels from a string|transposes a matrix
counts the lines, words and characters of a file|generates all permutations of a list|flattens a nested list
computes the determinant of a matrix|finds the median of a list of numbers|implements quicksort
implements a stack with push and pop|implements a queue with two stacks|finds anagrams in a list of words
encodes a string with run-length encoding|validates an e-mail address with a regular expression
prints a multiplication table|draws a triangle of stars|rolls a dice a thousand times and counts the results
reads a CSV file and sums a column|downloads a web page|renames all files in a folder|computes a moving average
computes compound interest|converts Roman numerals to integers|solves the Tower of Hanoi
finds the shortest path in a graph with BFS|detects a cycle in a directed graph|implements depth-first search
multiplies two matrices|computes the nth prime number|checks whether a year is a leap year
finds the second largest number in a list|rotates a list by k places|computes the power set of a set
converts decimal to binary|formats a number with thousands separators|computes the edit distance of two words
groups words by their first letter|implements a simple calculator|implements a bank queue simulation
implements tic-tac-toe|shuffles a deck of cards|generates a random password|counts votes in an election
implements a trie|implements a least-recently-used cache|implements a priority queue|evaluates a postfix expression
balances parentheses|finds the majority element|computes the sum of digits|finds all divisors of a number
computes the standard deviation|interpolates between two points|computes the area of a polygon|plots a histogram"""

_LANGUAGES = ["Python", "Python", "Python", "Python", "JavaScript", "Java", "C", "C++", "Go", "Bash"]

_REWRITES = [
    "Rewrite the following text so that a child understands it:\n\n{text}",
    "Correct the grammar of this text and write nothing else:\n\n{text}",
    "Summarise this text in two sentences:\n\n{text}",
    "Rewrite this text in a formal tone:\n\n{text}",
    "Turn this text into a list of bullet points:\n\n{text}",
    "Repeat the following text, and replace every 'the' by 'a':\n\n{text}",
    "Rewrite the following text in the past tense:\n\n{text}",
    "Make this text shorter without losing any facts:\n\n{text}",
]

_TEMPLATES = {
    "question": [
        "What is the most important thing to know about {topic}?",
        "Why does {topic} matter today?",
        "How did {topic} change over the last hundred years?",
        "Explain {topic} to a beginner.",
        "What are common misconceptions about {topic}?",
        "Can you tell me three interesting facts about {topic}?",
        "What would happen without {topic}?",
    ],
    "instruction": [
        "Write a short introduction to {topic}.",
        "Write a polite e-mail to a colleague about {topic}.",
        "Give step-by-step advice to someone who wants to learn about {topic}.",
        "Compare {topic} and {other}.",
        "Write a quiz with four questions and answers about {topic}.",
        "Write a paragraph for a school essay about {topic}.",
        "Write a product description that has to do with {topic}.",
        "Plan a one-day workshop on {topic}.",
    ],
    "list": [
        "List ten words that have to do with {topic} and explain each.",
        "Give me five ideas for a blog post about {topic}.",
        "List the advantages and disadvantages of {topic}.",
        "Make a checklist for a project about {topic}.",
        "Name seven things that {topic} and {other} have in common.",
    ],
    "story": [
        "Write a short story about {person} {place}.",
        "Write the beginning of a novel about {person} {place}.",
        "Write a dialogue between {person} and {stranger}.",
        "Write a poem about {person} {place}.",
        "Continue this story: One morning, {person} woke up {place} and",
    ],
    "code": [
        "Write a {language} function that {code}.",
        "Write a {language} program that {code}. Explain how it works.",
        "Show me how to write code that {code} in {language}, with comments.",
        "Write a {language} function that {code}, and two examples of its use.",
    ],
}


def corpus_prompts(seed: int, count: int) -> list[str]:
    """`count` prompts of all kinds in turn; other seeds give other prompts."""
    rng = random.Random(seed)
    kinds = ["code", "docstring", "instruction", "question", "story", "list", "rewriting", "docstring"]
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
    loaded: list[dict[str, str]] = json.loads(EVALUATION.read_text())
    return loaded


def _make(kind: str, rng: random.Random) -> str:
    def pick(lines: str) -> str:
        return rng.choice([entry for line in lines.splitlines() for entry in line.split("|")])

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
        about = f"{pick(_PEOPLE).capitalize()} lived {pick(_PLACES)} and knew everything about {pick(_TOPICS)}."
        text = rng.choice([doc, about, f"{about} Nobody had ever asked why. {doc}"])
        return rng.choice(_REWRITES).format(text=text)
    words = {
        "topic": pick(_TOPICS),
        "other": pick(_TOPICS),
        "person": pick(_PEOPLE),
        "stranger": pick(_PEOPLE),
        "place": pick(_PLACES),
        "code": pick(_CODE),
        "language": rng.choice(_LANGUAGES),
    }
    return rng.choice(_TEMPLATES[kind]).format(**words)


@cache
def _docstrings() -> list[tuple[str, str, str]]:
    """(name, signature, first paragraph of the docstring) of the public functions of the Python library."""
    found: dict[str, tuple[str, str, str]] = {}
    for module_name in _MODULES:
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
