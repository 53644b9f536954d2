"""Will it help on my prompts? `answer` replies in one sentence, with an interval.

The interval is Student's t over the logarithms of the prompts' speed-ups. So it applies to prompts like these,
and covers both the differences between prompts and the noise of each prompt's races. Statements about a
single prompt use the interval of that prompt alone, which is two standard errors wide on each side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from .figures import Overall, Point, Sweep

# Two-sided 95 % quantiles of Student's t for 1 to 11 degrees of freedom.
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)


def interval(speedups: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of 2 to 12 speed-ups, and the ends of its 95 % interval."""
    logs = [math.log(speedup) for speedup in speedups]
    middle, spread = fmean(logs), T[len(logs) - 2] * stdev(logs) / math.sqrt(len(logs))
    return math.exp(middle), math.exp(middle - spread), math.exp(middle + spread)


def overall(points: Sequence[Point]) -> Overall | None:
    """Return the figures over all of the visitor's prompts, or None before two of them have a speed-up."""
    known = [point["speedup"] for point in points if point["prompt"] is not None and point["speedup"]]
    if len(known) < 2:
        return None
    speedup, low, high = interval(known)
    return Overall(prompts=len(known), speedup=speedup, low=low, high=high)


def answer(sweep: Sweep) -> list[str]:
    """Return a list with the sentence, empty for a sweep over batches or before two prompts have a speed-up."""
    total, count = sweep["overall"], len(sweep["settings"].get("own_prompts", ()))
    if total is None:
        return []
    on = f"your {count} prompts" if total["prompts"] == count else f"{total['prompts']} of your {count} prompts"
    known = sorted(
        (point for point in sweep["points"] if point["speedup"]), key=lambda point: point["speedup"] or 0.0
    )
    batch = f"batch {known[0]['batch']}"
    times = f"{total['speedup']:.2f} times as fast as regular decoding"
    ends = f"(95 % interval over the prompts: {total['low']:.2f} to {total['high']:.2f})"
    if total["low"] > 1:
        sentence = f"On {on} BASS is {times} at {batch} {ends}"
    elif total["high"] < 1:
        sentence = f"At {batch} it does not pay off: on {on} BASS is {times} {ends}"
    else:
        sentence = f"At {batch} these prompts leave open whether it pays off: on {on} BASS is {times} {ends}"
    return [f"{sentence}; {_single(known)}."]


def _single(known: Sequence[Point]) -> str:
    """Return the clause about single prompts. `known` is sorted by ascending speed-up."""
    least, most = known[0], known[-1]
    if most["against"] != "ahead":
        return f"it helps on none of them, and comes closest on {_prompt(most)}"
    behind = sum(point["against"] == "behind" for point in known)
    if behind > 1:
        return f"it helps most on {_prompt(most)} and not on {behind} of them, least on {_prompt(least)}"
    return f"it helps most on {_prompt(most)} and {'not' if behind else 'least'} on {_prompt(least)}"


def _prompt(point: Point) -> str:
    return f"prompt {point['prompt']} ({point['speedup']:.2f})"
