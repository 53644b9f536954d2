"""Static HTML of the parts that show a race: lanes, charts, inspector and summary.

The scripts of ui/static/race fill them, using only textContent. No value from outside may enter these templates,
because Gradio evaluates templates as code. lanes.js adds a section for each lane that has none here.
"""

from __future__ import annotations

from bass_core import DEFAULT_LANES
from ui.race import code
from ui.race.formulas import FORMULAS, formula_button, term, titled
from ui.race.looks import look
from ui.sweep import readers

ORIGINS = {
    "sampled": "from the target, nothing drafted",
    "accepted": "drafted and accepted",
    "recovered": "replaces a rejected draft",
    "bonus": "follows drafts that were all accepted",
}
# Words of the legend for the origins, for drafts and for rejected ones.
SPOKEN = {
    "draft": "guess",
    "accepted": "kept",
    "certain": "certain",
    "rejected": "struck",
    "recovered": "instead",
    "bonus": "extra",
    "sampled": "sampled",
}
# In a race on a predicted clock, predicted.js marks the elements that have these attributes. HERE marks a figure
# that is measured on this machine even in such a race.
BADGE, WORD, HERE = (f'data-predicted="{kind}"' for kind in ("badge", "word", "here"))
# A lane's figures: metric -> label. The first is shown large.
FIGURES = {
    "speedup": "over Regular",
    "ms_per_token": 'ms per token<span class="per-row">, per row</span>',
    "acceptance_rate": "accepted",
}
TIMED = ("speedup", "ms_per_token")
# Every lane shows the figures' labels, but the Tab key stops only at this one's, until lanes.js chooses among the
# lanes of a race. Regular decoding (the first lane) shows no acceptance and no label for its own speed.
STOP = DEFAULT_LANES[1]
# Switches: (label, initially on, title).
SWITCHES = {
    "colours": ("Origins", True, "Colour tokens by where they came from"),
    "whole": ("Whole texts", False, "Show each text in full"),
    "stepping": ("Step by step", False, "See the code run on a round, line by line"),
}
CELLS = {
    "past": "before this round",
    "accepted": "accepted",
    "recovered": "recovered",
    "bonus": "bonus",
    "sampled": "sampled",
    "rejected": "rejected, thrown away",
    "untested": "not tested, thrown away",
    "ghost": "with one common stop",
}
_KEY = "".join(f'<li><i class="cell cell-{kind}"></i>{meaning}</li>' for kind, meaning in CELLS.items())
VERDICT = f"""<section class="verdict" aria-label="Verdict" {BADGE}>
<div class="opening" hidden><div class="opening-scenes" role="group" aria-label="Scenes"></div>
<button type="button" class="action" data-skip>Skip</button></div>
<p class="verdict-head" aria-live="off">Three decoders, one model: which is fastest?</p>
<p class="verdict-exact"></p>
<button type="button" class="action verdict-draws" hidden>Same distribution?</button><p class="asked"></p>
<p class="said" aria-live="polite"></p><ul></ul>
<div class="verdict-more" hidden><button type="button" class="action" data-why>Why?</button>
<button type="button" class="action" data-take="card" title="Save as a picture">Save picture</button>
<button type="button" class="action" data-take="page" title="Save as a page" hidden>Save page</button></div>
</section>"""
# One round of one row and the code that runs it, drawn by step.js.
STEP = f"""<section class="step-part" aria-label="Step by step" hidden><div class="pickers">
<label>Lane <select data-walk="lane"></select></label>
<label>Row <select data-walk="sequence"></select></label>
<button type="button" data-go="-1">‹ Previous round</button>
<button type="button" data-go="1">Next round ›</button>
<label><input type="checkbox" data-drafted checked> Only rounds with drafts</label>
<button type="button" data-close>Close</button></div>
<p class="step-line" role="status"></p>
<p class="step-context"></p>
<div class="step-sides"><div class="step-side">
<div class="pickers step-run"><button type="button" data-line="-1" title="Left arrow key">‹ Line</button>
<button type="button" data-run-code>Play</button>
<button type="button" data-line="1" title="Right arrow key">Line ›</button></div>
<p class="step-note" aria-live="polite"></p>
<div class="step-table" tabindex="0" role="group" aria-label="The values of this round"></div>
<div class="step-ended"></div><p class="step-rule"></p></div>
<div class="step-code">{code.template()}</div></div></section>"""
# The speeds of the playhead: the button's text, its name.
SPEEDS = {
    "1": ("1×", "Real speed"),
    "0.25": ("¼", "A quarter of real speed"),
    "0.1": ("⅒", "A tenth of real speed"),
}
_SPEEDS = "".join(
    f'<button type="button" class="action motion" data-speed="{value}" aria-label="{title}" title="{title}" '
    f"disabled>{label}</button>"
    for value, (label, title) in SPEEDS.items()
)
# The time axis of all lanes, drawn by axis.js.
AXIS = f"""<section class="axis" aria-label="The race over time" {WORD}><div class="axis-lanes"></div>
<div class="axis-over" aria-hidden="true"><div class="axis-cover"></div><div class="axis-line"></div>
<div class="axis-ruler"></div></div>
<input class="axis-slider" type="range" min="0" max="1" value="0" step="any" aria-label="Time of the race"
disabled>
<div class="axis-play" role="group" aria-label="Playback">
<button type="button" class="action motion" data-tape="play" disabled>Play</button>{_SPEEDS}
<button type="button" class="action" data-tape="back" aria-label="Step back" disabled>◂</button>
<button type="button" class="action" data-tape="next" disabled>Step ▸</button>
<button type="button" class="action" data-tape="live" hidden>Live</button>
<p class="axis-words"></p>{readers.slider()}{formula_button("axis")}</div></section>"""
# The rows' lengths, drawn by cache.js and shown only if there are several rows.
CACHE = f"""<section class="part cache-part" aria-labelledby="cache-title" hidden>
<div class="part-head"><h2 id="cache-title">The ragged cache</h2>
<p class="part-about">One bar per row: its new tokens, and the cells of this round. Below it, dashed: the same
rounds if the whole batch stopped at its first rejection. On the right: both lengths.
{formula_button("cache_rows")}</p></div>
<div class="pickers cache-pick"><label>Lane <select></select></label>
<label>Round <input type="range" min="0" max="0" value="0" step="1"></label></div>
<ul class="cache-key" aria-label="Kinds of cells">{_KEY}</ul>
<ol class="cache-rows" aria-label="Rows"></ol>
<p class="cache-line" role="status" aria-live="off">No round yet.</p></section>"""
# All lanes' figures and Run on a phone, filled by glance.js.
GLANCE = """<section class="glance" aria-label="Lanes and Run" hidden>
<p></p><ul></ul><button type="button" class="glance-run"></button></section>"""


