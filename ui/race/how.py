"""Contract: the static HTML of "How it works"; how.js draws the what-if plot and puts measured points on it."""

from __future__ import annotations

from ui.race import drawings

SLIDERS = {
    "a": ("Token acceptance a", 0.0, 0.99, 0.01, 0.8, "how often the target keeps one drafted token"),
    "c": ("Cost ratio c", 0.0, 1.0, 0.01, 0.1, "a draft step / a target step"),
    "l": ("Draft length l", 1, 16, 1, 5, "tokens guessed before each check"),
    "b": ("Batch b", 1, 32, 1, 8, "sequences at once"),
}


def template() -> str:
    """Five sections of words and pictures, then the plot."""
    return f"""<div class="bass-how">
{_section("Three decoders", "decoders", drawings.decoders(), _DECODERS)}
{_section("The rejection rule", "rule", drawings.rejection(), _RULE)}
{_section("The ragged cache", "cache", drawings.cache(), _CACHE)}
{_section("Algorithm 1: how far to guess", "algorithm", drawings.lengths(), _ALGORITHM)}
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


_DECODERS = """<p>A language model writes one token for each time its weights are read. Reading them is what takes
the time: while a few sequences are written, the arithmetic units mostly wait.</p>
<p><b>Regular</b> decoding writes one token for each sequence and step. <b>Speculative</b> decoding lets a small
draft guess a few tokens and checks them all with one step of the target, one sequence at a time. <b>BASS</b>
does this for all sequences of a batch at once, and each keeps as many of its drafts as stand.</p>"""

_RULE = """<p>A drafted token x was drawn from the draft's distribution q; the target gives it p. It stands if a
random number u is below p(x)/q(x): always where the target likes it better than the draft did, sometimes where
less. After the first that falls, one token is drawn from what the draft left out, max(0, p − q), made to sum to
1.</p><p>Both ways together give exactly p, whatever the draft is: a bad draft costs time and never quality. If all
drafts stand, the same step of the target has already given one more token, the bonus.</p>
<p class="source">Leviathan et al. 2211.17192; Chen et al. 2302.01318.</p>"""

_CACHE = """<p>After a round each sequence has its own length. Cutting all rows to the shortest would let the
unluckiest row decide: a draft that stands with probability a for one row stands for all of b rows with
a<sup>b</sup>.</p><p>So each row keeps its own length in one cache. New entries are written at the row's own end,
a rejected draft is undone by not moving the end, and attention reads as far as each row reaches. Nothing is
copied.</p><p class="source">BASS, arXiv 2404.15778.</p>"""

_ALGORITHM = """<p>How many tokens should be guessed? Too few waste the target's step, too many are thrown away.
Algorithm 1 looks at the best row of the last round: if it kept all l drafts, guess two more, up to 32; else fall
to what the best row kept, or by a tenth of l, faster each time the falls repeat.</p>
<p>The length is one number for the whole batch, so the more rows there are, the longer it gets: some row is
always lucky.</p><p class="source">BASS, arXiv 2404.15778, Algorithm 1; the bars are drawn by this library's own
rule.</p>"""

_FORMULA = """Expected tokens of a round, if each draft stands with probability a on its own: (1 − a<sup>l+1</sup>)
/ (1 − a); speed-up: that / (l·c + 1) (Leviathan et al. 2211.17192). A batch whose rows must all stop at
its first rejection has a<sup>b</sup> in place of a; with an end for each row (BASS) the batch does not matter.
Both assume that checking l+1 tokens costs the target what one token costs. On a device whose arithmetic is used up
it costs more, and the true curve falls below: that is why measured points of large batches lie under the line."""
