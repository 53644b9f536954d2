"""A layered drawing of a directed graph, as SVG: boxes on floors, joined by arrows.

Contract: `draw` puts each box above everything that it points to, and leaves out arrows that follow from others
(transitive reduction). Boxes of one cycle share a floor, with red arrows. The same input gives the same text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

WIDTH, MARGIN, GAP, RISE = 1000, 20, 12, 34
TITLE, LINE, LETTER = 20, 15, 6.7
Arrow = tuple[str, str]


@dataclass
class Box:
    """A box: a name in bold with lines of small text below it."""

    name: str
    lines: tuple[str, ...] = ()
    colour: str = "#ffffff"

    @property
    def width(self) -> float:
        return 14 + LETTER * max(len(text) for text in (self.name, *self.lines)) * (1 if self.lines else 0.95)

    @property
    def height(self) -> float:
        return 12 + LINE * (1 + len(self.lines))


@dataclass
class _Place:
    """The position of a box, or of a bend in a long arrow."""

    width: float
    height: float
    x: float = 0.0
    y: float = 0.0


@dataclass
class _Floors:
    """Names floor by floor from the top, their places, and the arrow segments between neighbouring floors."""

    rows: list[list[str]] = field(default_factory=list)
    places: dict[str, _Place] = field(default_factory=dict)
    paths: dict[Arrow, list[str]] = field(default_factory=dict)


def circles(arrows: dict[Arrow, int]) -> list[set[str]]:
    """The cycles: sets of names that reach each other."""
    names = sorted({name for arrow in arrows for name in arrow})
    reached = {name: reach(name, arrows) for name in names}
    found: list[set[str]] = []
    for name in names:
        circle = {other for other in reached[name] if name in reached[other]}
        if circle and circle not in found:
            found.append(circle)
    return found


def reach(name: str, arrows: dict[Arrow, int]) -> set[str]:
    """Everything that can be reached from a name; includes the name itself only if it is on a cycle."""
    found: set[str] = set()
    open_ = [name]
    while open_:
        here = open_.pop()
        fresh = {target for source, target in arrows if source == here} - found
        found |= fresh
        open_ += fresh
    return found


def floors_of(names: list[str], arrows: dict[Arrow, int]) -> dict[str, int]:
    """Each name's floor, 0 the lowest: one above the highest that it points to. A cycle shares one floor."""
    together = {name: frozenset(circle) for circle in circles(arrows) for name in circle}
    done: dict[str, int] = {}

    def floor(name: str) -> int:
        if name not in done:
            own = together.get(name, frozenset({name}))
            below = {target for source, target in arrows if source in own} - own
            level = 1 + max((floor(other) for other in sorted(below)), default=-1)
            done.update(dict.fromkeys(own, level))
        return done[name]

    return {name: floor(name) for name in names}


def needed(arrows: dict[Arrow, int]) -> list[Arrow]:
    """The arrows from which all others follow; arrows within a cycle are all kept."""
    around = circles(arrows)
    left = dict(arrows)
    for source, target in sorted(arrows):
        without = {arrow: count for arrow, count in left.items() if arrow != (source, target)}
        inside = any({source, target} <= circle for circle in around)
        if not inside and target in reach(source, without):
            left = without
    return sorted(left)


def draw(title: str, about: list[str], boxes: list[Box], arrows: dict[Arrow, int], counts: bool = True) -> str:
    """The picture: title, lines of text below it, boxes. arrows[(from, to)] is the number beside an arrow."""
    known = {box.name: box for box in boxes}
    around = circles(arrows)
    kept = needed(arrows)
    made = _arrange(known, kept, floors_of(list(known), arrows))
    top = MARGIN + TITLE + LINE * len(about) + 16
    bottom = _place(made, top)
    lines = [
        _path(made, arrow, arrows[arrow], counts, any(set(arrow) <= circle for circle in around)) for arrow in kept
    ]
    drawn = [_box(known[name], place) for name, place in made.places.items() if name in known]
    words = [
        f'<text x="{MARGIN}" y="{MARGIN + TITLE + LINE * (i + 1)}">{escape(one)}</text>'
        for i, one in enumerate(about)
    ]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom:.0f}" width="{WIDTH}" '
        f'height="{bottom:.0f}" font-family="DejaVu Sans, Verdana, sans-serif" font-size="11" fill="#222">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
        'orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="context-stroke"/></marker></defs>',
        f'<text x="{MARGIN}" y="{MARGIN + 12}" font-size="16" font-weight="bold">{escape(title)}</text>',
        *words, *lines, *drawn, "</svg>", "",
    ])  # fmt: skip