def lanes() -> str:
    """Return the verdict, the legend, a section for each lane, the switches and the tip of a token."""
    keys = "".join(
        f'<li class="of-{kind}">'
        f"{term(kind, word, kind if kind not in ORIGINS else f'token {kind}')}"
        f"{'' if word == kind else f'<small> ({kind})</small>'}</li>"
        for kind, word in SPOKEN.items()
    )
    switches = "".join(
        f'<button type="button" class="switch" data-switch="{name}" aria-pressed="{str(on).lower()}" '
        f'title="{title}">{label}</button>'
        for name, (label, on, title) in SWITCHES.items()
    )
    return f"""<div class="bass-lanes">
{VERDICT}
{AXIS}
{STEP}
<div class="toolbar"><ul class="legend" aria-label="Where a token came from">{keys}</ul>
<p class="race-note"></p></div>
<div class="lane-grid">{"".join(map(_lane, DEFAULT_LANES))}</div>
<div class="switches">{switches}</div>
{CACHE}
{GLANCE}
<div class="token-tip" role="tooltip" hidden></div>
<div class="spoken board-spoken" role="status" aria-live="polite"></div></div>"""


def _lane(name: str) -> str:
    shown = look(name)
    figures = "".join(
        f'<div class="of-{key}"><dt {WORD if key in TIMED else ""}>'
        f"{term(key, label, again=name != STOP)}</dt>"
        f'<dd data-figure="{key}" {"data-timed" if key in TIMED else ""}>–</dd></div>'
        for key, label in FIGURES.items()
    )
    return f"""<section class="lane" id="lane-{name}" data-lane="{name}" style="--lane: var(--{shown["colour"]})"
aria-labelledby="lane-{name}-title">
<header><div class="lane-title" {BADGE}>
<h2 id="lane-{name}-title">{term(f"lane-{name}", shown["label"])}</h2></div></header>
<dl class="figures">{figures}</dl>
<div class="state-row"><p class="lane-line">{shown["line"]}</p>
<p class="state" role="status" aria-live="polite">Ready</p><p class="read"></p>
<progress class="read-bar" max="1" value="0" aria-label="Part of the prompt that is read"></progress></div>
<ol class="sequences" aria-labelledby="lane-{name}-title"></ol>
</section>"""


