"""Contract: the static HTML of the lanes; lanes.js fills it with textContent alone.

No value ever enters this template: Gradio evaluates templates as code, and model text is only text. A lane that
a race brings and that has no section here gets one from lanes.js.
"""

from __future__ import annotations

LANES = {
    "regular": ("Regular", "One token a sequence and step."),
    "speculative": ("Speculative", "Drafts and verifies, one sequence at a time."),
    "bass": ("BASS", "Drafts and verifies all sequences at once."),
}
FIGURES = {
    "speedup": 'over regular<span class="so-far"></span>',
    "throughput_tps": "tokens/s",
    "acceptance_rate": "acceptance",
    "new_tokens": "new tokens",
}
ORIGINS = {
    "sampled": "by the target alone",
    "accepted": "drafted, and stands",
    "recovered": "replaces a rejected draft",
    "bonus": "follows a fully accepted draft",
}


def template() -> str:
    """The legend, the note for temperature 0, a section for each lane, and the tip of a token."""
    return f"""<div class="bass-lanes">
{_toolbar()}
<p class="greedy-note" hidden></p>
<div class="lane-grid">{"".join(_lane(name, *texts) for name, texts in LANES.items())}</div>
<div class="token-tip" role="tooltip" hidden></div>
<div class="spoken board-spoken" role="status" aria-live="polite"></div></div>"""


def _toolbar() -> str:
    keys = "".join(
        f'<li><span class="token {origin}">{origin}</span> <span class="meaning">{meaning}</span></li>'
        for origin, meaning in ORIGINS.items()
    )
    switches = (
        _switch("colours", "Origins", True, "Colour tokens by where they came from")
        + _switch("whole", "Whole texts", False, "Show texts at their full length")
        + _switch("slow", "Half speed", False, "Show the race at half its speed")
    )
    return f"""<div class="toolbar"><ul class="legend" aria-label="Where a token came from">{keys}</ul>
<span class="switches">{switches}</span></div>"""


def _switch(name: str, label: str, on: bool, title: str) -> str:
    state = str(on).lower()
    return (
        f'<button type="button" class="switch" data-switch="{name}" aria-pressed="{state}" title="{title}">'
        f"{label}</button>"
    )


def _lane(name: str, title: str, about: str) -> str:
    figures = "".join(
        f'<div><dt>{label}</dt><dd data-figure="{key}">–</dd></div>' for key, label in FIGURES.items()
    )
    return f"""<section class="lane" id="lane-{name}" data-lane="{name}" aria-labelledby="lane-{name}-title">
<header><h2 id="lane-{name}-title">{title}</h2><p class="about">{about}</p></header>
<div class="numbers"><p class="headline"><span class="big" data-figure="ms_per_token">–</span>
<span class="unit">ms per token</span></p><dl class="figures">{figures}</dl></div>
<p class="state" role="status" aria-live="polite">Ready</p>
<ol class="sequences" aria-labelledby="lane-{name}-title"></ol>
</section>"""
