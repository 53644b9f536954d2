"""Will it help on my prompts? One sentence, with an interval, for a sweep over a visitor's own prompts.

Contract: made of the sweep's points alone. The unit is the prompt: each counts by the logarithm of its speed-up,
and the interval is Student's t over these, so it is about prompts like these and holds what differs between them
as well as the noise of each one's races. What is said of a single prompt goes by its own two standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from .figures import Overall, Point, Sweep

# Student's t for 95 %, two-sided, by its degrees of freedom: 1 to 11.
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)


def interval(speedups: Sequence[float]) -> tuple[float, float, float]:
    """The geometric mean of 2 to 12 speed-ups, and the ends of its 95 % interval."""
    logs = [math.log(one) for one in speedups]
    middle, spread = fmean(logs), T[len(logs) - 2] * stdev(logs) / math.sqrt(len(logs))
    return math.exp(middle), math.exp(middle - spread), math.exp(middle + spread)


def overall(points: Sequence[Point]) -> Overall | None:
    """The figures over all prompts; None before two of them have a speed-up, and where none is a visitor's own."""
    known = [one["speedup"] for one in points if one["prompt"] is not None and one["speedup"]]
    if len(known) < 2:
        return None
    speedup, low, high = interval(known)
    return Overall(prompts=len(known), speedup=speedup, low=low, high=high)


def answer(sweep: Sweep) -> list[str]:
    """The sentence; none of a sweep over batches, and none before two prompts have a speed-up."""
    found, count = sweep["overall"], len(sweep["settings"].get("own_prompts", ()))
    if found is None:
        return []
    on = f"your {count} prompts" if found["prompts"] == count else f"{found['prompts']} of your {count} prompts"
    known = sorted((one for one in sweep["points"] if one["speedup"]), key=lambda one: one["speedup"] or 0.0)
    batch = f"batch {known[0]['batch']}"
    times = f"{found['speedup']:.2f} times as fast as regular decoding"
    ends = f"(95 % interval over the prompts: {found['low']:.2f} to {found['high']:.2f})"
    if found["low"] > 1:
        said = f"On {on} BASS is {times} at {batch} {ends}"
    elif found["high"] < 1:
        said = f"At {batch} it does not pay: on {on} BASS is {times} {ends}"
    else:
        said = f"At {batch} these prompts leave open whether it pays: on {on} BASS is {times} {ends}"
    return [f"{said}; {_single(known)}."]


def _single(known: Sequence[Point]) -> str:
    """Where it helps, by prompts in ascending order of their speed-up."""
    least, most = known[0], known[-1]
    if most["against"] != "ahead":
        return f"it helps on none of them, and comes closest on {_prompt(most)}"
    behind = sum(one["against"] == "behind" for one in known)
    if behind > 1:
        return f"it helps most on {_prompt(most)} and not on {behind} of them, least on {_prompt(least)}"
    return f"it helps most on {_prompt(most)} and {'not' if behind else 'least'} on {_prompt(least)}"


def _prompt(point: Point) -> str:
    return f"prompt {point['prompt']} ({point['speedup']:.2f})"
