"""The language of docstrings and comments, per 10,000 words: words that made sentences hard to read stay rare."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from .test_layout import tracked, tree_of

# (pattern, maximum number per 10,000 words). The patterns find noun clauses such as "what was drafted", "where"
# for "if", data that "says" something, "alone" for "only", and "beside" for "compared with".
LIMITS = [
    (r"\bwhat\b", 10),
    (r"\bwhere\b", 15),
    (r"\b(told|tells?|says?|said)\b", 3),
    (r"\balone\b", 1),
    (r"\bbeside\b", 0),
    (r"Contract:", 0),
]
SOURCES = ("app.py", "bass_core/*.py", "bench/*.py", "distill/*.py", "kernels/*.py", "ui/*.py", "ui/static/*.js")


def python_texts(source: str, tree: ast.Module) -> Iterator[str]:
    """The docstrings and comments of a Python file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def texts(path: Path) -> list[str]:
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return list(python_texts(source, tree_of(path)))
    return re.findall(r"/\*[^*]*\*/|//.*", source)


@pytest.fixture(scope="module")
def words() -> str:
    return "\n".join(text for path in tracked(*SOURCES) for text in texts(path))


def per_10_000(pattern: str, text: str) -> float:
    return 1e4 * len(re.findall(pattern, text, re.I)) / len(re.findall(r"[A-Za-z']+", text))


@pytest.mark.parametrize(("pattern", "most"), LIMITS)
def test_hard_words_are_rare(words: str, pattern: str, most: float) -> None:
    assert per_10_000(pattern, words) <= most


def test_rules_have_examples(words: str) -> None:
    assert per_10_000(r"\bfor example\b|\be\.g\.", words) >= 5


def test_the_counts_see_docstrings_and_comments() -> None:
    source = '"""What is told."""\nx = "what"  # what stands alone\n'
    assert per_10_000(r"\bwhat\b", "\n".join(python_texts(source, ast.parse(source)))) == pytest.approx(2e4 / 6)
