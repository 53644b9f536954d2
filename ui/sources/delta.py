"""Snapshots as differences: what a worker sends of a race that only grows.

Contract: `Decoder.decode` gives back, snapshot by snapshot, what `Encoder.encode` was given, equal under ==; any
plain data will do, and a list or a text that only grew costs no more than its new end. A decoded snapshot never
changes afterwards. A delta is a tuple whose first entry says what it is:

(KEEP,): the same as before. (SET, value): replaced. (TEXT, end): a text with this added. (LIST, {index: delta},
end): a list whose entries changed like this, with this added. (MAP, {key: delta}): a dict with these keys changed
or added, and no other changes.
"""

from __future__ import annotations

from typing import Any, cast

from bass_core import Snapshot

KEEP, SET, TEXT, LIST, MAP = range(5)
Delta = tuple[Any, ...]


class Encoder:
    """The worker's side; the snapshots that it is given must not change afterwards."""

    def __init__(self) -> None:
        self._last: Any = None

    def encode(self, snapshot: Snapshot) -> Delta:
        """The difference from the last snapshot."""
        delta, self._last = difference(self._last, snapshot), snapshot
        return delta


class Decoder:
    """The page's side."""

    def __init__(self) -> None:
        self._last: Any = None

    def decode(self, delta: Delta) -> Snapshot:
        """The snapshot that follows the last one."""
        self._last = applied(self._last, delta)
        return cast(Snapshot, self._last)


def difference(old: Any, new: Any) -> Delta:
    """What makes `new` of `old`."""
    if old is new:
        return (KEEP,)
    if type(old) is not type(new):
        return (SET, new)
    if isinstance(new, str):
        if old == new:
            return (KEEP,)
        return (TEXT, new[len(old) :]) if old and new.startswith(old) else (SET, new)
    if isinstance(new, list):
        return _list(old, new)
    if isinstance(new, dict):
        return _map(old, new)
    return (KEEP,) if old == new else (SET, new)


def _list(old: list[Any], new: list[Any]) -> Delta:
    if len(new) < len(old):
        return (SET, new)
    # Compared as a whole first: entries that are the same objects cost next to nothing.
    if new[: len(old)] == old:
        return (LIST, {}, new[len(old) :]) if len(new) > len(old) else (KEEP,)
    changed = {i: difference(a, b) for i, (a, b) in enumerate(zip(old, new, strict=False)) if a is not b}
    return (LIST, {i: one for i, one in changed.items() if one != (KEEP,)}, new[len(old) :])


def _map(old: dict[Any, Any], new: dict[Any, Any]) -> Delta:
    # Keys keep their order, and new ones follow.
    if list(new)[: len(old)] != list(old):
        return (SET, new)
    changed = {key: difference(old[key], value) if key in old else (SET, value) for key, value in new.items()}
    changed = {key: one for key, one in changed.items() if one[0] != KEEP}
    return (MAP, changed) if changed else (KEEP,)


def applied(old: Any, delta: Delta) -> Any:
    """The value that `delta` makes of `old`, which stays as it is."""
    kind = delta[0]
    if kind == KEEP:
        return old
    if kind == SET:
        return delta[1]
    if kind == TEXT:
        return old + delta[1]
    if kind == LIST:
        made = [*old, *delta[2]]
        for index, one in delta[1].items():
            made[index] = applied(old[index], one)
        return made
    return {**old, **{key: applied(old.get(key), one) for key, one in delta[1].items()}}
