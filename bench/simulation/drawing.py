"""The figures of the simulate bench, drawn from its document alone."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from ..report.figures import COLOURS, Report, figure
from .sweeps import crossover

ABOUT = (
    "Everything here but the columns called measured is predicted: from datasheet numbers, from assumptions about "
    "how much of them a step reaches, or from a table measured on this machine. Speed-up is over regular decoding "
    "on the same hardware."
)
_PALETTE = list(COLOURS.values())
Row = dict[str, Any]


def report(document: dict[str, Any]) -> Report:
    """Figures of speed-up over batch size, context and number of GPUs, and of predicted against measured."""
    rows: list[Row] = document["results"]
    made = {
        "batch": _batch([row for row in rows if row["section"] in ("batch", "this machine")]),
        "context": _lines(
            [row for row in rows if row["section"] == "context"],
            "context",
            "Predicted speed-up of Algorithm 1 over the context, 7.8B, batch 8",
            "cached tokens a row",
        ),
        "gpus": _lines(
            [row for row in rows if row["section"] == "gpus"],
            "gpus",
            "Predicted speed-up of Algorithm 1 over the number of GPUs, 70B, batch 8",
            "GPUs, tensor parallel",
        ),
    }
    measured = [row for row in rows if row["section"] == "validation"]
    if measured:
        made["validation"] = _validation(measured)
    return Report(document, ABOUT, made)


def _batch(rows: list[Row]) -> go.Figure:
    """Solid lines for Algorithm 1, dotted for the cost-aware policy; a cross where Algorithm 1 stops paying."""
    made = figure(
        "Predicted speed-up over the batch (x: where Algorithm 1 stops paying; dotted: cost-aware)",
        "batch",
        "speed-up over regular decoding",
    )
    made.update_xaxes(type="log", tickvals=sorted({row["batch"] for row in rows}))
    for colour, (name, mine) in zip(_PALETTE, _by_hardware(rows).items(), strict=False):
        batches = [row["batch"] for row in mine]
        end = crossover([(row["batch"], row["Algorithm 1"]) for row in mine])
        label = f"{name}: pays" if end is None else f"{name}: until {end:.0f}"
        for policy, dash in (("Algorithm 1", "solid"), ("cost-aware", "dot")):
            made.add_scatter(x=batches, y=[row[policy] for row in mine], mode="lines+markers", name=label,
                             line={"color": colour, "dash": dash}, showlegend=dash == "solid")  # fmt: skip
        if end is not None:
            made.add_scatter(x=[end], y=[1.0], mode="markers", showlegend=False,
                             marker={"symbol": "x", "size": 12, "color": colour})  # fmt: skip
    made.add_hline(y=1.0, line={"color": "#888", "width": 1})
    return made


def _lines(rows: list[Row], over: str, title: str, x: str) -> go.Figure:
    made = figure(title, x, "speed-up over regular decoding", yaxis_rangemode="tozero")
    made.update_xaxes(type="log", tickvals=sorted({row[over] for row in rows}))
    for colour, (name, mine) in zip(_PALETTE, _by_hardware(rows).items(), strict=False):
        fitting = [row for row in mine if row["fits"]]
        if not fitting:
            continue
        made.add_scatter(x=[row[over] for row in fitting], y=[row["Algorithm 1"] for row in fitting],
                         mode="lines+markers", name=name, line={"color": colour})  # fmt: skip
    return made


def _validation(rows: list[Row]) -> go.Figure:
    made = figure("ms per token on this machine, predicted over measured", "measured", "predicted")
    for colour, held, name in ((_PALETTE[0], False, "batch in the table"), (_PALETTE[6], True, "batch held out")):
        mine = [row for row in rows if row["held out"] is held]
        made.add_scatter(
            x=[row["measured ms/token"] for row in mine],
            y=[row["predicted ms/token"] for row in mine],
            mode="markers",
            name=name,
            marker={"color": colour, "size": 10},
            text=[f"batch {row['batch']}, {row['arm']}" for row in mine],
        )
    most = max(max(row["measured ms/token"], row["predicted ms/token"]) for row in rows)
    made.add_scatter(x=[0, most], y=[0, most], mode="lines", line={"color": "#888", "width": 1}, name="equal")
    return made


def _by_hardware(rows: list[Row]) -> dict[str, list[Row]]:
    return {
        name: [row for row in rows if row["hardware"] == name]
        for name in dict.fromkeys(row["hardware"] for row in rows)
    }
