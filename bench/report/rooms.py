"""`python -m bench rooms [REVISION] [--out FILE]`: draw the imports of this tree or an older one.

There is one box for each file or folder directly in bass_core, one for the page and one for the kernels. A box is
drawn above everything that it imports. Arrows that follow from others are left out (transitive reduction). Boxes
of one cycle share a floor and have red arrows. The sources are parsed, never run; an older revision is read from
git. bench, distill and tests are left out, because they may import anything.
"""

from __future__ import annotations

import ast
import io
import statistics
import subprocess
import sys
import tarfile
from collections import Counter
from html import escape
from itertools import pairwise
from pathlib import Path, PurePosixPath

from .report import CPU, ROOT, Row, claim, finish, parser

PACKAGES = ("bass_core", "kernels", "ui")
COLOURS = {"ui": "#eef6ff", "public names": "#fff7e0", "kernels": "#f3f0ff"}
# Pixels: the picture's least width, a box's height, the space between floors, the width of a letter.
WIDTH, HIGH, RISE, LETTER = 1000.0, 42.0, 36.0, 6.7
Arrows = dict[tuple[str, str], int]
Modules = dict[str, tuple[int, set[str]]]  # a module's number of lines, and the project's modules that it imports


def main(argv: list[str]) -> None:
    """Read, count and draw."""
    options = parser("rooms", __doc__ or "")
    options.add_argument("which", nargs="?", metavar="REVISION", help="a git revision; by default this tree")
    options.add_argument("--out", type=Path, metavar="FILE", help="write the SVG to FILE")
    arguments = options.parse_args(argv)
    by_name = modules(sources(arguments.which))
    counts = figures(by_name)
    if arguments.out:
        arguments.out.write_text(picture(by_name, counts, arguments.which), encoding="utf-8")
    decided = arguments.which is None  # an older tree is drawn, but makes no claims
    count = counts["circles of files"]
    claims = [claim("circles of files", count, "0", count == 0 if decided else None)]
    finish("rooms", arguments, CPU, [counts], claims)


