"""Rules of the code's layout: who imports whom, and what is decided in one place.

import-linter's contracts (pyproject.toml) are checked on a copy of the sources, first unchanged and then with all
of BREAKS. The other rules are checked on the syntax trees of the files that git tracks.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.support import ROOT

PACKAGES = ("bass_core", "bench", "distill", "kernels", "ui")
LINT = (sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-logo")

# (contract, file to which a line is added, that line, import-linter's message)
BREAKS = (
    ("The house", "kernels/plan.py", "import bass_core.errors", "kernels.plan -> bass_core.errors"),
    (
        "The rooms",
        "bass_core/length/base.py",
        "from ..draft import base",
        "bass_core.length.base -> bass_core.draft",
    ),
    (
        "The rooms",
        "bass_core/model/weights/cost.py",
        "from ...verify import acceptance",
        "-> bass_core.verify",
    ),
    ("The rooms", "bass_core/homeless.py", "import math", "homeless"),
    ("No circle", "bass_core/sample/params.py", "from . import distribution", ".params -> .distribution"),
    ("The page", "ui/race/feed.py", "from bass_core.sequence import Round", "ui.race.feed -> bass_core.sequence"),
    ("The page", "ui/race/feed.py", "import torch", "ui.race.feed -> torch"),
    ("The library", "bass_core/lanes/race.py", "import gradio", "bass_core.lanes.race -> gradio"),
    ("A kernel", "kernels/plan.py", "import transformers", "kernels.plan -> transformers"),
    ("Numba is", "bass_core/model/select.py", "import numba", "bass_core.model.select -> numba"),
)


def tracked(*patterns: str) -> list[Path]:
    """Return the files that match git's patterns: tracked, or untracked and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for name in sorted(set(listed.stdout.splitlines())) if (path := ROOT / name).exists()]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def parsed(*patterns: str) -> list[tuple[str, ast.Module]]:
    return [(str(path.relative_to(ROOT)), tree_of(path)) for path in tracked(*patterns)]


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    return subprocess.run(LINT, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_imports_keep_their_contracts_and_each_violation_is_found(tmp_path):
    pytest.importorskip("importlinter", reason="pip install -r requirements-dev.txt")
    for name in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__", "*.json", "*.xz")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    done = lint(tmp_path)
    assert done.returncode == 0, done.stdout
    for _, name, line, _ in BREAKS:
        with (tmp_path / name).open("a", encoding="utf-8") as source:
            source.write(f"{line}\n")
    done = lint(tmp_path)
    assert done.returncode == 1
    for contract, _, _, message in BREAKS:
        assert message in done.stdout, done.stdout
        assert re.search(rf"^{contract}.*BROKEN", done.stdout, re.MULTILINE), done.stdout


def names(node: ast.AST) -> set[str]:
    plain = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return plain | {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}


def checks_a_class(tree: ast.Module, classes: set[str]) -> bool:
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("isinstance", "issubclass")
        and bool(names(node.args[1]) & classes)
        for node in ast.walk(tree)
    )


def test_no_code_checks_isinstance_of_a_protocol():
    ours = {
        node.name
        for _, tree in parsed("bass_core/*.py", "kernels/*.py", "ui/*.py")
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases)
    }
    assert {"Decoder", "Drafter"} <= ours
    for name, tree in parsed("app.py", "bass_core/*.py", "kernels/*.py", "ui/*.py", "bench/*.py"):
        assert not checks_a_class(tree, ours), name
    assert checks_a_class(ast.parse("isinstance(decoder, (int, base.Decoder))"), ours)


METHOD_NAMES = {"regular", "speculative", "bass", "amusd"}


def compares_a_method(tree: ast.Module) -> list[int]:
    """Return the lines that compare anything with a method's name, or match on one.

    "bass" is also a draft length (Algorithm 1), so lines that compare a draft length with "bass" are left out.
    """
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            texts = {part.value for side in sides for part in ast.walk(side) if isinstance(part, ast.Constant)}
            others = {name for side in sides for name in names(side)}
            lengths = {"draft_length", "length", "policy", "draft_lengths"}
            if texts & METHOD_NAMES and not (texts & METHOD_NAMES == {"bass"} and others & lengths):
                lines.append(node.lineno)
        elif isinstance(node, ast.MatchValue) and getattr(node.value, "value", None) in METHOD_NAMES:
            lines.append(node.lineno)
    return lines


SCRIPT_COMPARISON = re.compile(
    rf"[!=]== *[\"']({'|'.join(METHOD_NAMES)})[\"']|case *[\"']({'|'.join(METHOD_NAMES)})[\"']"
)


def test_only_the_table_of_methods_compares_their_names():
    for name, tree in parsed("bass_core/*.py", "ui/*.py", "app.py"):
        if name != "bass_core/lanes/methods.py":
            assert not compares_a_method(tree), name
    for path in tracked("ui/static/*.js"):
        assert not SCRIPT_COMPARISON.search(path.read_text(encoding="utf-8")), path.name
    assert compares_a_method(ast.parse('if "amusd" in methods: pass')) == [1]
    assert compares_a_method(ast.parse('drafts = method != "regular"')) == [1]
    assert not compares_a_method(ast.parse('algorithm = draft_length == "bass"'))


def test_names_become_objects_where_a_request_is_made():
    """No call passes its arguments on with locals(), and a verification's name is looked up once."""
    users = {name: names(tree) for name, tree in parsed("bass_core/*.py")}
    assert [name for name, used in users.items() if "locals" in used] == []
    assert [name for name, used in users.items() if "find_verification" in used] == ["bass_core/decode/request.py"]
