"""The tab "How it works": six steps as static HTML. The scripts of static/how draw the pictures.

Each step has text, sliders with a picture, and an exercise. The scripts compute its answer from the sliders. The
GPU figures come from the vendors' datasheets.
"""

from __future__ import annotations

from html import escape

from bass_core import DEFAULT_LANES, HARDWARE, METHODS, Algorithm1
from ui.race.parts import ORIGINS

# Name -> (billions of parameters, bytes per parameter).
MODELS = {
    "7.8B, 2 bytes a weight": (7.8, 2),
    "7.8B, 1 byte a weight": (7.8, 1),
    "1.7B, 2 bytes a weight": (1.7, 2),
    "70B, 1 byte a weight": (70, 1),
}
# Initial weights of five tokens for (target, draft). The scripts scale each column to sum to 1.
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
_COST = ("c", "Cost ratio c", 0, 1, 0.01, 0.1, "time of a draft step / time of a target step")
_LENGTH = ("l", "Draft length l", 1, 16, 1, 5, "tokens drafted before each verification")
_BATCH = ("b", "Batch b", 1, 32, 1, 8, "rows at once")


def template(balance: int | None = None) -> str:
    """Return the list of steps, the colour key and the steps themselves.

    Args:
        balance: tokens of a step for which multiplying takes as long as reading on this machine, if known.
    """
    way = "".join(
        f'<li><a href="#how-{name}">{i}. {title}</a></li>' for i, (name, title) in enumerate(STEPS.items(), 1)
    )
    key = "".join(
        f'<li><span class="token {origin}">{origin}</span> {meaning}</li>' for origin, meaning in ORIGINS.items()
    )
    return f"""<div class="bass-how"><nav aria-label="Steps"><ol class="walk-way">{way}</ol></nav>
<ul class="legend walk-key" aria-label="Colours of tokens, here and in the lanes">{key}</ul>
{_memory(balance)}{_drafting()}{_rule()}{_ragged()}{_policies()}{_roofline()}</div>"""


def _step(name: str, words: str, controls: str, question: str, *, more: str = "", rest: str = "", data: str = "",
          pictures: int = 1) -> str:  # fmt: skip
    """Return one step. `more` goes below its sliders, `rest` below the whole step."""
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


def _memory(balance: int | None) -> str:
    here = (
        f"""<p class="here">Measured on this machine: <strong>drafting can pay up to about {balance} tokens per
step here</strong>. From there on, multiplying takes as long as reading.</p>"""
        if balance
        else ""
    )
    words = f"""<p>A language model reads all of its weights for every step, and a step writes one token for each
row of the batch. Each weight is read once, then multiplied once for each row.</p>
<p>With a few rows, reading takes far longer than multiplying: the arithmetic units wait. A step of eight tokens
then costs as much as a step of one token. Speculative decoding uses that.</p>
{here}
<p class="source">Bandwidth and dense bfloat16 peak from NVIDIA's datasheets. A real step reaches only a part of
both, and also reads keys and values.</p>"""
    controls = _machine() + _slider("b", "Tokens in a step", 1, 512, 1, 8, "one for each row")
    return _step("memory", words, controls,
                 "On this GPU, how many tokens must a step have for multiplying to take as long as "
                 "reading?")  # fmt: skip


def _drafting() -> str:
    words = f"""<p><b>Regular</b> decoding writes one token for each row in each step. <b>Speculative</b> decoding
lets a small draft model propose l tokens, then verifies all of them in one step of the target, one sequence at a
time.
<b>BASS</b> does this for all rows of a batch at once.</p>
<div class="picture fixed" tabindex="0" role="group"
aria-label="Three decoders: picture">{_decoders()}</div>
<p>A round always writes its first token. It writes token i + 1 if the first i drafts are accepted: with chance
a<sup>i</sup>, if each is accepted independently with chance a. That adds up to (1 − a<sup>l+1</sup>) / (1 − a)
tokens. If each draft costs c target steps, the speed-up is this number / (l·c + 1).</p>
{_source(_LEVIATHAN, _paper("2410.17375", "draft and target at the same time: AMUSD"))}"""
    controls = "".join(_slider(*slider) for slider in (_ACCEPTANCE, _COST, _LENGTH))
    return _step("drafting", words, controls, "Which draft length is best for these a and c?")


def _decoders() -> str:
    """Return an example picture: what each decoder does for two sequences in the same time."""
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
accepted if a random number u is below p(x)/q(x). A rejected draft is replaced by a token drawn from max(0, p −
q), scaled to sum to 1. The tokens written then have exactly the distribution p, whatever q is:</p>
<ol class="proof"><li>x is drafted and accepted with chance q(x) · min(1, p(x)/q(x)) = min(p(x), q(x)).</li>
<li>So a draft is rejected with chance R = 1 − Σ min(p, q) = Σ max(0, p − q).</li>
<li>x is recovered with chance R · max(0, p(x) − q(x)) / R = max(0, p(x) − q(x)).</li>
<li>Together: min(p(x), q(x)) + max(0, p(x) − q(x)) = p(x).</li></ol>
<p>A bad draft costs time, never quality. If all drafts are accepted, the same step yields one more token, the
bonus. Block verification, the default, tests the drafts of a round together. The texts keep the same distribution,
and on average at least as many drafts are accepted.</p>
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
        '<div class="walk-buttons"><button type="button" class="action" data-draw>Draw 1,000 times again</button>'
        '<button type="button" class="action" data-real-round>Run it on a real round</button></div>'
        + "<p>Columns: the tokens that the rule wrote, accepted drafts solid and recovered tokens dashed. Thick "
        "line: p. Narrow bar: q. The weights above are scaled to sum to 1.</p>"
    )
    return _step("rule", words, f'<div class="beside">{sides}</div>', "What share of the drafts is accepted, with "
                 "these p and q?", more=more)  # fmt: skip


