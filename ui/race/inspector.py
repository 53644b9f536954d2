"""The step inspector. Contract: static HTML, which inspector.js fills with textContent alone."""

from __future__ import annotations

from ui.words.formulas import what

ROWS = {
    "token": "Draft",
    "q": "q(x), the draft's probability",
    "p": "p(x), the target's probability",
    "ratio": "min(1, p/q), its chance by itself",
    "chance": "h, its chance in the block",
    "u": "u, the random number",
    "verdict": "Outcome",
}


FORMULA_OF = {"verdict": "outcome"}


def template() -> str:
    """Pickers for lane, sequence and round, and the table or tree of one round."""
    rows = "".join(
        f'<tr data-row="{key}"><th scope="row">{label}{what(FORMULA_OF.get(key, key))}</th></tr>'
        for key, label in ROWS.items()
    )
    return f"""<section class="bass-inspector part" aria-labelledby="inspector-title">
<div class="part-head"><h2 id="inspector-title">Step inspector</h2>
<p class="part-about">One round of one sequence: what was drafted, and why it was accepted or rejected. A click
on any token opens its round.</p></div>
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
<div class="round-scroll" tabindex="0" role="group" aria-label="The drafted tokens of this round">
<table class="round" hidden><tbody>{rows}</tbody></table></div>
{_TREE}
<p class="small-print round-note"></p>
</section>"""


_TREE = """<div class="tree-part" hidden><div class="tree-box">
<div class="tree" role="tree" aria-label="The drafts of this round; arrow keys walk through them"></div></div>
<p class="tree-line"></p></div>"""