# In a race on a predicted clock, LANE_CHARTS show predicted figures. The other charts always show this machine.
LANE_CHARTS = {
    "latency": ("ms per token of one sequence", "over lane time, lower is better"),
    "race": ("The race", "new tokens of all sequences over lane time"),
    "acceptance": ("Draft acceptance rate", "accepted / drafted (for trees: path / nodes), over lane time"),
    "lengths": ("Draft length", "of each round (for trees: depth), over lane time"),
    "flops": ("FLOPs utilisation", "share of the device's peak, by lane, over lane time"),
}
CHARTS = LANE_CHARTS | {
    "device": ("Device", "share of time busy, all running lanes together"),
    "memory": ("Memory and power", "of the device, or of this process if there is no GPU"),
    "cache": ("Keys and values", "stored by each lane, a shared prefix only once"),
}
# Readings of this process need no mark: their labels name it.
READINGS = {
    "name": ("Device", HERE),
    "gpu_utilization": ("GPU utilization (NVML: share of time busy)", HERE),
    "gpu_memory_mb": ("GPU memory", HERE),
    "gpu_power_w": ("GPU power", HERE),
    "gpu_energy_mj": ("GPU energy", HERE),
    "gpu_sm_percent": ("SMs busy (GPM)", HERE),
    "gpu_tensor_percent": ("Tensor cores busy (GPM)", HERE),
    "gpu_dram_percent": ("GPU memory busy (GPM)", HERE),
    "flops_utilization": ("FLOPs utilisation", WORD),
    "cpu_percent": ("CPU share of this process", ""),
    "rss_mb": ("Memory of this process", ""),
}
OWN_CLOCK = (
    "Each lane has its own clock, which counts only the time that the device spent on that lane. So the lanes "
    "advance as if each had its own identical machine, only slower."
)
PREDICTED = (
    "Each lane has its own clock, which adds up the predicted times of the lane's forwards on another machine. "
    "No lane time here was measured. The device readings are from this machine."
)
SMALL_PRINT = (
    "Tokens appear in the order and at the pace of "
    "their lane's clock, at most one update (about a tenth of a second) after they were written. The charts of "
    "long runs show every second, fourth, ... point. The question mark next to a figure explains its formula."
)


def charts() -> str:
    """Return one figure for each chart, and the device's readings as text."""
    figures = "".join(
        f'<figure class="chart" data-chart="{name}"><figcaption>'
        f"{titled(_formula_of(name), title, mark=BADGE if name in LANE_CHARTS else HERE)}"
        f'<span>{about}</span></figcaption><div class="plot" role="group" aria-label="{title}, {about}"></div>'
        "</figure>"
        for name, (title, about) in CHARTS.items()
    )
    readings = "".join(
        f'<div><dt {mark}>{label}{formula_button(key)}</dt><dd data-reading="{key}">–</dd></div>'
        for key, (label, mark) in READINGS.items()
    )
    return f"""<section class="bass-charts part" aria-labelledby="charts-title">
<div class="part-head"><h2 id="charts-title">Live charts</h2>
<ul class="line-key" aria-label="The lanes' lines">{"".join(map(_line, DEFAULT_LANES))}</ul>
<button type="button" class="switch" id="pause-charts">Pause charts</button></div>
<div class="chart-grid">{figures}</div>
<dl class="readings">{readings}</dl>
<p class="small-print"><span data-predicted-text="{PREDICTED}">{OWN_CLOCK}</span> {SMALL_PRINT}</p></section>"""


