"""The tab "How it works": six steps. Contract: static HTML, in which the scripts of static/how draw and answer.

A step has words, sliders with a picture, and an exercise whose answer the scripts compute from the sliders. The
figures of GPUs are those of the vendors' datasheets.
"""

from __future__ import annotations

from html import escape

from bass_core import DEFAULT_LANES, HARDWARE, METHODS, Algorithm1
from ui.race.parts import ORIGINS

# Name -> (billions of parameters, bytes of one).
MODELS = {
    "7.8B, 2 bytes a weight": (7.8, 2),
    "7.8B, 1 byte a weight": (7.8, 1),
    "1.7B, 2 bytes a weight": (1.7, 2),
    "70B, 1 byte a weight": (70, 1),
}
# The target's and the draft's weights of five tokens at first; the scripts scale them to sum to 1.
WORDS = {"the": (40, 25), "a": (25, 45), "my": (20, 10), "one": (10, 15), "his": (5, 5)}
STEPS = {
    "memory": "Why a step is bound by memory",
    "drafting": "Drafting",
    "rule": "The rule",
    "ragged": "Ragged rows",
    "policies": "How many tokens to draft",
    "roofline": "The roofline",
}
_ACCEPTANCE = ("a", "Token acceptance a", 0, 0.99, 0.01, 0.8, "how often the target accepts a drafted token")
_COST = ("c", "Cost ratio c", 0, 1, 0.01, 0.1, "a draft's step / a step of the target")
_LENGTH = ("l", "Draft length l", 1, 16, 1, 5, "tokens drafted before each check")
_BATCH = ("b", "Batch b", 1, 32, 1, 8, "rows at once")


def template() -> str:
    """The way, the key of colours, and the steps."""
    way = "".join(
        f'<li><a href="#how-{name}">{i}. {title}</a></li>' for i, (name, title) in enumerate(STEPS.items(), 1)
    )
    key = "".join(
        f'<li><span class="token {origin}">{origin}</span> {meaning}</li>' for origin, meaning in ORIGINS.items()
    )
    return f"""<div class="bass-how"><nav aria-label="Steps"><ol class="walk-way">{way}</ol></nav>
<ul class="legend walk-key" aria-label="Colours of tokens, here and in the lanes">{key}</ul>
{_memory()}{_drafting()}{_rule()}{_ragged()}{_policies()}{_roofline()}</div>"""


def _step(name: str, words: str, controls: str, question: str, *, more: str = "", rest: str = "", data: str = "",
          pictures: int = 1) -> str:  # fmt: skip
    """A step; `more` is below its sliders, `rest` below the whole step."""
    number = list(STEPS).index(name) + 1
    picture = '<div class="picture"></div>' * pictures
    return f"""<section class="part walk-step" id="how-{name}" data-step-name="{name}" {data}
aria-labelledby="how-{name}-title" tabindex="-1">
<h2 id="how-{name}-title"><span class="walk-number">{number}</span>{STEPS[name]}</h2>
<div class="walk-grid"><div class="words">{words}
<div class="exercise"><h3>Exercise</h3><p>{question}</p>
<details><summary>Show the answer</summary><p class="exercise-answer"></p></details></div></div>
<div class="walk-play"><div class="walk-controls">{controls}</div>{more}{picture}
<p class="walk-said" role="status" aria-live="polite"></p></div></div>{rest}</section>"""


def _slider(key: str, label: str, low: float, high: float, step: float, value: float, about: str = "",
            kind: str = "") -> str:  # fmt: skip
    soft = f'<span class="soft">{about}</span>' if about else ""
    return (
        f'<label class="slider {kind}"><span class="slider-name">{label} <output data-output="{key}">{value:g}'
        f'</output></span><input type="range" aria-label="{escape(label)}" data-slider="{key}" '
        f'min="{low:g}" max="{high:g}" step="{step:g}" '
        f'value="{value:g}">{soft}</label>'
    )