def _ragged() -> str:
    words = f"""<p>After a round, each row has its own length. If all rows were cut to the shortest, the row with
the fewest accepted drafts would decide for all of them. For example, a draft that each row accepts with chance a
is accepted by all b rows only with chance a<sup>b</sup>.</p>
<p>So each row keeps its own length in one cache. New entries are written at the end of each row, and attention
reads each row up to its end. A rejected draft needs no removal: the end simply does not move past it. Nothing is
copied.</p>
{_source(_BASS)}"""
    more = (
        _button("Another round")
        + "<p>A round of seven drafts. A: accepted, R: recovered, B: bonus, ×: rejected or not tested.</p>"
    )
    controls = _slider(*_ACCEPTANCE) + _slider("b", "Batch b", 1, 16, 1, 8, "rows at once")
    return _step("ragged", words, controls,
                 "How often is the next draft of every row accepted, and how many tokens "
                 "per row does a round with a common stop write?", more=more, rest=_what_if())  # fmt: skip


def _what_if() -> str:
    sliders = "".join(_slider(*slider) for slider in (_ACCEPTANCE, _COST, _LENGTH, _BATCH))
    return f"""<div class="what-if"><h3>What if?</h3>
<p>Expected speed-up over regular decoding: a formula, not a measurement. <span
data-predicted-text="The large points are predicted: the last run's token acceptance, and the speed-up of its
forwards on the other machine.">The large points are measured: the last run's token acceptance and
speed-up.</span></p>
<div class="what-if-grid"><div class="sliders">{sliders}
<p class="what-if-line" role="status" aria-live="polite"></p></div>
<figure class="chart"><div class="plot" role="group"
aria-label="Expected speed-up over token acceptance"></div></figure></div>
<p class="small-print">Both lines assume that verifying l + 1 tokens costs the target as much as one token. If the
arithmetic units are fully used, it costs more, and the measured points lie below the lines, especially for large
batches.</p></div>"""


def _policies() -> str:
    rule = Algorithm1()
    words = f"""<p>With too few drafts, a step of the target is badly used. With too many, most are thrown away.
Algorithm 1 looks at the row that accepted the most. If that row accepted all l drafts, l grows by
{rule.increment}, up to {rule.limit}. Otherwise l falls by l/{rule.modulus}, rounded up; if it also fell in the
round before, it falls by one more. The length never falls below the number of drafts that this row accepted, nor
below 1.</p>
<p>Algorithm 1 ignores the cost of a draft. Because it looks at the best row, it drafts longer in a larger batch,
where arithmetic is scarcer.</p>
<p>The default, “auto”, uses the measured costs of this machine. If they are not known, it is Algorithm 1. Before
anything is drawn, it gives each row its own length. A draft is worth the chance that it and all drafts before it
are accepted, estimated from the rounds so far. The best drafts of all rows are added one by one, as long as the
expected number of tokens per millisecond grows. If no draft pays off, the round is a plain step.</p>
<p>The lower picture shows the simplest case: every row drafts the same length.</p>
{_source(_BASS + ", Algorithm 1")}"""
    controls = "".join(_slider(*slider) for slider in (_ACCEPTANCE, _BATCH, _COST)) + _slider(
        "free",
        "Tokens at the price of one",
        1,
        256,
        1,
        32,
        "a step of up to this many tokens costs the same: the ridge",
    )
    data = f'data-rule="{rule.length} {rule.increment} {rule.modulus} {rule.limit}"'
    return _step("policies", words, controls,
                 "From now on, every draft is rejected. How many tokens does Algorithm 1 draft in the "
                 "second, third and fourth round from here?", data=data, pictures=2)  # fmt: skip


def _roofline() -> str:
    words = """<p>A forward reads its weights and multiplies with them at the same time. So it takes the
longer of the two: bytes / bandwidth or FLOPs / peak. Reading takes as long for one token as for a hundred.
Multiplying takes 2 FLOPs per parameter and token.</p>
<p>Left of the ridge, drafts are verified for free. A batch of b rows verifies b × (l + 1) tokens, which moves it
to the right. In a large batch a draft costs as much as a token, so the best draft length is short or zero.</p>
<p class="source">Williams et al., Roofline, Communications of the ACM 52 (4), 2009. Datasheet figures, weights
only: predicted, not measured.</p>"""
    controls = (
        _machine()
        + _slider("b", "Batch b", 1, 128, 1, 8, "rows at once")
        + _slider("l", "Draft length l", 1, 16, 1, 7, "for each row")
    )
    return _step("roofline", words, controls,
                 "From which batch size on does a verification with l drafts per row cost more "
                 "than reading the weights?")  # fmt: skip