def _line(name: str) -> str:
    """Return the line and label of a default lane. A race with other lanes replaces them."""
    shown = look(name)
    line = f'<span class="line line-{shown["dash"]}" style="--line-colour: var(--{shown["colour"]})"></span>'
    return f"<li>{line}{shown['label']}</li>"


def _formula_of(chart: str) -> str:
    return f"chart_{chart}" if f"chart_{chart}" in FORMULAS else f"{chart}_utilization"


PAPER = (
    '<a href="https://arxiv.org/abs/2404.15778" target="_blank" rel="noopener">Qian et al., BASS, arXiv '
    "2404.15778</a>"
)


def inspector() -> str:
    """Return the pickers for lane, sequence and round, and the table or tree of one round."""
    return f"""<section class="part why" aria-labelledby="why-title" hidden>
<div class="titled"><h2 id="why-title" tabindex="-1">Why</h2>{formula_button("verdict")}</div><ul></ul>
<p class="part-about">A step has to read all of the model's weights, however many tokens it writes. <span
class="why-cost"></span> {PAPER}.</p></section>
<section class="bass-inspector part" aria-labelledby="inspector-title">
<div class="part-head"><h2 id="inspector-title">Step inspector</h2>
<p class="part-about">One round of one sequence: the draft tokens, and why each was accepted or rejected. Click
any token to open its round.</p></div>
<div class="pickers">
<label>Lane <select data-pick="lane"></select></label>
<label>Sequence <select data-pick="sequence"></select></label>
<span class="stepper"><button type="button" data-step="-1" aria-label="Previous round">‹</button>
<label>Round <input data-pick="round" type="number" min="1" step="1" inputmode="numeric"></label>
<span data-rounds>of 0</span>
<button type="button" data-step="1" aria-label="Next round">›</button></span>
<label class="follow"><input type="checkbox" data-pick="follow" checked> Follow the newest</label>
</div>
<p class="round-line" role="status">No round yet: press Run.</p>
<div class="round-scroll" tabindex="0" role="group" aria-label="The drafted tokens of this round" hidden></div>
<div class="tree-part" hidden><div class="tree-box">
<div class="tree" role="tree" aria-label="The drafts of this round; arrow keys walk through them"></div></div>
<p class="tree-line"></p></div>
<p class="small-print round-note"></p>
</section>"""


def summary() -> str:
    """Return the part that appears after a run: a figure, a table and the exports."""
    return f"""<section class="bass-summary part" aria-labelledby="summary-title" hidden>
<div class="part-head"><h2 id="summary-title">Afterwards</h2><p class="part-about budget-line"></p></div>
<figure class="chart summary-figure"><figcaption>
<div class="titled"><h3 {BADGE}>Per-token latency and acceptance by position</h3>
{formula_button("ptl")}{formula_button("per_position_acceptance")}</div>
<span>in ms, of the First and the Last sequence to finish and the mean of All, by lane; accepted / drafted at each
position</span></figcaption><div class="plot" role="group"
aria-label="Per-token latency First, Last and All by lane; acceptance by draft position"></div></figure>
<div class="table-scroll" tabindex="0" role="group" aria-label="Figures of the run">
<table class="figures-table"><caption class="spoken">Figures of the run, one column per lane</caption>
<thead></thead><tbody></tbody></table></div>
<div class="take">
<button type="button" class="action" data-take="table">Copy table</button>
<button type="button" class="action" data-take="page">Save as a page</button>
<button type="button" class="action" data-take="card">Save as a picture</button>
<button type="button" class="action" data-take="json">Download JSON</button>
<button type="button" class="action" data-take="csv">Download CSV</button>
<button type="button" class="action" data-take="link">Copy link to these settings</button>
<button type="button" class="action" data-print title="Settings, figures, all texts and every chart">Print</button>
<span class="took" role="status" aria-live="polite"></span></div>
<details class="snippet"><summary>Repeat this run with the library</summary>
<div class="snippet-head"><p
data-predicted-text="The code predicts the same times for the same forwards.">The code uses the draft lengths of
this run, so that it repeats sampled text as well.</p>
<button type="button" class="action" data-take="snippet">Copy</button></div>
<pre tabindex="0" aria-label="Python code"><code></code></pre></details>
</section>"""
