"""How a lane looks: its label, colour and line style, for the templates and the scripts.

Contract: made from bass_core's table of methods, by a method's index in it; no other file here or in ui/static
names a method. `looks` is plain data, which reaches the scripts in the feed's head. A lane whose method is not in
the table, as in a recording, is labelled with its name.
"""

from __future__ import annotations

from typing import TypedDict

from bass_core import METHODS

# By index: the colour variables of page.css, and Plotly's names for line styles.
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
    lines = zip(METHODS, zip(COLOURS, DASHES, strict=True), strict=False)
    colour, dash = dict(lines).get(name, (OTHER_COLOUR, OTHER_DASH))
    if name not in METHODS:
        return Look(label=name.replace("_", " "), about="", colour=colour, dash=dash, lengths="")
    method = METHODS[name]
    lengths = "" if not method.drafts or method.overlaps else "batch" if method.batched else "row"
    return Look(label=method.label, about=method.about, colour=colour, dash=dash, lengths=lengths)


def looks(names: list[str]) -> dict[str, Look]:
    """The looks of these lanes, by name."""
    return {name: look(name) for name in names}


def reference() -> str:
    """The lane that the others are compared with."""
    return next(name for name, method in METHODS.items() if method.reference)
