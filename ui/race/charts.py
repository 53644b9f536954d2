"""The live charts. Contract: static HTML, in which charts.js draws the feed's series with Plotly."""

from __future__ import annotations

from bass_core import DEFAULT_LANES
from ui.race.looks import look
from ui.words.formulas import FORMULAS, titled, what

CHARTS = {
    "latency": ("ms per token of one sequence", "over lane time, lower is better"),
    "race": ("The race", "new tokens of all sequences over lane time"),
    "acceptance": ("Draft acceptance rate", "accepted / drafted (of trees: path / nodes), over lane time"),
    "lengths": ("Draft length", "of each round (of trees: depth), over lane time"),
    "flops": ("FLOPs utilisation", "of the device's peak, by lane, over lane time"),
    "device": ("Device", "share of time busy, all running lanes together"),
    "memory": ("Memory and power", "of the device, or of this process without a GPU"),
    "cache": ("Keys and values", "held by each lane, a shared prefix only once"),
}
READINGS = {
    "gpu_utilization": "GPU utilization (NVML: share of time busy)",
    "gpu_memory_mb": "GPU memory",
    "gpu_power_w": "GPU power",
    "flops_utilization": "FLOPs utilisation",
    "cpu_percent": "CPU share of this process",
    "rss_mb": "Memory of this process",
}
SMALL_PRINT = (
    "Each lane has its own clock, which counts only the time that the device spent on that lane: the lanes "
    "advance as they would on identical machines, only slower. Tokens appear in the order and at the pace of "
    "their lane's clock, at most one update (about a tenth of a second) after they were written. The charts of "
    "long runs show every second, fourth, ... point. A question mark beside a figure says how it is computed."
)


def _key(name: str) -> str:
    """A lane's line and label, until a race brings its own lanes."""
    shown = look(name)
    line = f'<span class="line line-{shown["dash"]}" style="--line-colour: var(--{shown["colour"]})"></span>'
    return f"<li>{line}{shown['label']}</li>"


def _key_of(chart: str) -> str:
    """The key of a chart's formula."""
    return f"chart_{chart}" if f"chart_{chart}" in FORMULAS else f"{chart}_utilization"


def template() -> str:
    """One figure for each chart, and the device's readings as text."""
    figures = "".join(
        f'<figure class="chart" data-chart="{name}"><figcaption>{titled(_key_of(name), title)}'
        f'<span>{about}</span></figcaption><div class="plot" role="group" aria-label="{title}, {about}"></div>'
        "</figure>"
        for name, (title, about) in CHARTS.items()
    )
    readings = "".join(
        f'<div><dt>{label}{what(key)}</dt><dd data-reading="{key}">–</dd></div>' for key, label in READINGS.items()
    )
    return f"""<section class="bass-charts part" aria-labelledby="charts-title">
<div class="part-head"><h2 id="charts-title">Live charts</h2>
<ul class="line-key" aria-label="The lanes' lines">{"".join(map(_key, DEFAULT_LANES))}</ul>
<button type="button" class="switch" id="pause-charts">Pause charts</button></div>
<div class="chart-grid">{figures}</div>
<dl class="readings"><div><dt>Device{what("name")}</dt><dd data-reading="name">–</dd></div>{readings}</dl>
<p class="small-print">{SMALL_PRINT}</p></section>"""
