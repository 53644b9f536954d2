"""Which parts were tested whole, and in which state: .ci/tested.json.

Tests marked `demand(PART)` run if that part has changed since. `python -m tests.support.tested due` prints the
parts that have changed, `... --all` prints all, and `... passed PART ...` stores their present state.
"""

from __future__ import annotations

import hashlib
import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.support import ROOT

FILE = ROOT / ".ci" / "tested.json"
# What each part depends on: files, and packages whose versions count.
PARTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cpu": (("kernels/cpu/**/*.py", "kernels/plan.py"), ("numba",)),
    "distill": (("distill/*.py",), ()),
    "pythons": (("requirements*.txt", "uv.lock", "pyproject.toml", ".ci/pythons", ".ci/constraints.txt"), ()),
    "triton": (
        ("kernels/*.py", "kernels/reference/*.py", "kernels/triton/*.py", "tests/kernels/*.py")
        + ("tests/kernels/compilation/*.py", "tests/kernels/launching/*.py"),
        ("torch", "triton"),
    ),
    "zoo": ((), ("transformers",)),
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
    files = sorted({file for pattern in patterns for file in root.glob(pattern)})
    content = hashlib.sha256()
    for file in files:
        # Without carriage returns, which Git adds on Windows.
        content.update(file.relative_to(root).as_posix().encode() + file.read_bytes().replace(b"\r\n", b"\n"))
    return " ".join([content.hexdigest()[:16], *(f"{name} {installed(name)}" for name in packages)])


def installed(package: str) -> str:
    """Return a package's version, or "none"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def due() -> list[str]:
    """Return the parts that have changed since they were tested whole."""
    tested = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    return [part for part in PARTS if tested.get(part) != state(part)]


def passed(parts: list[str]) -> None:
    """Store the present state of these parts."""
    tested = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    tested |= {part: state(part) for part in parts}
    FILE.write_text(json.dumps(tested, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    command, *names = sys.argv[1:]
    if command == "passed":
        passed(names)
    else:
        print(*(PARTS if command == "--all" else due()))
