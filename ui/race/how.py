"""The tab "How it works". Contract: static HTML; how.js draws the what-if plot with the measured points."""

from __future__ import annotations

from ui.race import drawings

SLIDERS = {
    "a": ("Token acceptance a", 0.0, 0.99, 0.01, 0.8, "how often the target accepts a drafted token"),
    "c": ("Cost ratio c", 0.0, 1.0, 0.01, 0.1, "a draft step / a target step"),
    "l": ("Draft length l", 1, 16, 1, 5, "tokens drafted before each check"),
    "b": ("Batch b", 1, 32, 1, 8, "sequences at once"),
}


def template() -> str:
    """Five sections of words and pictures, then the plot."""
    return f"""<div class="bass-how">
{_section("Three decoders", "decoders", drawings.decoders(), _DECODERS)}
{_section("The rejection rule", "rule", drawings.rejection(), _RULE)}
{_section("The ragged cache", "cache", drawings.cache(), _CACHE)}
{_section("Algorithm 1: how many tokens to draft", "algorithm", drawings.lengths(), _ALGORITHM)}
<section class="part what-if" aria-labelledby="how-what-if"><h2 id="how-what-if">What if?</h2>
<p>Expected speed-up over regular decoding: a formula, not a measurement. The large points are measured: the last
run's token acceptance and speed-up.</p>
<div class="what-if-grid"><div class="sliders">{"".join(_slider(key, *it) for key, it in SLIDERS.items())}
<p class="what-if-line" role="status" aria-live="polite"></p></div>
<figure class="chart"><div class="plot" role="group"
aria-label="Expected speed-up over token acceptance"></div></figure></div>
<p class="small-print">{_FORMULA}</p></section></div>"""


def _section(title: str, name: str, picture: str, words: str) -> str:
    return (
        f'<section class="part how-part" aria-labelledby="how-{name}"><h2 id="how-{name}">{title}</h2>'
        f'<div class="how-grid"><div class="words">{words}</div><div class="picture" tabindex="0" '
        f'role="group" aria-label="{title}: picture">{picture}</div></div>'
        "</section>"
    )


def _slider(key: str, label: str, low: float, high: float, step: float, value: float, about: str) -> str:
    return (
        f'<label class="slider"><span class="slider-name">{label} <output data-output="{key}">{value:g}</output>'
        f'</span><input type="range" data-slider="{key}" min="{low:g}" max="{high:g}" step="{step:g}" '
        f'value="{value:g}"><span class="soft">{about}</span></label>'
    )


_DECODERS = """<p>A language model reads all of its weights for every step, and a step writes one token.
Reading the weights takes most of the time: with a few sequences, the arithmetic units mostly wait.</p>
<p><b>Regular</b> decoding writes one token for each sequence in each step. <b>Speculative</b> decoding lets
a small draft model propose a few tokens, and checks them all with one step of the target, one sequence at a
time. <b>BASS</b> does this for all sequences of a batch at once; each sequence keeps its own accepted
drafts.</p>"""

_RULE = """<p>A drafted token x was drawn from the draft's distribution q; the target gives it p. It is
accepted if a random number u is below p(x)/q(x): always where p is at least q, sometimes where it is less.
In place of the first rejected draft, one token is drawn from max(0, p − q), scaled to sum to 1.</p>
<p>Together this gives exactly p, whatever the draft is: a bad draft costs time and never quality. If all
drafts are accepted, the same step of the target yields one more token, the bonus.</p>
<p>Block verification, the default, judges the drafts of a round together: a draft that would be rejected alone can
be saved by those behind it. It writes the same distribution and accepts more; the step inspector marks what it
saved.</p>
<p class="source">Leviathan et al. 2211.17192; Chen et al. 2302.01318; block: Sun et al. 2403.10444.</p>"""

_CACHE = """<p>After a round each sequence has its own length. If all rows were cut to the shortest, the row
with the fewest accepted drafts would decide: a draft that one row accepts with probability a is accepted by
all of b rows with probability a<sup>b</sup>.</p>
<p>So each row keeps its own length in one cache. New entries are written at the end of each row; a rejected
draft is dropped by leaving that end where it was; attention reads each row up to its end. Nothing is
copied.</p>
<p class="source">BASS, arXiv 2404.15778.</p>"""

_ALGORITHM = """<p>How many tokens should be drafted? With too few, the target's step checks little; too
many are thrown away. Algorithm 1 looks at the row that accepted most in the last round. If that row
accepted all l drafts, l grows by two, up to 32. Otherwise l falls by a tenth, rounded up, and from the second
fall in a row on by one more; if that row accepted more than what is left, l is what it accepted.</p>
<p>The length is one number for the whole batch, so it grows with the number of rows: one of them is likely
to accept many drafts.</p>
<p class="source">BASS, arXiv 2404.15778, Algorithm 1; the lengths are computed by this library.</p>"""

_FORMULA = """Expected tokens of a round, if each draft is accepted with probability a, independently: (1 −
a<sup>l+1</sup>) / (1 − a); speed-up: that / (l·c + 1) (Leviathan et al. 2211.17192). A batch whose rows
all stop at its first rejection has a<sup>b</sup> in place of a; where each row has its own end (BASS), the
batch size does not matter. Both formulas assume that checking l+1 tokens costs the target as much as one
token. Where the device's arithmetic units are fully used it costs more: then measured points, of large
batches above all, lie below the line."""
