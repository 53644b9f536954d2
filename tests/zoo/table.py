"""The table of docs/models.md: which architectures run, which are refused and why, and which were not tried.

Contract: `documented` reads it, `written` replaces it; `python -m tests.zoo` makes it anew.
"""

from __future__ import annotations

import re

from tests.support import ROOT

DOCUMENT = ROOT / "docs" / "models.md"
RUNS, UNTRIED = "runs", "not tried"
_MARKS = re.compile(r"(?<=<!-- table: zoo -->\n).*?(?=\n<!-- end -->)", re.DOTALL)


def reason(outcome: str) -> str:
    """What the table says of an outcome (comparing.py): "runs", or why it is refused, without the model's name."""
    found = re.fullmatch(r"[\w-]+ is not supported: (.*)\. Choose another causal LM\.", outcome)
    return found[1] if found else outcome


def documented() -> dict[str, str]:
    """For each architecture "runs", "not tried", or why it is refused."""
    found = _MARKS.search(DOCUMENT.read_text(encoding="utf-8"))
    assert found is not None, f"{DOCUMENT} has no table of architectures"
    rows = [line.strip("| ").split(" | ") for line in found[0].splitlines()[2:]]
    return {name: said for said, names in rows for name in names.split(", ")}


def written(outcomes: dict[str, str]) -> None:
    """Put these outcomes into the document, all architectures of one outcome in a row."""
    by_outcome: dict[str, list[str]] = {}
    for name, said in sorted(outcomes.items()):
        by_outcome.setdefault(said, []).append(name)
    ends = {RUNS: 0, UNTRIED: 2}
    order = sorted(by_outcome, key=lambda said: (ends.get(said, 1), -len(by_outcome[said])))
    lines = ["| outcome | architectures |", "| --- | --- |"]
    lines += [f"| {said} | {', '.join(by_outcome[said])} |" for said in order]
    text = _MARKS.sub(lambda _: "\n".join(lines), DOCUMENT.read_text(encoding="utf-8"))
    DOCUMENT.write_text(text, encoding="utf-8")
