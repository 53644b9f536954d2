"""The look of a lane: label, colour and line style, for the templates and the scripts.

`look` chooses these by the method's index in bass_core's table. No other file of ui names a method. The scripts
get `looks` in the feed's head. A lane whose method is not in the table, e.g. in an old recording, is labelled with
its name.
"""

from __future__ import annotations

from typing import TypedDict

from bass_core import METHODS

# By index in METHODS: the colour variables of page.css, and Plotly's names of line styles.
COLOURS = ("lane-1", "lane-2", "lane-3", "lane-4", "lane-5")
DASHES = ("dot", "dash", "solid", "dashdot", "longdashdot")
# By `lengths`.
LINES = {"batch": "guesses, checks, all rows at once", "row": "guesses, checks, one row at a time"}
OTHER_COLOUR, OTHER_DASH = "lane-other", "longdash"


class Look(TypedDict):
    """The look of one lane.

    Attributes:
        label: the name that the page shows.
        about: explains the label.
        line: what the lane does, in a few words below its figures.
        colour: a variable of page.css without its leading dashes.
        dash: Plotly's line style; page.css has a class "line-..." for each.
        lengths: how its draft lengths can be replayed: "batch" (one list for all rows), "row" (one list for each
            row) or "" (not at all).
    """

    label: str
    about: str
    line: str
    colour: str
    dash: str
    lengths: str


def look(name: str) -> Look:
    """Return the look of one lane."""
    lines = zip(METHODS, zip(COLOURS, DASHES, strict=True), strict=False)
    colour, dash = dict(lines).get(name, (OTHER_COLOUR, OTHER_DASH))
    if name not in METHODS:
        return Look(label=name.replace("_", " "), about="", line="", colour=colour, dash=dash, lengths="")
    method = METHODS[name]
    lengths = "" if not method.drafts or method.overlaps else "batch" if method.batched else "row"
    line = (
        LINES[lengths] if lengths else "guesses while it checks" if method.drafts else "one token per row and step"
    )
    return Look(label=method.label, about=method.about, line=line, colour=colour, dash=dash, lengths=lengths)


def looks(names: list[str]) -> dict[str, Look]:
    """Return the looks of these lanes by name."""
    return {name: look(name) for name in names}


def reference() -> str:
    """Return the name of the lane that the others are compared with."""
    return next(name for name, method in METHODS.items() if method.reference)
