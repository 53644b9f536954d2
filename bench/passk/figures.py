"""The figures of passk, drawn from its document alone."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from ..report.figures import COLOURS, Report, figure

ABOUT = (
    "HumanEval problems within a time budget on each lane's own clock, prefill included. A sequence is finished "
    "when it closes its code block. Shares of problems carry 95 % Wilson intervals."
)
_DASHES = ("dot", "dash", "solid", "dashdot", "longdash", "longdashdot")


def draw(document: dict[str, Any]) -> Report:
    """The report: finished sequences against the budget, and Pass@All where programs were executed."""
    rows = document["results"]
    figures = {"finished": finished(rows)}
    if rows[0]["Pass@All"] is not None:
        figures["pass"] = passed(rows)
    return Report(document, ABOUT, figures)


def finished(rows: list[dict[str, Any]]) -> go.Figure:
    """Finished sequences per problem against the budget, a line for each method and n."""
    made = figure("Finished within the budget", "budget, ms of the lane's clock", "finished sequences a problem")
    sizes = sorted({row["n"] for row in rows})
    for method, n in dict.fromkeys((row["method"], row["n"]) for row in rows):
        line = [row for row in rows if (row["method"], row["n"]) == (method, n)]
        made.add_scatter(
            x=[row["budget ms"] for row in line],
            y=[row["finished"] / row["problems"] for row in line],
            name=f"{method}, {n} a problem",
            mode="lines+markers",
            line={"color": COLOURS[method], "dash": _DASHES[sizes.index(n) % len(_DASHES)]},
        )
    return made


def passed(rows: list[dict[str, Any]]) -> go.Figure:
    """Pass@All against n at the middle budget, with 95 % intervals."""
    budgets = sorted({row["budget ms"] for row in rows})
    budget = budgets[len(budgets) // 2]
    made = figure(f"Pass@All within {budget} ms", "sequences a problem", "share of problems", barmode="group")
    for method in dict.fromkeys(row["method"] for row in rows):
        bars = [row for row in rows if (row["method"], row["budget ms"]) == (method, budget)]
        made.add_bar(
            x=[str(row["n"]) for row in bars],
            y=[row["Pass@All"] for row in bars],
            name=method,
            marker={"color": COLOURS[method]},
            error_y={
                "array": [row["95 % all"][1] - row["Pass@All"] for row in bars],
                "arrayminus": [row["Pass@All"] - row["95 % all"][0] for row in bars],
            },
        )
    return made