def _button(label: str) -> str:
    return f'<div class="walk-buttons"><button type="button" class="action" data-draw>{label}</button></div>'


def _machine() -> str:
    gpus = "".join(
        f'<option data-bandwidth="{gpu.bandwidth:g}" data-peak="{gpu.flops / 1e12:g}">{name}</option>'
        for name, gpu in HARDWARE.items()
        if gpu.nvlink  # those of servers
    )
    models = "".join(
        f'<option data-billions="{billions:g}" data-bytes="{each:g}">{name}</option>'
        for name, (billions, each) in MODELS.items()
    )
    return (
        f'<label class="slider"><span class="slider-name">GPU</span><select>{gpus}</select></label>'
        f'<label class="slider"><span class="slider-name">Target</span><select>{models}</select></label>'
    )


def _paper(number: str, name: str) -> str:
    return f'<a href="https://arxiv.org/abs/{number}" target="_blank" rel="noopener">{name}, arXiv {number}</a>'


_BASS = _paper("2404.15778", "Qian et al., BASS")
_LEVIATHAN = _paper("2211.17192", "Leviathan et al.")
_CHEN = _paper("2302.01318", "Chen et al.")


def _source(*papers: str) -> str:
    return f'<p class="source">{"; ".join(papers)}.</p>'


def _memory() -> str:
    words = """<p>A language model reads all of its weights for every step, and a step writes one token for each
row of the batch. Each weight that was read is multiplied once for each row.</p>
<p>With a few rows, reading takes far longer than multiplying: the arithmetic units wait. A step of eight tokens
then costs what a step of one token costs. Speculative decoding uses that.</p>
<p class="source">Bandwidth and dense bfloat16 peak as NVIDIA's datasheets give them. A real step reaches a part of
both, and reads keys and values too.</p>"""
    controls = _machine() + _slider("b", "Tokens in a step", 1, 512, 1, 8, "one for each row")
    return _step("memory", words, controls,
                 "How many tokens does a step need until multiplying takes as long as "
                 "reading, on this GPU?")  # fmt: skip


def _drafting() -> str:
    words = f"""<p><b>Regular</b> decoding writes one token for each row in each step. <b>Speculative</b> decoding
lets a small draft model propose l tokens, and checks them all with one step of the target, one sequence at a time.
<b>BASS</b> does this for all rows of a batch at once.</p>
<div class="picture fixed" tabindex="0" role="group"
aria-label="Three decoders: picture">{_decoders()}</div>
<p>A round writes its first token for sure, and token i + 1 if the first i drafts are accepted: with chance
a<sup>i</sup>, if each is accepted with chance a, independently. That adds up to (1 − a<sup>l+1</sup>) / (1 − a)
tokens. With drafts that cost c steps each, the speed-up is that / (l·c + 1).</p>
{_source(_LEVIATHAN, _paper("2410.17375", "draft and target at the same time: AMUSD"))}"""
    controls = "".join(_slider(*one) for one in (_ACCEPTANCE, _COST, _LENGTH))
    return _step("drafting", words, controls, "Which draft length is the best one for these a and c?")


