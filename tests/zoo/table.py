"""The table of docs/models.md: which architectures run, which are refused and why, and which were not tried.

`documented` reads it, `write` replaces it. `python -m tests.zoo` tries all architectures again and writes it.
"""

from __future__ import annotations

import re

from tests.support import ROOT

DOCUMENT = ROOT / "docs" / "models.md"
RUNS, UNTRIED = "runs", "not tried"
_MARKS = re.compile(r"(?<=<!-- table: zoo -->\n).*?(?=\n<!-- end -->)", re.DOTALL)


def reason(outcome: str) -> str:
    """Return the table's words for an outcome of comparing.py: "runs", or why the model is refused."""
    match = re.fullmatch(r"[\w-]+ is not supported: (.*)\. Choose another causal LM\.", outcome)
    return match[1] if match else outcome


def documented() -> dict[str, str]:
    table = _MARKS.search(DOCUMENT.read_text(encoding="utf-8"))
    assert table is not None, f"{DOCUMENT} has no table of architectures"
    rows = [line.strip("| ").split(" | ") for line in table[0].splitlines()[2:]]
    return {name: outcome for outcome, names in rows for name in names.split(", ")}


def write(outcomes: dict[str, str]) -> None:
    by_outcome: dict[str, list[str]] = {}
    for name, outcome in sorted(outcomes.items()):
        by_outcome.setdefault(outcome, []).append(name)
    ends = {RUNS: 0, UNTRIED: 2}
    order = sorted(by_outcome, key=lambda outcome: (ends.get(outcome, 1), -len(by_outcome[outcome])))
    lines = ["| outcome | architectures |", "| --- | --- |"]
    lines += [f"| {outcome} | {', '.join(by_outcome[outcome])} |" for outcome in order]
    text = _MARKS.sub(lambda _: "\n".join(lines), DOCUMENT.read_text(encoding="utf-8"))
    DOCUMENT.write_text(text, encoding="utf-8")
