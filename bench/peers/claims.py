"""What the bench of peers must show, from the medians of one run.

Contract: a claim whose arms are not in the run has no value and is open, and so is every ratio of a quick run.
"""

from __future__ import annotations

from typing import Any

from ..report.report import claim, median
from .arms import LLAMA_CPP, OURS, TRANSFORMERS
from .turns import MOST_OTHERS, Turns

# Cores that may be at work while nobody has anything to do: what reading the clocks takes, and no spinning thread.
MOST_BUSY = 0.1

Claim = dict[str, Any]


def claims(turns: list[Turns], dtype: str, native: bool, quick: bool) -> list[Claim]:
    """All claims. dtype: the weights of our 16-bit lanes. native: whether this CPU multiplies bfloat16 itself."""
    ms = {one.arm.key: one.median_ms for one in turns}
    regular = {batch: ms.get((OURS, "regular", batch, dtype)) for batch in (1, 4, 8)}
    generate = {batch: ms.get((TRANSFORMERS, "generate", batch, dtype)) for batch in (1, 8)}
    plain = {batch: ms.get((LLAMA_CPP, "plain", batch, "Q4_1")) for batch in (1, 4, 8)}
    drafting = [ms[key] for key in ms if key[0] == OURS and key[1] != "regular" and key[2:] == (1, dtype)]
    least = 4.0 if native else 3.0
    made = [
        _ratio(
            f"transformers' generate / our regular, batch {batch}", generate[batch], regular[batch], least, quick
        )
        for batch in generate
    ]
    name = "transformers' generate / our best speculation, batch 1"
    made.append(_ratio(name, generate[1], min(drafting, default=None), 5.5, quick or not native))
    decided = quick or dtype != "bfloat16"
    for batch, bar in ((1, 0.85), (4, 1.5), (8, 1.5)):
        name = f"our {dtype} regular's tokens/s / llama.cpp's in 4 bits, batch {batch}"
        made.append(_ratio(name, plain[batch], regular[batch], bar, decided))
    int4 = ms.get((OURS, "regular", 1, "int4"))
    made.append(_ratio("our int4 regular's tokens/s / llama.cpp's in 4 bits, batch 1", plain[1], int4, 1.0, quick))
    return [*made, *_alike(turns), *_quiet(turns, quick)]


def _ratio(name: str, top: float | None, bottom: float | None, least: float, undecided: bool) -> Claim:
    bar = f"at least {least:g}"
    if top is None or bottom is None:
        return {"name": name, "value": None, "bar": bar, "holds": None}
    return claim(name, top / bottom, bar, None if undecided else top / bottom >= least)


def _alike(turns: list[Turns]) -> list[Claim]:
    """For each kind of weights: the share of prompts for which all our methods wrote one text at every batch."""
    made = []
    for weights in dict.fromkeys(one.arm.weights for one in turns if one.arm.who == OURS):
        written: dict[int, set[tuple[int, ...]]] = {}
        for one in turns:
            if one.arm.who == OURS and one.arm.weights == weights:
                for rows in one.texts:
                    for prompt, row in enumerate(rows):
                        written.setdefault(prompt, set()).add(tuple(row))
        share = sum(len(texts) == 1 for texts in written.values()) / len(written)
        made.append(claim(f"prompts with one text in all our {weights} arms", share, "1.0", share == 1))
    return made


def _quiet(turns: list[Turns], quick: bool) -> list[Claim]:
    """No arm leaves threads at work, and no other program disturbed the run. Medians, as of the times."""
    busy, others = max(median(one.busy) for one in turns), max(median(one.others) for one in turns)
    return [
        claim(name, value, f"at most {most}", None if quick else value <= most)
        for name, value, most in (
            ("cores at work between calls, most", busy, MOST_BUSY),
            ("cores that other programs used during calls, most", others, MOST_OTHERS),
        )
    ]
