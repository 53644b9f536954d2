"""`python -m bench turns REVISION NAME ...`: one bench on an older revision and on this tree, by turns.

Contract: the revision is checked out for the run. Each turn runs the bench in a process of its own, the older
tree first; further arguments are the bench's. The results are the medians on both sides, and every turn's figures.
On a machine whose speed changes by the minute, only figures that were taken this way can be compared.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from .report import finish, median, parser

ROOT = Path(__file__).resolve().parents[2]
# Columns that say which row a figure belongs to.
_NAMES = ("case", "arm")


def main(argv: list[str]) -> None:
    """Run by turns, print, and write."""
    options = parser("turns", __doc__ or "")
    options.add_argument("revision", help="the older tree, as git names it")
    options.add_argument("name", help="the bench")
    options.add_argument("--turns", type=int, default=3, help="how often each tree is measured")
    arguments, rest = options.parse_known_args(argv)
    rest += ["--seed", str(arguments.seed)] + ["--quick"] * arguments.quick
    taken: dict[str, list[dict[str, Any]]] = {"before": [], "after": []}
    with _checkout(arguments.revision) as before:
        for _ in tqdm(range(arguments.turns), desc=arguments.name):
            for side, tree in (("before", before), ("after", ROOT)):
                taken[side].append(_run(tree, arguments.name, rest))
    finish("turns", arguments, torch.device("cpu"), _compared(taken), [])


@contextmanager
def _checkout(revision: str) -> Iterator[Path]:
    """The tree of a revision in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="turns-") as folder:
        tree = Path(folder) / "tree"
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", str(tree), revision], cwd=ROOT, check=True
        )
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def _run(tree: Path, name: str, rest: list[str]) -> dict[str, Any]:
    """The document that a bench writes when it runs in a tree."""
    with tempfile.TemporaryDirectory(prefix="turn-") as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, "-m", "bench", name, "--json", str(file), *rest]
        subprocess.run(command, cwd=tree, check=True, stdout=subprocess.DEVNULL)
        made: dict[str, Any] = json.loads(file.read_text())
        return made


def _compared(taken: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row for each figure of each row of the bench: the medians of both sides, and every turn's number."""
    rows = []
    for at, first in enumerate(taken["before"][0]["results"]):
        name = ", ".join(str(first[key]) for key in _NAMES if key in first)
        for figure, value in first.items():
            if figure in _NAMES or not isinstance(value, float):
                continue
            turns = {side: [one["results"][at][figure] for one in made] for side, made in taken.items()}
            rows.append(
                {"row": name or "-", "figure": figure}
                | {side: median(numbers) for side, numbers in turns.items()}
                | {f"{side}, turns": numbers for side, numbers in turns.items()}
            )
    return rows
