"""Which parts were tested whole, and in which state: .ci/tested.json.

Tests marked `demand(PART)` run if that part has changed since. `python -m tests.support.tested due` prints the
parts that have changed, `... --all` all of them, `... state PART` a state, and `... passed PART STATE` stores it.
`pytest --stamp` stores the states that the parts had when it began, of those parts whose tests all passed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.support import ROOT

FILE = ROOT / ".ci" / "tested.json"
# What each part depends on: files, and packages whose versions count.
PARTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cpu": (
        ("kernels/cpu/**/*.py", "kernels/*.py", "kernels/reference/*.py", "tests/kernels/cpu/*.py"),
        ("numba", "llvmlite"),
    ),
    "distill": (("distill/*",), ("torch",)),
    "graphs": (
        ("bass_core/decode/batch.py", "bass_core/decode/verifier.py", "bass_core/decode/amusd/*.py")
        + ("bass_core/draft/**/*.py", "bass_core/model/*.py", "bass_core/verify/*.py", "tests/devices/**/*.py"),
        ("torch",),
    ),
    # Not the program's code: mypy checks it for Python 3.10, and the suite runs it.
    "pythons": (("requirements*.txt", "uv.lock", "pyproject.toml", ".ci/pythons", ".ci/constraints.txt"), ()),
    "triton": (
        (".ci/run", "bass_core/machine/gpu_kernels.py", "kernels/*.py", "kernels/reference/*.py")
        + ("kernels/triton/*.py", "tests/kernels/*.py", "tests/kernels/compilation/*.py")
        + ("tests/kernels/launching/*.py",),
        ("torch", "triton"),
    ),
    "zoo": (
        ("bass_core/model/attention.py", "bass_core/model/base.py", "bass_core/model/probe.py")
        + ("bass_core/model/select.py", "bass_core/model/tiled.py", "kernels/backends.py", "tests/zoo/*.py"),
        ("torch", "transformers"),
    ),
}
# The slow tests of these files need nothing but a part.
WITHIN = dict.fromkeys(
    (
        "tests/kernels/test_attention.py",
        "tests/kernels/test_fused_attention.py",
        "tests/kernels/launching/test_launches.py",
    ),
    "triton",
)


def state(part: str, root: Path = ROOT) -> str:
    """Return a hash of the part's files, and the versions of its packages."""
    patterns, packages = PARTS[part]
    files = sorted({file for pattern in patterns for file in root.glob(pattern) if file.is_file()})
    content = hashlib.sha256()
    for file in files:
        # Without carriage returns, which Git adds on Windows.
        content.update(file.relative_to(root).as_posix().encode() + file.read_bytes().replace(b"\r\n", b"\n"))
    return ", ".join([content.hexdigest()[:16], *(f"{name} {installed(name)}" for name in packages)])


def installed(package: str) -> str:
    """Return a package's version, or "none"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def due() -> list[str]:
    """Return the parts that have changed since they were tested whole."""
    tested = _stored()
    return [part for part in PARTS if tested.get(part) != state(part)]


def passed(states: dict[str, str]) -> None:
    """Store the states of these parts."""
    new = FILE.with_suffix(".part")
    new.write_text(json.dumps(_stored() | states, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    new.replace(FILE)


def _stored() -> dict[str, str]:
    states: dict[str, str] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    return states


class Stamp:
    """Stores the states of the parts that a whole run tests, except those with a skipped or failed test."""

    def __init__(self, parts: list[str]) -> None:
        # .ci/pythons stores its own.
        self.states = {part: state(part) for part in parts if part != "pythons"}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Leave out the parts of a test that did not pass. If a worker died, those are unknown."""
        if report.when == "???":
            self.states.clear()
        elif report.skipped or report.failed:
            for part in dict(report.user_properties).get("parts", ()):
                self.states.pop(part, None)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Store the states if the run went to its end."""
        if exitstatus in (0, 1) and self.states:
            passed(self.states)


if __name__ == "__main__":
    command, *names = sys.argv[1:]
    if command == "passed":
        passed({names[0]: names[1]})
    elif command == "state":
        print(state(names[0]))
    else:
        print(*(PARTS if command == "--all" else due()))