def _decoders() -> str:
    """The picture of what each decoder does in the same time, for two sequences: an example."""
    width, height, gap = {"T": 54, "D": 16}, 26, 3
    box = '<rect x="{:g}" y="{:g}" width="{:g}" height="{:g}" rx="3" class="{}"/>'
    words = '<text x="{:g}" y="{:g}" text-anchor="{}" class="{}">{}</text>'
    kinds = {"T": "is-target", "D": "is-draft"}
    lanes = (
        (["T both"] * 10, "10 steps, 1 token for each sequence: 20 tokens"),
        ([step for row in (1, 1, 2, 2, 2) for step in (*"DDD", f"T row {row}")],
         "5 rounds of one sequence each: 16 tokens"),
        ([*"DDD", "T both"] * 5, "5 rounds of both sequences: 30 tokens"),
    )  # fmt: skip
    parts = []
    for i, (name, (steps, sum_up)) in enumerate(zip(DEFAULT_LANES, lanes, strict=True)):
        y, x = 8 + 66 * i, 92.0
        parts.append(words.format(0, y + 18, "start", f"strong lane-{i + 1}", METHODS[name].label))
        for step in steps:
            kind, _, whose = step.partition(" ")
            parts.append(box.format(x, y, width[kind], height, kinds[kind]))
            if whose:
                parts.append(words.format(x + width[kind] / 2, y + 17, "middle", "small on-dark", whose))
            x += width[kind] + gap
        parts.append(words.format(92, y + height + 17, "start", "soft", sum_up))
    for x, kind, meaning in ((92, "T", "target: one forward"), (252, "D", "draft: one small forward")):
        parts.append(box.format(x, 206, 14, 14, kinds[kind]) + words.format(x + 20, 218, "start", "soft", meaning))
    title = "In the same time regular decoding writes 20 tokens, speculative 16 and BASS 30, in this example"
    return (
        f'<svg viewBox="0 0 664 226" role="img" aria-label="{title}" class="drawing" style="max-width:664px">'
        f"{''.join(parts)}</svg>"
    )


def _rule() -> str:
    words = f"""<p>A draft x is drawn from the draft model's distribution q; the target gives it p(x). It is
accepted if a random number u is below p(x)/q(x). In place of a rejected draft one token is drawn from max(0, p −
q), scaled to sum to 1. This writes exactly p, whatever q is:</p>
<ol class="proof"><li>x is drafted and accepted with chance q(x) · min(1, p(x)/q(x)) = min(p(x), q(x)).</li>
<li>So a draft is rejected with chance R = 1 − Σ min(p, q) = Σ max(0, p − q).</li>
<li>x is recovered with chance R · max(0, p(x) − q(x)) / R = max(0, p(x) − q(x)).</li>
<li>Together: min(p(x), q(x)) + max(0, p(x) − q(x)) = p(x).</li></ol>
<p>A bad draft costs time and never quality. If all drafts are accepted, the same step yields one more token, the
bonus. Block verification, the default, judges the drafts of a round together: it writes the same distribution and
on average accepts at least as many.</p>
{_source(_LEVIATHAN, _CHEN, _paper("2403.10444", "block verification: Sun et al."))}"""
    sides = "".join(
        f"<fieldset><legend>{name}</legend>"
        + "".join(
            _slider(f"{letter}{i}", f"{letter} of “{word}”", 0 if i else 1, 100, 1, pair[side], kind=f"of-{kind}")
            for i, (word, pair) in enumerate(WORDS.items())
        )
        + "</fieldset>"
        for side, (letter, kind, name) in enumerate((("p", "target", "Target p"), ("q", "draft", "Draft q")))
    )
    more = (
        _button("Draw 1,000 times again")
        + "<p>Columns: the tokens that the rule wrote, accepted drafts in full and recovered tokens dashed. Thick "
        "line: p. Narrow bar: q. The weights above are scaled to sum to 1.</p>"
    )
    return _step("rule", words, f'<div class="beside">{sides}</div>', "What share of the drafts is accepted, with "
                 "these p and q?", more=more)  # fmt: skip


def _ragged() -> str:
    words = f"""<p>After a round each row has its own length. If all rows were cut to the shortest, the row with
the fewest accepted drafts would decide: a draft that one row accepts with chance a is accepted by all of b rows
with chance a<sup>b</sup>.</p>
<p>So each row keeps its own length in one cache. New entries are written at the end of each row; a rejected
draft is dropped by leaving that end where it was; attention reads each row up to its end. Nothing is copied.</p>
{_source(_BASS)}"""
    more = (
        _button("Another round")
        + "<p>A round of seven drafts. A: accepted, R: recovered, B: bonus, ×: rejected or not tested.</p>"
    )
    controls = _slider(*_ACCEPTANCE) + _slider("b", "Batch b", 1, 16, 1, 8, "rows at once")
    return _step("ragged", words, controls,
                 "How often does a whole batch accept its next draft, and how many tokens "
                 "does a round with a common stop write?", more=more, rest=_what_if())  # fmt: skip


