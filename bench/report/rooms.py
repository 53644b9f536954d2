"""`python -m bench rooms [REVISION] [--out FILE]`: a picture of who imports whom, of this tree or of an older one.

Contract: one box for each file or folder directly in bass_core, one for the page and one for the kernels. The
sources are parsed, never run; an older revision is read from git. The last line is the document with the counts.
Non-goals: bench, distill and tests, which may import anything.
"""

from __future__ import annotations

import ast
import io
import statistics
import subprocess
import sys
import tarfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from bench.report.layered import Arrow, Box, circles, draw, floors_of, needed
from bench.report.report import claim, finish, parser

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("bass_core", "kernels", "ui")
COLOURS = {"ui": "#eef6ff", "public names": "#fff7e0", "kernels": "#f3f0ff"}


@dataclass
class Module:
    """A file: its number of lines, and the modules of this project that it imports."""

    lines: int
    imports: set[str] = field(default_factory=set)


def main(argv: list[str]) -> None:
    """Read, count, draw."""
    options = parser("rooms", __doc__ or "")
    options.add_argument("which", nargs="?", metavar="REVISION", help="a git revision; without one this tree")
    options.add_argument("--out", type=Path, metavar="FILE", help="write the SVG there")
    arguments = options.parse_args(argv)
    found = modules(sources(arguments.which))
    made = figures(found)
    if arguments.out:
        arguments.out.write_text(picture(found, arguments.which), encoding="utf-8")
    old = arguments.which is not None  # an older tree is drawn, but makes no claims
    claims = [
        claim("circles of files", made["circles of files"], "0", None if old else made["circles of files"] == 0),
        claim("lines of the median file", made["median"], "below 100", None if old else made["median"] < 100),
    ]
    finish("rooms", arguments, torch.device("cpu"), [made], claims)


def sources(revision: str | None) -> dict[str, str]:
    """The text of every Python file of the packages, by path."""
    if revision is None:
        paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
        return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    command = ["git", "archive", "--format=tar", revision, *PACKAGES]
    packed = subprocess.run(command, cwd=ROOT, capture_output=True)
    if packed.returncode:
        sys.exit(f"git has no {revision!r} with {', '.join(PACKAGES)}: {packed.stderr.decode().strip()}")
    texts = {}
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member) if member.name.endswith(".py") else None
            if file is not None:
                texts[member.name] = file.read().decode()
    return texts


def modules(texts: dict[str, str]) -> dict[str, Module]:
    """Modules by dotted name; a package's __init__ has the package's name. Empty __init__ files are left out."""
    known = {_dotted(path): path for path, text in texts.items()}
    found = {}
    for name, path in known.items():
        text = texts[path]
        package = name if path.endswith("__init__.py") else name.rpartition(".")[0]
        imports = {target for node in ast.walk(ast.parse(text)) for target in _targets(node, package, known)}
        found[name] = Module(len(text.splitlines()), imports - {name})
    return found


def _dotted(path: str) -> str:
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _targets(node: ast.AST, package: str, known: dict[str, str]) -> set[str]:
    """The project's modules that a statement imports: `from a import b` means a.b if that is a file, else a."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & set(known)
    if not isinstance(node, ast.ImportFrom):
        return set()
    base = node.module or ""
    if node.level:
        parts = package.split(".")
        above = parts[: len(parts) - node.level + 1]
        base = ".".join([*above, base] if base else above)
    names = {f"{base}.{alias.name}" for alias in node.names}
    return (names & set(known)) | ({base} & set(known) if names - set(known) else set())


def room(name: str) -> str:
    """The box of a module."""
    parts = name.split(".")
    if parts[0] != "bass_core":
        return parts[0]
    return parts[1] if len(parts) > 1 else "public names"


def rooms(found: dict[str, Module]) -> tuple[dict[str, list[str]], dict[Arrow, int]]:
    """The files with code in each room, and the number of imports from one room to another."""
    files: dict[str, list[str]] = {}
    arrows: dict[Arrow, int] = {}
    for name, module in found.items():
        if module.lines > 1:
            files.setdefault(room(name), []).append(name)
        for target in module.imports:
            if room(name) != room(target):
                arrow = (room(name), room(target))
                arrows[arrow] = arrows.get(arrow, 0) + 1
    return files, {arrow: count for arrow, count in arrows.items() if set(arrow) <= set(files)}


def figures(found: dict[str, Module]) -> dict[str, Any]:
    """Counts of bass_core's files with code, of its boxes, and of import cycles anywhere."""
    files, arrows = rooms(found)
    own = {name: names for name, names in files.items() if name not in COLOURS}
    library = [name for names in own.values() for name in names]
    between = {(name, target): 1 for name, module in found.items() for target in module.imports}
    inside = {arrow: 1 for arrow in between if set(arrow) <= set(library)}
    return {
        "files": len(library),
        "lines": sum(found[name].lines for name in library),
        "median": statistics.median(found[name].lines for name in library),
        "boxes": len(own),
        "fullest": max(
            Counter(_folder(name, found) for name in found if room(name) not in ("ui", "kernels")).values()
        ),
        "arrows of boxes": len(arrows),
        "floors of boxes": 1 + max(floors_of(list(files), arrows).values()),
        "floors of files": 1 + max(floors_of(library, inside).values()),
        "circles of files": len(circles(between)),
    }


def _folder(name: str, found: dict[str, Module]) -> str:
    """The folder of the module's file; a package's __init__ is in the package's folder."""
    return name if any(other.startswith(f"{name}.") for other in found) else name.rpartition(".")[0]


def picture(found: dict[str, Module], revision: str | None) -> str:
    """The SVG."""
    files, arrows = rooms(found)
    made = figures(found)
    flat = all(len(names) == 1 for name, names in files.items() if name not in ("ui", "kernels"))
    boxes = [_described(name, files[name], found, flat) for name in sorted(files)]
    about = [
        f"{made['files']} files of bass_core, {made['lines']} lines, in "
        f"{made['boxes']} boxes on {made['floors of boxes']} floors; circles of files: "
        f"{made['circles of files']}.",
        "An arrow points to what is imported" + ("." if flat else "; its number counts the imports of files."),
        f"{len(arrows)} arrows, of which {len(needed(arrows))} are drawn: the others follow from them. "
        "Red ones make a circle.",
    ]
    title = "Who imports whom" + (f", revision {revision}" if revision else "")
    return draw(title, about, boxes, arrows, counts=not flat)


def _described(name: str, names: list[str], found: dict[str, Module], flat: bool) -> Box:
    lines = sum(found[one].lines for one in names)
    if flat and name not in ("ui", "kernels"):
        return Box(name, colour=COLOURS.get(name, "#ffffff"))
    many = f"{len(names)} files, " if len(names) > 1 else ""
    return Box(name, (f"{many}{lines} lines",), COLOURS.get(name, "#ffffff"))
