"""How a lane looks: its label, colour and line style, for the templates and the scripts.

Contract: made from bass_core's table of methods, by a method's place in it; no other file here or in ui/static
names a method. `looks` is plain data, which reaches the scripts in the feed's head. A lane whose method is not in
the table, as in a recording, is labelled with its name.
"""

from __future__ import annotations

from typing import TypedDict

from bass_core import METHODS

# By place: the colour variables of page.css, and Plotly's names for line styles.
COLOURS = ("lane-1", "lane-2", "lane-3", "lane-4", "lane-5")
DASHES = ("dot", "dash", "solid", "dashdot", "longdashdot")
OTHER_COLOUR, OTHER_DASH = "lane-other", "longdash"


class Look(TypedDict):
    """What the page knows of a lane.

    colour: a variable of page.css without its dashes. dash: Plotly's line style, in page.css a class "line-...".
    lengths: how its draft lengths can be replayed: "batch", one list for all rows; "row", one for each; "" not.
    """

    label: str
    about: str
    colour: str
    dash: str
    lengths: str


def look(name: str) -> Look:
    """The look of one lane."""
    if name not in METHODS:
        return Look(
            label=name.replace("_", " "), about="", colour=OTHER_COLOUR, dash=OTHER_DASH, lengths=""
        )  # fmt: skip
    method, place = METHODS[name], list(METHODS).index(name)
    known = place < len(COLOURS)
    lengths = "batch" if method.batched else "row"
    return Look(
        label=method.label,
        about=method.about,
        colour=COLOURS[place] if known else OTHER_COLOUR,
        dash=DASHES[place] if known else OTHER_DASH,
        lengths=lengths if method.drafts and not method.overlaps else "",
    )


def looks(names: list[str]) -> dict[str, Look]:
    """The looks of these lanes, by name."""
    return {name: look(name) for name in names}


def reference() -> str:
    """The lane that the others are compared with."""
    return next(name for name, method in METHODS.items() if method.reference)
