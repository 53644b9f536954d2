"""The figures of a bench, as PNGs for the documents.

Contract: `draw(bench, folder, figures)` writes BENCH-NAME.png for each figure and returns their names; without
kaleido or a browser it writes nothing and says so.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import plotly.io as pio

# Colours that colour-blind people can tell apart (Okabe and Ito 2008).
COLOURS = {
    "regular": "#0072B2", "speculative": "#E69F00", "bass": "#009E73", "amusd": "#CC79A7",
    "generate": "#555555", "bass, cost-aware": "#56B4E9", "assisted": "#F0E442", "prompt lookup": "#D55E00",
}  # fmt: skip


def figure(title: str, x: str, y: str, **layout: Any) -> go.Figure:
    """An empty figure with a title and axis titles."""
    made = go.Figure()
    made.update_layout(template="plotly_white", title=title, xaxis_title=x, yaxis_title=y, **layout)
    return made


def draw(bench: str, folder: Path, figures: dict[str, go.Figure]) -> list[str]:
    """Write the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{bench}-{name}.png" for name in figures]
    try:
        pio.write_images(list(figures.values()), paths, width=900, height=500, scale=2)
    except (RuntimeError, ValueError, ImportError, OSError) as error:
        why = str(error).strip().splitlines()[0]
        print(f"No pictures: install kaleido and a Chromium or Chrome ({why}).", file=sys.stderr)
        return []
    return [path.name for path in paths]
