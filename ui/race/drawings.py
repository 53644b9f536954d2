"""The pictures of "How it works", as inline SVG.

Contract: colours come from page.css through class names. The numbers are examples; the draft lengths are computed
by bass_core's Algorithm1 from an example.
"""

from __future__ import annotations

from collections.abc import Iterable

from bass_core import DEFAULT_LANES, METHODS, Algorithm1

# For each row: tokens in the cache before the round, and how many of its four drafts are accepted.
CACHE_ROWS = ((7, 4), (4, 1), (9, 2), (6, 0))
DRAFTED = 4
# Five tokens: (text, the target's probability p, the draft's probability q).
TOKENS = (("the", 0.40, 0.25), ("a", 0.25, 0.45), ("my", 0.20, 0.10), ("one", 0.10, 0.15), ("his", 0.05, 0.05))
# For each round: accepted drafts of the row that accepted most.
BEST = (7, 9, 3, 2, 0, 5, 5, 7, 4, 1)


def svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """One picture; `title` is what a screen reader says."""
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{title}" '
        f'class="drawing" style="max-width:{width}px">{"".join(parts)}</svg>'
    )


def rect(x: float, y: float, width: float, height: float, kind: str, radius: float = 3) -> str:
    """A box of a kind (a class of page.css)."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" class="{kind}"/>'


def text(x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> str:
    """A line of text whose baseline is at y."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{words}</text>'


def decoders() -> str:
    """What each decoder does in the same time, for two sequences."""
    target, draft, gap, height = 54, 16, 3, 26
    labels = [METHODS[name].label for name in DEFAULT_LANES]
    lanes = (
        ([("T", "both", 1)] * 10, "10 steps, 1 token for each sequence: 20 tokens"),
        ([("D", "", 0)] * 3 + [("T", "row 1", 4)] + [("D", "", 0)] * 3 + [("T", "row 1", 2)]
         + [("D", "", 0)] * 3 + [("T", "row 2", 3)] + [("D", "", 0)] * 3 + [("T", "row 2", 4)]
         + [("D", "", 0)] * 3 + [("T", "row 2", 3)], "5 rounds of one sequence each: 16 tokens"),
        (([("D", "", 0)] * 3 + [("T", "both", 6)]) * 5, "5 rounds of both sequences: 30 tokens"),
    )  # fmt: skip
    parts = []
    for i, (name, (steps, sum_up)) in enumerate(zip(labels, lanes, strict=True)):
        y, x = 8 + 66 * i, 92.0
        parts.append(text(0, y + 18, name, kind=f"strong lane-{i + 1}"))
        for step, whose, _ in steps:
            width = target if step == "T" else draft
            parts.append(rect(x, y, width, height, "box-target" if step == "T" else "box-draft"))
            if whose:
                parts.append(text(x + width / 2, y + 17, whose, "middle", "small on-target"))
            x += width + gap
        parts.append(text(92, y + height + 17, sum_up, kind="soft"))
    parts.append(rect(92, 206, 14, 14, "box-target") + text(112, 218, "target: one forward", kind="soft"))
    parts.append(rect(252, 206, 14, 14, "box-draft") + text(272, 218, "draft: one small forward", kind="soft"))
    title = "In the same time regular decoding writes 20 tokens, speculative 16 and BASS 30, in this example"
    return svg(664, 226, title, parts)


def cache() -> str:
    """The cache's rows after a round: each at its own length."""
    size, step = 22, 25
    parts = []
    for r, (kept, accepted) in enumerate(CACHE_ROWS):
        y = 26 + r * 34
        parts.append(text(0, y + 16, f"row {r + 1}", kind="soft"))
        for i in range(kept + DRAFTED + 1):
            kind = "kept"
            if i > kept:
                kind = "fit" if i - kept <= accepted else "unfit"
            parts.append(rect(48 + i * step, y, size, size, f"cell-{kind}"))
        length = 48 + (kept + 1 + accepted) * step - 1.5
        parts.append(f'<path d="M{length:g} {y - 4} v{size + 8}" class="mark"/>')
    key = (("kept", "in the cache before"), ("fit", "accepted draft"), ("unfit", "rejected draft"))
    for i, (kind, words) in enumerate(key):
        parts.append(rect(48 + 160 * i, 168, 14, 14, f"cell-{kind}"))
        parts.append(text(68 + 160 * i, 180, words, kind="soft"))
    parts.append(text(0, 14, "bars: lengths after the round", kind="soft"))
    return svg(
        560, 188, "A cache whose rows accepted four, one, two and no drafts; each has its own length", parts
    )


def rejection() -> str:
    """Accepted: min(p, q). Where q is larger, a draft may be rejected; then max(0, p - q) is drawn from."""
    scale, base, parts = 300, 168, []
    for i, (word, p, q) in enumerate(TOKENS):
        x, stands = 18 + 104 * i, min(p, q)
        parts.append(rect(x, base - scale * stands, 64, scale * stands, "bar-stands", 0))
        if p > q:
            parts.append(rect(x, base - scale * p, 64, scale * (p - q), "bar-residual", 0))
        elif q > p:
            parts.append(rect(x, base - scale * q, 64, scale * (q - p), "bar-falls", 0))
        parts.append(text(x + 32, base + 18, f"“{word}”", "middle"))
        parts.append(text(x + 32, base + 35, f"p {p:.2f}  q {q:.2f}", "middle", "small soft"))
    key = (
        ("stands", 140, "accepted: min(p, q)"),
        ("falls", 130, "drafted, rejected"),
        ("residual", 200, "recovered: max(0, p − q)"),
    )
    x = 18
    for kind, width, words in key:
        parts.append(rect(x, 218, 14, 14, f"bar-{kind}") + text(x + 20, 230, words, kind="soft"))
        x += width + 20
    accepted = sum(min(p, q) for _, p, q in TOKENS)
    return svg(540, 238, f"Five tokens with p and q; {accepted:.0%} of the drafts are accepted", parts)


def lengths() -> str:
    """Algorithm 1's draft length after each round's best row."""
    policy = Algorithm1()
    drawn = [policy.length]
    for best in BEST:
        policy.update([best])
        drawn.append(policy.length)
    width, scale, base = 44, 11, 150
    parts = []
    for i, length in enumerate(drawn):
        x = 70 + width * i
        parts.append(rect(x, base - scale * length, width - 6, scale * length, "bar-length", 2))
        parts.append(text(x + 19, base - scale * length - 5, str(length), "middle", "strong"))
        if i < len(BEST):
            full = " strong" if BEST[i] >= length else ""
            parts.append(text(x + 19, base + 18, str(min(BEST[i], length)), "middle", full.strip()))
    parts.append(text(0, base - 4, "drafted", kind="soft"))
    parts.append(text(0, base + 18, "best row", kind="soft"))
    return svg(560, 176, f"Draft lengths {', '.join(map(str, drawn))} by Algorithm 1", parts)