def _arrange(boxes: dict[str, Box], arrows: list[Arrow], floors: dict[str, int]) -> _Floors:
    """Assign names to floors, top first; a long arrow has a bend on each floor that it passes."""
    top = max(floors.values(), default=0)
    made = _Floors(rows=[[] for _ in range(top + 1)])
    for name in sorted(boxes):
        made.rows[top - floors[name]].append(name)
        made.places[name] = _Place(boxes[name].width, boxes[name].height)
    for source, target in arrows:
        passed = range(floors[source] - 1, floors[target], -1)
        bends = [f"{source}>{target}@{floor}" for floor in passed]
        for floor, bend in zip(passed, bends, strict=True):
            made.rows[top - floor].append(bend)
            made.places[bend] = _Place(4, 0)
        made.paths[source, target] = [source, *bends, target]
    _untangle(made)
    return made


def _untangle(made: _Floors) -> None:
    """Reduce crossings: order each floor by its neighbours' mean positions, sweeping down and up a few times."""
    steps = [pair for path in made.paths.values() for pair in pairwise(path)]
    beside: dict[str, list[str]] = {name: [] for name in made.places}
    for source, target in steps:
        beside[source].append(target)
        beside[target].append(source)
    where = {name: (i + 0.5) / len(row) for row in made.rows for i, name in enumerate(row)}
    for _ in range(24):
        for rows in (made.rows, made.rows[::-1]):
            for row in rows:
                means = {
                    n: sum(where[o] for o in beside[n]) / len(beside[n]) if beside[n] else where[n] for n in row
                }
                row.sort(key=lambda name: (means[name], name))
                where.update({name: (i + 0.5) / len(row) for i, name in enumerate(row)})


def _place(made: _Floors, top: float) -> float:
    """Set the positions: each floor spread over the width, floors below each other. Returns the picture's height.

    A floor too wide for the picture is broken into rows.
    """
    y = top
    for row in made.rows:
        for part in _broken(row, made.places):
            free = WIDTH - 2 * MARGIN - sum(made.places[name].width for name in part)
            gap, x = free / (len(part) + 1), float(MARGIN)
            tall = max(made.places[name].height for name in part)
            for name in part:
                place = made.places[name]
                place.x, place.y = x + gap + place.width / 2, y + (tall - place.height) / 2
                x += gap + place.width
            y += tall + GAP
        y += RISE - GAP
    return y


def _broken(row: list[str], places: dict[str, _Place]) -> list[list[str]]:
    """A floor broken into rows that fit the picture's width."""
    parts: list[list[str]] = [[]]
    used = 0.0
    for name in row:
        width = places[name].width + GAP
        if parts[-1] and used + width > WIDTH - 2 * MARGIN:
            parts.append([])
            used = 0.0
        parts[-1].append(name)
        used += width
    return parts


def _path(made: _Floors, arrow: Arrow, count: int, counts: bool, circle: bool) -> str:
    """The SVG of an arrow through its bends, with the number of imports it stands for."""
    places = [made.places[name] for name in made.paths[arrow]]
    first, last = places[0], places[-1]
    points = [(first.x, first.y + first.height), *((one.x, one.y) for one in places[1:-1]), (last.x, last.y)]
    if first.y >= last.y:  # on the same floor: from side to side
        right = first.x < last.x
        points = [
            (first.x + (first.width / 2 if right else -first.width / 2), first.y + first.height / 2),
            (last.x - (last.width / 2 if right else -last.width / 2), last.y + last.height / 2),
        ]
    shape = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in pairwise(points):
        middle = (y0 + y1) / 2
        shape += f" C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {y1:.1f}"
    colour = "#c62828" if circle else "#7a8ba3"
    line = f'<path d="{shape}" fill="none" stroke="{colour}" stroke-width="1.1" marker-end="url(#tip)"/>'
    if not counts:
        return line
    (x0, y0), (x1, y1) = points[-2], points[-1]
    x, y = x0 + 0.72 * (x1 - x0), y0 + 0.66 * (y1 - y0)
    return f'{line}<text x="{x + 4:.1f}" y="{y:.1f}" font-size="10" fill="#456">{count}</text>'


def _box(box: Box, place: _Place) -> str:
    """The SVG of a box with its lines of text."""
    left = place.x - place.width / 2
    texts = [
        f'<text x="{place.x:.1f}" y="{place.y + 6 + LINE * (i + 0.75):.1f}" text-anchor="middle"'
        f"{' font-weight=' + chr(34) + 'bold' + chr(34) if not i else ''}>{escape(text)}</text>"
        for i, text in enumerate((box.name, *box.lines))
    ]
    return (
        f'<rect x="{left:.1f}" y="{place.y:.1f}" width="{place.width:.1f}" height="{place.height:.1f}" rx="4" '
        f'fill="{box.colour}" stroke="#345"/>' + "".join(texts)
    )