def _what_if() -> str:
    sliders = "".join(_slider(*one) for one in (_ACCEPTANCE, _COST, _LENGTH, _BATCH))
    return f"""<div class="what-if"><h3>What if?</h3>
<p>Expected speed-up over regular decoding: a formula, not a measurement. <span
data-predicted-text="The large points are predicted: the last run's token acceptance, and the speed-up that its
forwards would have on the other machine.">The large points are measured: the last run's token acceptance and
speed-up.</span></p>
<div class="what-if-grid"><div class="sliders">{sliders}
<p class="what-if-line" role="status" aria-live="polite"></p></div>
<figure class="chart"><div class="plot" role="group"
aria-label="Expected speed-up over token acceptance"></div></figure></div>
<p class="small-print">Both lines assume that checking l + 1 tokens costs the target as much as one token. Where
the arithmetic units are fully used it costs more: then measured points, of large batches above all, lie
below.</p></div>"""


def _policies() -> str:
    rule = Algorithm1()
    words = f"""<p>With too few drafts the target's step checks little; too many are thrown away. Algorithm 1
looks at the row that accepted most. If it accepted all l drafts, l grows by {rule.increment}, up to
{rule.limit}. Otherwise l falls by l/{rule.modulus}, rounded up. From the second fall in a row on, each fall is
one faster. The next length is the larger of the two: what the fall leaves, and what that row accepted; and at
least 1.</p>
<p>Algorithm 1 never asks what a draft costs. It looks at the best row, so it drafts longer in a larger batch,
where arithmetic is scarcer.</p>
<p>The default, “auto”, asks, where the costs of this machine are known; elsewhere it is Algorithm 1. Before
anything is drawn it gives each row a length of its own. A row's next draft is worth the chance that it is accepted
with all before it, as counted so far. Drafts of all rows are taken, best first, as long as expected tokens a
millisecond grow; where no draft pays, the round is a plain step.</p>
<p>The lower picture is that question in its plainest form: every row drafts the same length.</p>
{_source(_BASS + ", Algorithm 1")}"""
    controls = "".join(_slider(*one) for one in (_ACCEPTANCE, _BATCH, _COST)) + _slider(
        "free",
        "Tokens at the price of one",
        1,
        256,
        1,
        32,
        "as many as one step checks at no more cost: the ridge",
    )
    data = f'data-rule="{rule.length} {rule.increment} {rule.modulus} {rule.limit}"'
    return _step("policies", words, controls,
                 "From now on no row accepts a draft. What does Algorithm 1 draft in the "
                 "second, third and fourth round from here?", data=data, pictures=2)  # fmt: skip


def _roofline() -> str:
    words = """<p>A forward has to read its weights and to multiply with them, at the same time. It takes the
longer of the two: bytes / bandwidth or FLOPs / peak. Reading takes as long for one token as for a hundred;
multiplying takes 2 FLOPs for each parameter and token.</p>
<p>Left of the ridge drafts are checked for free. A batch of b rows moves b × (l + 1) tokens to the right: in a
large batch a draft costs what a token costs, and the best draft length is short, or none.</p>
<p class="source">Williams et al., Roofline, Communications of the ACM 52 (4), 2009. Datasheet figures, weights
alone: predicted, not measured.</p>"""
    controls = (
        _machine()
        + _slider("b", "Batch b", 1, 128, 1, 8, "rows at once")
        + _slider("l", "Draft length l", 1, 16, 1, 7, "for each row")
    )
    return _step("roofline", words, controls,
                 "From which batch on does a verification with l drafts a row cost more "
                 "than reading the weights?")  # fmt: skip
