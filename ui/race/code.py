"""The code of bass_core/reference.py that the page shows running on a round: `step` and its two judges.

It is read from the file when the page is built. ui/static/race/trace.js names lines by their marks, e.g.
"judge.L9": the label in the line's comment or, for a line without a label, one of MARKS.
tests/ui/test_code.py compares the lines that trace.js visits with a run of the file.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

import bass_core

FILE = Path(bass_core.__file__).with_name("reference.py")
# Function -> mark -> the beginning of its line.
MARKS = {
    "step": {
        "rows": "for b in rows", "if": "if i < gammas", "q": "q[b].append", "verdict": "verdict =",
        "return": "return",
    },
    "judge": {"n": "n, gamma"},
    "judge_together": {
        "n": "n, gamma", "for": "for i", "reach": "reach.append", "h": "h = reach", "last": "if i + 1",
        "excess": "excess =", "rest": "h = excess", "test": "if noise.r", "accept": "n = i",
        "L12": "adjusted, role = p[n]", "L13": "if n < gamma", "L14": "adjusted, role = (reach", "L17": "t =",
        "L18": "return",
    },
}  # fmt: skip
LABEL = re.compile(r"# (L\d+)")


@dataclass(frozen=True)
class CodeLine:
    """A line of the listing; `mark` is its name for trace.js, or "" if the trace never stops there."""

    number: int
    text: str
    mark: str
    kind: str


def listing(function: str) -> list[CodeLine]:
    """Return the lines of a function of the file. Raises ValueError if a mark has no line, or several."""
    source = FILE.read_text(encoding="utf-8")
    node = next(part for part in ast.parse(source).body if getattr(part, "name", "") == function)
    assert isinstance(node, ast.FunctionDef)
    doc, first = node.body[0], node.body[1].lineno
    lines = []
    for number, text in enumerate(source.splitlines()[node.lineno - 1 : node.end_lineno], node.lineno):
        kind = "code" if number >= first else "doc" if number >= doc.lineno else "head"
        lines.append(CodeLine(number, text, _mark(function, text) if kind == "code" else "", kind))
    marks = [line.mark for line in lines if line.mark]
    if len(set(marks)) < len(marks) or not {f"{function}.{name}" for name in MARKS[function]} <= set(marks):
        raise ValueError(f"the marks of {function} do not fit {FILE.name}")
    return lines


def _mark(function: str, text: str) -> str:
    label = LABEL.search(text)
    names = [name for name, start in MARKS[function].items() if text.strip().startswith(start)]
    if label:
        names.append(label[1])
    return f"{function}.{names[-1]}" if names else ""


def template() -> str:
    """Return the functions as HTML. trace.js shows `step` and the judge that decided the round."""
    functions = "".join(
        f'<div data-function="{function}">{"".join(map(_line, listing(function)))}</div>' for function in MARKS
    )
    return (
        f'<div class="code" tabindex="0" role="group" aria-label="bass_core/{FILE.name}, the code of this round">'
        f"{functions}</div>"
    )


def _line(line: CodeLine) -> str:
    text = line.text.lstrip()
    indent = len(line.text) - len(text)
    # Gradio's templates evaluate braces and dollar signs.
    text = escape(text).replace("{", "&#123;").replace("}", "&#125;").replace("$", "&#36;")
    return (
        f'<p class="code-{line.kind}" data-mark="{line.mark}" style="--indent:{indent}">'
        f"<i>{line.number}</i><code>{text}</code></p>"
    )
