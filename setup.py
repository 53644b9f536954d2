"""How the wheel is laid out; everything else of the package is in pyproject.toml.

Contract: a wheel has one top-level package, bass_core. What lies beside it in this tree is put into it, at the
same place relative to bass_core as here to the root, and the imports of what moved are rewritten: of
`from kernels.plan import X` becomes `from bass_core.kernels.plan import X`. An editable install (pip install -e,
uv sync) is the tree itself, as pyproject.toml asks for in [tool.distutils.editable_wheel].

Why: `kernels` is also the name of the Hub's package, which transformers imports, and `ui` and `app` could be
anybody's. A path entry in place of the rewriting would put the same names into everybody's sys.path, and would
bring both packages called kernels into one process.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
# Files and folders that the wheel has inside bass_core; the first three are imported by their names.
CODE = ("kernels", "ui", "app.py")
MOVED = (*CODE, "drafts", "docs/usage.md")
NAMES = "|".join(Path(name).stem for name in CODE)
# A line that imports one of them, and the same by import_module.
IMPORT = re.compile(rf"^(\s*from )({NAMES})(?=[. ])", re.MULTILINE)
BY_NAME = re.compile(rf"(import_module\(\")({NAMES})(?=[.\"])")


class BuildPy(build_py):
    """Builds bass_core with what it stands on and what stands on it."""

    def run(self) -> None:
        target = Path(self.build_lib) / "bass_core"
        if not self.editable_mode:
            shutil.rmtree(target, ignore_errors=True)  # what an earlier build left
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
