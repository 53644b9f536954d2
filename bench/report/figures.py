"""A bench's report: one self-contained HTML page, and a PNG of each figure for the README.

Contract: `Report.write(folder)` writes NAME.html, which loads nothing from the network, and NAME-FIGURE.png beside
it; without kaleido or a browser the PNGs are left out with a message. Figures are drawn only from the document, so
a stored JSON file can be drawn again.
"""

from __future__ import annotations

import html
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import plotly.io as pio
from plotly.offline import get_plotlyjs

# Colours that colour-blind people can tell apart (Okabe and Ito 2008).
COLOURS = {
    "regular": "#0072B2", "speculative": "#E69F00", "bass": "#009E73", "amusd": "#CC79A7",
    "generate": "#555555", "bass, cost-aware": "#56B4E9", "assisted": "#F0E442", "prompt lookup": "#D55E00",
}  # fmt: skip
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:1000px;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:.2rem .7rem;text-align:right;"
    "border-bottom:1px solid #ddd}.wide{overflow-x:auto}"
)


def figure(title: str, x: str, y: str, **layout: Any) -> go.Figure:
    """An empty figure with a title and axis titles."""
    made = go.Figure()
    made.update_layout(template="plotly_white", title=title, xaxis_title=x, yaxis_title=y, **layout)
    return made


@dataclass
class Report:
    """A page: the `document` that bench/report/report.py made, text about it, and figures by name."""

    document: dict[str, Any]
    about: str
    figures: dict[str, go.Figure] = field(default_factory=dict)

    def write(self, folder: Path) -> list[Path]:
        """Write the page and the pictures; returns the paths of the files written."""
        folder.mkdir(parents=True, exist_ok=True)
        page = folder / f"{self.document['bench']}.html"
        page.write_text(self._html(), encoding="utf-8")
        written = [page]
        pictures = [folder / f"{self.document['bench']}-{name}.png" for name in self.figures]
        try:
            pio.write_images(list(self.figures.values()), pictures, width=900, height=500, scale=2)
        except (RuntimeError, ValueError, ImportError, OSError) as error:
            why = str(error).strip().splitlines()[0]
            print(f"No pictures: install kaleido and a Chromium or Chrome ({why}).", file=sys.stderr)
            return written
        return written + pictures

    def _html(self) -> str:
        made = self.document
        drawn = [one.to_html(full_html=False, include_plotlyjs=False) for one in self.figures.values()]
        facts = [made["device"], made["date"], *(f"{k} {v}" for k, v in made["versions"].items())]
        title = html.escape(f"python -m bench {made['bench']}")
        return "\n".join([
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>",
            f"<p>{html.escape(self.about)}</p>",
            f"<p>{html.escape(', '.join(facts))}, revision {made['revision']}.</p>",
            f"<script>{get_plotlyjs()}</script>",
            *drawn,
            _table(made["results"]),
            "<h2>Claims</h2>",
            _table(made["claims"]),
            "</body></html>",
        ])  # fmt: skip


def _table(rows: list[dict[str, Any]]) -> str:
    heads = list(dict.fromkeys(head for row in rows for head in row))
    lines = [f"<tr>{''.join(f'<td>{_cell(row.get(head))}</td>' for head in heads)}</tr>" for row in rows]
    first = "".join(f"<th>{html.escape(head)}</th>" for head in heads)
    return f'<div class="wide"><table><tr>{first}</tr>{"".join(lines)}</table></div>'


def _cell(value: Any) -> str:
    if value is None:
        return "n/a"
    return html.escape(f"{value:.3g}" if isinstance(value, float) else str(value))
