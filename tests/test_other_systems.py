"""Windows and macOS, emulated: the library, the command and the page do without what Linux alone has.

The emulation (tests/support/emulated_system.py) takes things away; it does not run another system's own code.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.page import save_tiny_pair
from tests.test_layout import parsed

# A console of a Windows in Western Europe.
NARROW = {"PYTHONIOENCODING": "cp1252"}


@pytest.mark.slow
@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_the_command_and_the_page_work(system: str, tmp_path: Path) -> None:
    target, draft = save_tiny_pair(tmp_path / "pär")
    command = [sys.executable, "-m", "tests.support.emulated_system", system, str(target), str(draft)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | NARROW
    # Compiled here, since code that is compiled there would call that system's own functions.
    options = f"--pair {target} --draft {draft} --device cpu --dtype bfloat16 --max-new-tokens 16 --temperature 1"
    here = [sys.executable, "-m", "bass_core", "generate", "Hi", *options.split()]
    subprocess.run(here, cwd=ROOT, env=environment, capture_output=True, check=True)
    made = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, encoding="cp1252")
    assert made.returncode == 0, made.stderr
    assert made.stderr.count("acceptance rate") == 2
    assert "amusd" in made.stdout and made.stdout.splitlines()[-1].startswith("a recording")


TEXT = {"read_text", "write_text"}


def without_encoding(tree: ast.Module) -> list[int]:
    """Lines that read or write text by the system's own encoding, which on Windows is a code page."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            named = {keyword.arg for keyword in node.keywords}
            texts = [one.value for one in node.args if isinstance(one, ast.Constant)]
            modes = [one for one in texts if isinstance(one, str)]
            by_name = name == "open" and isinstance(node.func, ast.Name)
            text = name in TEXT or (by_name and not any("b" in mode for mode in modes[-1:]))
            if text and "encoding" not in named:
                found.append(node.lineno)
    return found


def test_files_of_text_name_their_encoding() -> None:
    known = 'open("a")\nopen("a", "rb")\npath.read_text()\nopen("a", encoding="x")'
    assert without_encoding(ast.parse(known)) == [1, 3]
    packages = ("bass_core", "kernels", "ui", "bench", "distill")
    for name, tree in parsed("app.py", "setup.py", *(f"{package}/*.py" for package in packages)):
        assert not without_encoding(tree), name
