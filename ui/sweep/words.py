"""What a sweep says in sentences: where each line is ahead, and where the ridge lies.

Contract: from the sweep's points and ridge alone. Non-goals: drawing.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from .figures import Line, Point, Sweep

AGAINST = {"ahead": "ahead of regular decoding", "level": "level with it", "behind": "behind it"}


def sentences(sweep: Sweep) -> list[str]:
    """One for each line that has a point, and one on the ridge."""
    lines = (_line(line, sweep["points"]) for line in sweep["lines"])
    return [*(one for one in lines if one), *_ridge(sweep), *_missing(sweep)]


def _line(line: Line, points: Iterable[Point]) -> str:
    """Where a line is ahead, level and behind: "Algorithm 1: ahead of regular decoding at batch 1 and 2"."""
    own = [one for one in points if one["draft_length"] == line["draft_length"] and one["against"] is not None]
    runs = [(name, [one["batch"] for one in same]) for name, same in groupby(own, lambda one: one["against"])]
    batches = {name: _joined([_run(run) for other, run in runs if other == name]) for name in AGAINST}
    parts = [f"{words} at batch {batches[name]}" for name, words in AGAINST.items() if batches[name]]
    if not parts:
        return ""
    # The first part names what "it" is.
    first = parts[0].replace("with it", "with regular decoding").replace("behind it", "behind regular decoding")
    return f"{line['label'][0].upper()}{line['label'][1:]}: {', '.join([first, *parts[1:]])}."


def _ridge(sweep: Sweep) -> list[str]:
    tokens = sweep["ridge"]["tokens"]
    if tokens is None:
        return ["Ridge: n/a, since what this machine reads and multiplies at most is not known."]
    said = f"Ridge: from {tokens:.0f} tokens a step on, multiplying takes longer than reading."
    fixed = [line["draft_length"] for line in sweep["lines"] if isinstance(line["draft_length"], int)]
    rounds = "".join(
        f"; with {count} draft{'s' * (count > 1)} a row at batch {tokens / (count + 1):.1f}" for count in fixed
    )
    return [f"{said} Plain steps get there at batch {tokens:.0f}{rounds}."]


def _missing(sweep: Sweep) -> list[str]:
    """The batches of a prediction that the memory does not hold."""
    missing = dict.fromkeys(str(one["batch"]) for one in sweep["points"] if one["speedup"] is None)
    if sweep["kind"] != "predicted" or not missing:
        return []
    return [f"Batch {_joined([*missing])}: n/a, since the models and the rows' keys and values do not fit."]


def _run(batches: list[int]) -> str:
    """Neighbouring batches: "1", "1 and 2", or "1 to 8"."""
    return f"{batches[0]} to {batches[-1]}" if len(batches) > 2 else _joined([str(one) for one in batches])


def _joined(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