def sources(revision: str | None) -> dict[str, str]:
    """Return the text of every Python file of the packages, by path."""
    if revision is None:
        paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
        return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    packed = subprocess.run(["git", "archive", "--format=tar", revision, *PACKAGES], cwd=ROOT, capture_output=True)
    if packed.returncode:
        sys.exit(f"git has no {revision!r} with {', '.join(PACKAGES)}: {packed.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        files = {item.name: archive.extractfile(item) for item in archive if item.name.endswith(".py")}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


def modules(texts: dict[str, str]) -> Modules:
    """Return the modules by dotted name; a package's __init__ has the package's name."""
    known = {_dotted(path): path for path in texts}
    by_name = {}
    for name, path in known.items():
        package = name if path.endswith("__init__.py") else name.rpartition(".")[0]
        tree = ast.parse(texts[path])
        imports = {target for node in ast.walk(tree) for target in _targets(node, package, set(known))}
        by_name[name] = (len(texts[path].splitlines()), imports - {name})
    return by_name


def _dotted(path: str) -> str:
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _targets(node: ast.AST, package: str, known: set[str]) -> set[str]:
    """Return our modules that a statement imports; `from a import b` means a.b if that is a file, else a."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & known
    if not isinstance(node, ast.ImportFrom):
        return set()
    base = node.module or ""
    if node.level:
        parts = package.split(".")
        above = parts[: len(parts) - node.level + 1]
        base = ".".join([*above, base] if base else above)
    names = {f"{base}.{alias.name}" for alias in node.names}
    return (names & known) | ({base} & known if names - known else set())


def room(name: str) -> str:
    """Return the box of a module."""
    parts = name.split(".")
    return parts[0] if parts[0] != "bass_core" else parts[1] if len(parts) > 1 else "public names"


def rooms(by_name: Modules) -> tuple[dict[str, list[str]], Arrows]:
    """Return the files with code in each room, and the number of imports from one room to another."""
    files: dict[str, list[str]] = {}
    counted: Counter[tuple[str, str]] = Counter()
    for name, (lines, imports) in by_name.items():
        if lines > 1:
            files.setdefault(room(name), []).append(name)
        counted.update((room(name), room(target)) for target in imports if room(name) != room(target))
    return files, {arrow: count for arrow, count in counted.items() if set(arrow) <= set(files)}


def figures(by_name: Modules) -> Row:
    """Return the counts of bass_core's files with code, of its boxes, and of import cycles anywhere."""
    files, arrows = rooms(by_name)
    library = [name for box, names in files.items() if box not in COLOURS for name in names]
    between = {(name, target): 1 for name, (_, imports) in by_name.items() for target in imports}
    inside = {arrow: 1 for arrow in between if set(arrow) <= set(library)}
    folders = Counter(
        # A package's __init__ is in the package's folder.
        name if any(other.startswith(f"{name}.") for other in by_name) else name.rpartition(".")[0]
        for name in by_name
        if room(name) not in ("ui", "kernels")
    )
    return {
        "files": len(library),
        "lines": sum(by_name[name][0] for name in library),
        "median": statistics.median(by_name[name][0] for name in library),
        "boxes": len(set(files) - set(COLOURS)),
        "fullest": max(folders.values()),
        "arrows of boxes": len(arrows),
        "floors of boxes": 1 + max(floors_of(list(files), arrows).values()),
        "floors of files": 1 + max(floors_of(library, inside).values()),
        "circles of files": len(circles(between)),
    }


def circles(arrows: Arrows) -> list[set[str]]:
    """Return the cycles: sets of names that reach each other."""
    reached = {name: reach(name, arrows) for name in sorted({name for arrow in arrows for name in arrow})}
    cycles: list[set[str]] = []
    for name, others in reached.items():
        circle = {other for other in others if name in reached[other]}
        if circle and circle not in cycles:
            cycles.append(circle)
    return cycles


def reach(name: str, arrows: Arrows) -> set[str]:
    """Return everything that a name reaches; this includes the name itself only if it is on a cycle."""
    reached: set[str] = set()
    open_ = [name]
    while open_:
        here = open_.pop()
        fresh = {target for source, target in arrows if source == here} - reached
        reached |= fresh
        open_ += fresh
    return reached


def floors_of(names: list[str], arrows: Arrows) -> dict[str, int]:
    """Return each name's floor: one above the highest that it points to, or 0. A cycle shares one floor."""
    together = {name: frozenset(circle) for circle in circles(arrows) for name in circle}
    done: dict[str, int] = {}

    def floor(name: str) -> int:
        if name not in done:
            cycle = together.get(name, frozenset({name}))
            below = {target for source, target in arrows if source in cycle} - cycle
            done.update(dict.fromkeys(cycle, 1 + max((floor(other) for other in sorted(below)), default=-1)))
        return done[name]

    return {name: floor(name) for name in names}


def needed(arrows: Arrows) -> list[tuple[str, str]]:
    """Return the arrows from which all others follow, and all arrows within a cycle."""
    around, left = circles(arrows), dict(arrows)
    for source, target in sorted(arrows):
        without = {arrow: count for arrow, count in left.items() if arrow != (source, target)}
        if not any({source, target} <= circle for circle in around) and target in reach(source, without):
            left = without
    return sorted(left)


def picture(by_name: Modules, counts: Row, revision: str | None) -> str:
    """Return the SVG: a row of boxes for each floor, sorted so that few arrows cross."""
    files, arrows = rooms(by_name)
    arrows_left, around, floors = needed(arrows), circles(arrows), floors_of(list(files), arrows)
    about = [
        f"{counts['files']} files of bass_core, {counts['lines']} lines, in {counts['boxes']} boxes on "
        f"{counts['floors of boxes']} floors; circles of files: {counts['circles of files']}.",
        f"{len(arrows)} arrows, of which {len(arrows_left)} are drawn: the others follow. Red ones make a circle.",
    ]
    sizes = {
        name: f"{len(names)} file{'s'[: len(names) > 1]}, {sum(by_name[each][0] for each in names)} lines"
        for name, names in files.items()
    }
    # A long arrow has a bend, a place without a box, on each floor that it passes.
    paths = {
        (source, target): [
            source, *(f"{source}>{target}@{at}" for at in range(floors[source] - 1, floors[target], -1)), target,
        ]
        for source, target in arrows_left
    }  # fmt: skip
    level = floors | {bend: int(bend.rpartition("@")[2]) for path in paths.values() for bend in path[1:-1]}
    rows = [sorted(name for name in level if level[name] == at) for at in range(max(level.values()), -1, -1)]
    widths = {name: 14 + LETTER * max(len(name), len(sizes[name])) for name in files}
    width = max(WIDTH, *(60 + sum(widths.get(name, 4) + 8 for name in row) for row in rows))
    places = _places(rows, paths, widths, width)
    lines = [
        _curve([places[name] for name in path], any(set(arrow) <= circle for circle in around))
        for arrow, path in paths.items()
    ]
    boxes = [_box(name, sizes[name], *places[name]) for name in sorted(files)]
    title = "Who imports whom" + (f", revision {revision}" if revision else "")
    bottom = max(y for _, y, _ in places.values()) + HIGH + 20
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {bottom:.0f}" width="{width:.0f}" '
        f'height="{bottom:.0f}" font-family="DejaVu Sans, Verdana, sans-serif" font-size="11" fill="#222">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
        'orient="auto"><path d="M0 0 8 4 0 8z" fill="context-stroke"/></marker></defs>',
        f'<text x="20" y="32" font-size="16" font-weight="bold">{escape(title)}</text>',
        *(f'<text x="20" y="{54 + 15 * i}">{escape(each)}</text>' for i, each in enumerate(about)),
        *lines, *boxes, "</svg>", "",
    ])  # fmt: skip


