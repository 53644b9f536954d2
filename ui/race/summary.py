"""The summary after a run. Contract: static HTML, which summary.js and export.js fill."""

from __future__ import annotations

from ui.words.formulas import what


def template() -> str:
    """One figure, a table, and the exports."""
    return f"""<section class="bass-summary part" aria-labelledby="summary-title" hidden>
<div class="part-head"><h2 id="summary-title">Afterwards</h2><p class="part-about budget-line"></p></div>
<figure class="chart summary-figure"><figcaption>
<div class="titled"><h3 data-predicted="badge">Per-token latency and acceptance by position</h3>
{what("ptl")}{what("per_position_acceptance")}</div>
<span>ms until the First and the Last sequence finished and the mean of All, by lane; accepted / drafted at each
position</span></figcaption><div class="plot" role="group"
aria-label="Per-token latency First, Last and All by lane; acceptance by draft position"></div></figure>
<div class="table-scroll" tabindex="0" role="group" aria-label="Figures of the run">
<table class="figures-table"><caption class="spoken">Figures of the run, a column a lane</caption>
<thead></thead><tbody></tbody></table></div>
<div class="take">
<button type="button" class="action" data-take="table">Copy table</button>
<button type="button" class="action" data-take="recording">Save recording</button>
<button type="button" class="action" data-take="json">Download JSON</button>
<button type="button" class="action" data-take="csv">Download CSV</button>
<button type="button" class="action" data-take="link">Copy link to these settings</button>
<button type="button" class="action" data-print title="Settings, figures, all texts and every chart">Print</button>
<span class="took" role="status" aria-live="polite"></span></div>
<details class="snippet"><summary>Repeat this run with the library</summary>
<div class="snippet-head"><p
data-predicted-text="The code predicts the same times for the same forwards.">The code uses the draft lengths of
this run, so that sampled text repeats too.</p>
<button type="button" class="action" data-take="snippet">Copy</button></div>
<pre tabindex="0" aria-label="Python code"><code></code></pre></details>
</section>"""
