"""Lay out the wheel; everything else about the package is in pyproject.toml.

A wheel has one top-level package, bass_core. The build copies the files and folders in MOVED into it and rewrites
imports of them. For example, `from kernels.plan import X` becomes `from bass_core.kernels.plan import X`.
An editable install (pip install -e, uv sync) is the tree itself, see [tool.distutils.editable_wheel] in
pyproject.toml.

Why: `kernels` is also the name of a package of the Hub that transformers imports, and any package could be called
`ui` or `app`. Adding a path entry instead would put these names into every user's sys.path, and both packages
called `kernels` into one process.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
# Files and folders that the wheel has inside bass_core; only those in CODE are imported.
CODE = ("kernels", "ui", "app.py")
MOVED = (*CODE, "drafts", "docs/usage.md")
NAMES = "|".join(Path(name).stem for name in CODE)
# A line that imports one of them, and a call of import_module that does.
IMPORT = re.compile(rf"^(\s*from )({NAMES})(?=[. ])", re.MULTILINE)
BY_NAME = re.compile(rf"(import_module\(\")({NAMES})(?=[.\"])")


class BuildPy(build_py):
    """Build bass_core together with the code that it imports (kernels) and that imports it (ui, app.py)."""

    def run(self) -> None:
        target = Path(self.build_lib) / "bass_core"
        if not self.editable_mode:
            shutil.rmtree(target, ignore_errors=True)  # left over from an earlier build
        super().run()
        if self.editable_mode:
            return
        for name in MOVED:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "*.nb?"))
            else:
                shutil.copy(ROOT / name, target / name)
        for path in target.rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            path.write_text(BY_NAME.sub(r"\1bass_core.\2", IMPORT.sub(r"\1bass_core.\2", text)), encoding="utf-8")


setup(cmdclass={"build_py": BuildPy})
