"""Whether a document is a tape that the page's scripts can draw.

Contract: `fault` names the first part that is not as ui/recordings/tape.py and ui/race/feed.py describe it, or is
None. Numbers are looked at for what they point to (rows, tokens, drafts), not for whether they are true.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Check = Callable[[Any], bool]
ENDS = ("done", "stopped", "error")
ORIGINS = ("s", "a", "r", "b", "+")
KINDS = ("pr", "pl", "ve")


def number(value: Any) -> bool:
    """A number; JSON's true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def whole(value: Any) -> bool:
    """A whole number of 0 or more."""
    return type(value) is int and value >= 0


def text(value: Any) -> bool:
    """A string."""
    return isinstance(value, str)


def maybe(check: Check) -> Check:
    """None, or what passes the check."""
    return lambda value: value is None or check(value)


def every(check: Check) -> Check:
    """A list of what passes the check."""
    return lambda value: isinstance(value, list) and all(map(check, value))


def each(check: Check) -> Check:
    """An object whose values pass the check."""
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def row(*checks: Check, least: int | None = None) -> Check:
    """A list with an item for each check; those behind the first `least` may be missing at its end."""
    fewest = len(checks) if least is None else least

    def passes(value: Any) -> bool:
        fits = isinstance(value, list) and fewest <= len(value) <= len(checks)
        return fits and all(check(one) for check, one in zip(checks, value, strict=False))

    return passes


def record(**checks: Check) -> Check:
    """An object that has these keys at least."""
    return lambda value: (
        isinstance(value, dict) and all(name in value and check(value[name]) for name, check in checks.items())
    )


SOME = maybe(number)
TOKEN = row(lambda value: value in ORIGINS, text, number, lambda value: type(value) is int)
DRAFT = row(text, SOME, SOME, SOME, SOME)
CANDIDATE = row(whole, maybe(text), number, SOME, SOME)
ENDING = row(whole, maybe(whole), SOME, number, every(CANDIDATE))
DETAIL = row(
    text, lambda value: text(value) or every(text)(value), maybe(every(SOME)), maybe(every(SOME)), maybe(ENDING)
)
STEP = row(
    whole, whole, whole, whole, SOME, every(DRAFT), whole,
    maybe(every(lambda value: type(value) is int)), maybe(every(whole)), DETAIL, least=7,
)  # fmt: skip
ROUND = row(
    whole, lambda value: value in KINDS, lambda value: whole(value) or every(whole)(value), number, every(STEP),
    row(number, number), least=5,
)  # fmt: skip
NEWS = record(clock_ms=number, new=each(every(TOKEN)), rounds=every(ROUND))
LANE = record(metrics=each(lambda _: True), finish_reasons=every(maybe(text)), clock_ms=number, error=maybe(text))
VIEW = record(
    done=lambda value: isinstance(value, bool), elapsed_ms=number, lanes=each(LANE), device=each(lambda _: True),
    verdict=record(head=maybe(text), lanes=each(text)),
)  # fmt: skip
COLUMNS = each(every(SOME))
CHARTS = record(device=each(lambda _: True), series=COLUMNS, lanes=each(COLUMNS), rounds=each(COLUMNS))
HEAD = record(run=text, settings=each(lambda _: True), lanes=every(text), batch_size=whole)


def fault(document: dict[str, Any]) -> str | None:
    """The first part of a tape that can't be drawn; None if there is none."""
    if not HEAD(document.get("head")) or not document["head"]["lanes"]:
        return "its head"
    if not every(each(NEWS))(document.get("lines")) or not _follow(document["head"], document["lines"]):
        return "its lines"
    shown = every(record(lines=whole, view=VIEW))(document.get("shown"))
    if not shown or not document["shown"] or not _agree(document):
        return "what it showed"
    return None if CHARTS(document.get("charts")) and document.get("ended") in ENDS else "its charts or its end"


def _follow(head: dict[str, Any], lines: Iterable[dict[str, Any]]) -> bool:
    """Whether each line adds to rows of lanes that are there, and each round has the lengths of its rows, and
    wrote tokens that are there.
    """
    rows = {str(i) for i in range(head["batch_size"])}
    written = {name: [0] * head["batch_size"] for name in head["lanes"]}
    for line in lines:
        for name, news in line.items():
            if name not in written or not news["new"].keys() <= rows:
                return False
            for index, tokens in news["new"].items():
                if not written[name][int(index)] and tokens and tokens[0][0] == "+":
                    return False
                written[name][int(index)] += sum(token[0] != "+" for token in tokens)
            if any(isinstance(one[2], list) and len(one[2]) != len(one[4]) for one in news["rounds"]):
                return False
            steps = (step for one in news["rounds"] for step in one[4])
            if not all(_points(step, written[name]) for step in steps):
                return False
    return True


def _points(step: list[Any], written: list[int]) -> bool:
    """Whether a row of a round points to tokens, and to drafts before each other."""
    index, start, count, accepted, _, drafts, _, *tree = step
    if index >= len(written) or start + count > written[index] or accepted > len(drafts):
        return False
    parents, path = (*tree, None, None)[:2]
    if parents is not None and (
        len(parents) != len(drafts) or any(not -1 <= p < i for i, p in enumerate(parents))
    ):
        return False
    return path is None or all(place < len(drafts) for place in path)


def _agree(document: dict[str, Any]) -> bool:
    """Whether the instants go forward through the lines, and each has the figures of all lanes and rows."""
    head, before = document["head"], 0
    for one in document["shown"]:
        lanes = one["view"]["lanes"]
        if not before <= one["lines"] <= len(document["lines"]) or not lanes.keys() <= set(head["lanes"]):
            return False
        if any(len(lane["finish_reasons"]) > head["batch_size"] for lane in lanes.values()):
            return False
        before = one["lines"]
    return True
