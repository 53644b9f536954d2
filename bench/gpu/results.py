"""The lines that the processes of a run write, and the document that can be made from them at any moment.

Contract: a line is {"kind", ...}: "run" (the first line: the document's fields about the run), "start", "end" and
"failed" of a section, "lost" where its process died, "row" (a figure), "begun" and "verdict" of a case, and "plan"
and "tile", which later sections use. Incomplete lines are ignored.
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from ..report import report
from .claims import claims
from .plan import SECTIONS

Lines = list[dict[str, Any]]
_STATES = ("start", "end", "failed")


def append(path: Path, **fields: Any) -> None:
    """Append one line, at once."""
    with path.open("a") as file:
        file.write(json.dumps(fields) + "\n")


def read(path: Path) -> Lines:
    """All lines written so far."""
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [line for line in found if isinstance(line, dict)]


def states(lines: Lines) -> dict[str, set[str]]:
    """By section, if begun or failed: the last of "start", "end" and "failed" from each of its processes."""
    last = {(line["section"], line["part"]): line["kind"] for line in lines if line["kind"] in _STATES}
    found: dict[str, set[str]] = {}
    for (section, _), kind in last.items():
        found.setdefault(section, set()).add(kind)
    return found


def last_case(lines: Lines, section: str, part: int) -> int | None:
    """The index of the case that the section's process `part` was running; None if it had begun none or ended."""
    own = [line for line in lines if line.get("section") == section and line.get("part") == part]
    cases = [line["index"] for line in own if line["kind"] == "begun"]
    ended = [line for line in own if line["kind"] in _STATES][-1:]
    return cases[-1] if cases and ended and ended[0]["kind"] == "start" else None


def failures(lines: Lines) -> dict[str, str]:
    """Why each unfinished section did not finish."""
    ends = states(lines)
    found = {name: "it was not begun" for name in head(lines)["sections"] if name not in ends}
    found |= {name: "the run ended while it ran" for name, kinds in ends.items() if "start" in kinds}
    return found | {line["section"]: line["error"] for line in lines if line["kind"] in ("failed", "lost")}


def head(lines: Lines) -> dict[str, Any]:
    """The document's fields about the run itself."""
    return {key: value for key, value in lines[0].items() if key != "kind"}


def rows(lines: Lines) -> list[dict[str, Any]]:
    """The figures, then the outcomes of the cases, then the sections that failed."""
    found = [{key: line[key] for key in line if key != "kind"} for line in lines if line["kind"] == "row"]
    found += _case_rows(lines)
    return found + [_row(name, "FAILED", error, None) for name, error in failures(lines).items()]


def _row(section: str, case: str, what: str, value: Any, unit: str = "") -> dict[str, Any]:
    return {"section": section, "case": case, "what": what, "value": value, "unit": unit, "note": ""}


def _case_rows(lines: Lines) -> list[dict[str, Any]]:
    """How many cases of each group passed; a case without a verdict crashed its process."""
    errors: dict[tuple[str, str, int, int], tuple[str, str | None]] = {}
    groups: dict[tuple[str, str], list[str | None]] = {}
    for line in lines:
        if line["kind"] in ("begun", "verdict"):
            key = (line["section"], line["group"], line["part"], line["index"])
            errors[key] = (line["label"], line.get("error", "its process died or was ended"))
    found = []
    for (section, group, *_), (label, error) in errors.items():
        groups.setdefault((section, group), []).append(error)
        if error is not None:
            found.append(_row(section, f"{group}: {label}", "failed", error))
    for (section, group), verdicts in groups.items():
        found.append(_row(section, group, "cases passed", verdicts.count(None), f"of {len(verdicts)}"))
    return found


def document(lines: Lines) -> dict[str, Any]:
    """The bench's document, made from these lines."""
    run, figures = head(lines), rows(lines)
    made = claims(figures, open_=run["quick"] or run["dry"])
    asked = run.pop("sections")
    ended = len(set(asked) - set(failures(lines)))
    made.append(report.claim("sections-that-ran", ended / len(asked), "1", ended == len(asked)))
    arguments = Namespace(seed=run["seed"], quick=run["quick"])
    return report.document("gpu", arguments, torch.device("cpu"), figures, made) | run


def write(lines: Lines, folder: Path) -> Path | None:
    """Write the document to FOLDER/DEVICE-DATE-TIME.json atomically; a dry or quick run writes none."""
    run = head(lines)
    if run["dry"] or run["quick"]:
        return None
    path = folder / f"{file_name(run['device'])}-{run['date']}-{run['time']}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document(lines), indent=1) + "\n")
    os.replace(part, path)
    return path


def file_name(device: str) -> str:
    """A device's name in a form that file names can hold."""
    return "".join(letter if letter.isalnum() else "-" for letter in device.lower())[:60].strip("-")


def print_tables(lines: Lines) -> None:
    """Print the figures by section, and the failures."""
    found = rows(lines)
    for name in SECTIONS:
        own = [{key: row[key] for key in row if key != "section"} for row in found if row["section"] == name]
        if own:
            print(f"\n{name}\n{report.table(own)}")
    for name, error in failures(lines).items():
        print(f"FAILED {name}: {error}")