def _places(
    rows: list[list[str]], paths: dict[tuple[str, str], list[str]], widths: dict[str, float], total_width: float
) -> dict[str, tuple[float, float, float]]:
    """Return the x of the middle, the y of the top and the width of each name, floor by floor."""
    neighbours: dict[str, list[str]] = {name: [] for row in rows for name in row}
    for path in paths.values():
        for source, target in pairwise(path):
            neighbours[source].append(target)
            neighbours[target].append(source)
    x_share = {name: (i + 0.5) / len(row) for row in rows for i, name in enumerate(row)}
    # Sort each floor by the mean position of its neighbours, down and up a few times, so that fewer arrows cross.
    for row in [row for _ in range(24) for sweep in (rows, rows[::-1]) for row in sweep]:
        means = {
            name: statistics.mean([x_share[other] for other in neighbours[name]] or [x_share[name]])
            for name in row
        }
        row.sort(key=lambda name: (means[name], name))
        x_share |= {name: (i + 0.5) / len(row) for i, name in enumerate(row)}
    places, y = {}, 100.0
    for row in rows:
        gap = (total_width - 40 - sum(widths.get(name, 4) for name in row)) / (len(row) + 1)
        x = 20.0
        for name in row:
            width = widths.get(name, 4)
            places[name] = (x + gap + width / 2, y, width)
            x += gap + width
        y += HIGH + RISE
    return places


def _curve(places: list[tuple[float, float, float]], circle: bool) -> str:
    """Return the SVG of an arrow through its bends."""
    (x, y, width), *bends, (end, floor, end_width) = places
    points = [(x, y + HIGH), *((bend[0], bend[1] + HIGH / 2) for bend in bends), (end, floor)]
    if y == floor:  # on the same floor, draw from side to side
        side = 0.5 if x < end else -0.5
        points = [(x + side * width, y + HIGH / 2), (end - side * end_width, y + HIGH / 2)]
    shape = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in pairwise(points):
        shape += f" C{x0:.1f} {(y0 + y1) / 2:.1f} {x1:.1f} {(y0 + y1) / 2:.1f} {x1:.1f} {y1:.1f}"
    colour = "#c62828" if circle else "#7a8ba3"
    return f'<path d="{shape}" fill="none" stroke="{colour}" stroke-width="1.1" marker-end="url(#tip)"/>'


def _box(name: str, size: str, x: float, y: float, width: float) -> str:
    """Return the SVG of a box: its name in bold, its size below."""
    return (
        f'<rect x="{x - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" height="{HIGH:.0f}" rx="4" '
        f'fill="{COLOURS.get(name, "#ffffff")}" stroke="#345"/>'
        f'<text x="{x:.1f}" y="{y + 17:.1f}" text-anchor="middle" font-weight="bold">{escape(name)}</text>'
        f'<text x="{x:.1f}" y="{y + 32:.1f}" text-anchor="middle">{escape(size)}</text>'
    )
