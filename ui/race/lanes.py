"""The lanes' columns. Contract: static HTML, which lanes.js fills with textContent alone.

No value from outside enters this template: Gradio evaluates templates as code. lanes.js adds a section for a lane
that has none here.
"""

from __future__ import annotations

from bass_core import DEFAULT_LANES
from ui.race.looks import look
from ui.words.formulas import what

ORIGINS = {
    "sampled": "from the target, nothing drafted",
    "accepted": "drafted and accepted",
    "recovered": "replaces a rejected draft",
    "bonus": "follows a draft accepted in full",
}


# Marks that predicted.js puts on figures of a predicted clock.
BADGE, WORD = 'data-predicted="badge"', 'data-predicted="word"'
TIMED = ("speedup", "throughput_tps")

VERDICT = f"""<section class="verdict" aria-label="Verdict" {BADGE} hidden><div class="verdict-line">
<p class="verdict-head" aria-live="off"></p>{what("verdict")}</div><ul></ul></section>"""


def template() -> str:
    """The legend, the verdict, the note for temperature 0, a section for each lane, and the tip of a token."""
    return f"""<div class="bass-lanes">
{_toolbar()}
{VERDICT}
{STEP}
<p class="greedy-note" hidden></p>
<div class="lane-grid">{"".join(_lane(name) for name in DEFAULT_LANES)}</div>
{_cache()}
{GLANCE}
<div class="token-tip" role="tooltip" hidden></div>
<div class="spoken board-spoken" role="status" aria-live="polite"></div></div>"""


def _toolbar() -> str:
    keys = "".join(
        f'<li><span class="token {origin}">{origin}</span> <span class="meaning">{meaning}</span></li>'
        for origin, meaning in ORIGINS.items()
    )
    switches = (
        _switch("colours", "Origins", True, "Colour tokens by where they came from")
        + _switch("whole", "Whole texts", False, "Show each text in full")
        + _switch("whole-race", "Whole race", False, "Let the timelines show the whole race, not its newest part")
        + _switch("slow", "Half speed", False, "Show the race at half speed")
        + _switch("stepping", "Step by step", False, "Pause the page and go through the rounds one by one")
    )
    return f"""<div class="toolbar"><ul class="legend" aria-label="Where a token came from">{keys}</ul>
<span class="switches">{switches}</span></div>"""


def _switch(name: str, label: str, on: bool, title: str) -> str:
    state = str(on).lower()
    return (
        f'<button type="button" class="switch" data-switch="{name}" aria-pressed="{state}" title="{title}">'
        f"{label}</button>"
    )


def _figures() -> dict[str, str]:
    """A lane's small figures: metric -> label."""
    return {
        "speedup": "speed-up",
        "throughput_tps": "tokens/s",
        "acceptance_rate": 'acceptance<span class="of-trees"></span>',
        "new_tokens": "new tokens",
    }


SO_FAR = {"speedup": ' <span class="so-far"></span>'}

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


def _cache() -> str:
    """The rows' lengths, which cache.js draws; shown for a batch."""
    key = "".join(f'<li><i class="cell cell-{kind}"></i>{meaning}</li>' for kind, meaning in CELLS.items())
    return f"""<section class="part cache-part" aria-labelledby="cache-title" hidden>
<div class="part-head"><h2 id="cache-title">The ragged cache</h2>
<p class="part-about">One bar a row: its new tokens, and this round's cells. Below it, in dashes, the same rounds
if the whole batch stopped at its first rejection. At the right, both lengths. {what("cache_rows")}</p></div>
<div class="pickers cache-pick"><label>Lane <select></select></label>
<label>Round <input type="range" min="0" max="0" value="0" step="1"></label></div>
<ul class="cache-key" aria-label="Kinds of cells">{key}</ul>
<ol class="cache-rows" aria-label="Rows"></ol>
<p class="cache-line" role="status" aria-live="off">No round yet.</p></section>"""


# All lanes' figures on a phone, filled by glance.js.
GLANCE = """<section class="glance" aria-label="All lanes at a glance" hidden>
<p>ms per token of one sequence, and speed-up</p><ul></ul>
<button type="button" class="glance-stop">Stop</button></section>"""


# One round of one row, drawn by step.js.
STEP = """<section class="step-part" aria-label="Step by step" hidden><div class="pickers">
<label>Lane <select data-walk="lane"></select></label>
<label>Sequence <select data-walk="sequence"></select></label>
<button type="button" data-go="-1" title="Left arrow key">‹ Previous round</button>
<button type="button" data-go="1" title="Right arrow key">Next round ›</button>
<label><input type="checkbox" data-drafted checked> Only rounds with drafts</label>
<button type="button" data-close>Go on</button></div>
<p class="step-line" role="status"></p>
<p class="step-context"></p>
<p class="step-rule"></p>
<ol class="step-drafts" aria-label="The drafts of this round" tabindex="0"></ol>
<div class="step-end"></div></section>"""


# Where the lane's time went; strip.js draws it.
STRIP = f"""<figure class="strip" hidden><canvas tabindex="0" role="img" aria-label="Timeline"></canvas>
<div class="strip-line"><figcaption></figcaption>{what("timeline")}</div></figure>"""


def _lane(name: str) -> str:
    shown = look(name)
    figures = "".join(
        f"<div><dt {WORD if key in TIMED else ''}>{label}{what(key)}</dt>"
        f'<dd><span data-figure="{key}" {"data-timed" if key in TIMED else ""}>–</span>'
        f"{SO_FAR.get(key, '')}</dd></div>"
        for key, label in _figures().items()
    )
    return f"""<section class="lane" id="lane-{name}" data-lane="{name}" style="--lane: var(--{shown["colour"]})"
aria-labelledby="lane-{name}-title">
<header><div class="lane-title" {BADGE}><h2 id="lane-{name}-title">{shown["label"]}</h2></div>
<p class="about">{shown["about"]}</p></header>
<div class="numbers"><div class="pace"><p class="headline">
<span class="big" data-figure="ms_per_token" data-timed>–</span></p>
<p class="unit" {WORD}>ms per token of one sequence{what("ms_per_token")}</p></div>
<dl class="figures">{figures}</dl></div>
<div class="state-row"><p class="state" role="status" aria-live="polite">Ready</p><p class="read"></p>
<progress class="read-bar" max="1" value="0" aria-label="Part of the prompt that is read"></progress></div>
{STRIP}
<ol class="sequences" aria-labelledby="lane-{name}-title"></ol>
</section>"""
