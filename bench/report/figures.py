"""Figures of the benches, as PNGs for the documents: make them with `figure` and write them with `draw`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import plotly.io as pio

# Colours that colour-blind people can distinguish (Okabe and Ito 2008).
COLOURS = {
    "regular": "#0072B2", "speculative": "#E69F00", "bass": "#009E73", "amusd": "#CC79A7",
    "generate": "#555555", "bass, cost-aware": "#56B4E9", "assisted": "#F0E442", "prompt lookup": "#D55E00",
}  # fmt: skip


def figure(title: str, x: str, y: str, **layout: Any) -> go.Figure:
    """Return an empty figure with a title and axis titles."""
    chart = go.Figure()
    chart.update_layout(template="plotly_white", title=title, xaxis_title=x, yaxis_title=y, **layout)
    return chart


def draw(bench: str, folder: Path, figures: dict[str, go.Figure]) -> list[str]:
    """Write BENCH-NAME.png for each figure and return the file names.

    Without kaleido or a browser, print a message, write nothing and return an empty list.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{bench}-{name}.png" for name in figures]
    try:
        pio.write_images(list(figures.values()), paths, width=900, height=500, scale=2)
    except (RuntimeError, ValueError, ImportError, OSError) as error:
        why = str(error).strip().splitlines()[0]
        print(f"No pictures: install kaleido and a Chromium or Chrome ({why}).", file=sys.stderr)
        return []
    return [path.name for path in paths]
