"""The picture of the decoders in "How it works", as inline SVG.

Contract: colours come from how.css through class names. The numbers are an example.
"""

from __future__ import annotations

from collections.abc import Iterable

from bass_core import DEFAULT_LANES, METHODS


def svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """One picture; `title` is what a screen reader says."""
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{title}" '
        f'class="drawing" style="max-width:{width}px">{"".join(parts)}</svg>'
    )


def rect(x: float, y: float, width: float, height: float, kind: str, radius: float = 3) -> str:
    """A box of a kind (a class of how.css)."""
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
            parts.append(rect(x, y, width, height, "is-target" if step == "T" else "is-draft"))
            if whose:
                parts.append(text(x + width / 2, y + 17, whose, "middle", "small on-dark"))
            x += width + gap
        parts.append(text(92, y + height + 17, sum_up, kind="soft"))
    parts.append(rect(92, 206, 14, 14, "is-target") + text(112, 218, "target: one forward", kind="soft"))
    parts.append(rect(252, 206, 14, 14, "is-draft") + text(272, 218, "draft: one small forward", kind="soft"))
    title = "In the same time regular decoding writes 20 tokens, speculative 16 and BASS 30, in this example"
    return svg(664, 226, title, parts)
