"""Snapshots as deltas, so that a worker sends only the new part of a race. See `DeltaEncoder` and `DeltaDecoder`.

`DeltaDecoder.decode` returns snapshots equal to those that `DeltaEncoder.encode` received. They may be any plain
data. A list or text that only grew costs no more than its new end. A decoded snapshot never changes later. A delta
is one of

    (KEEP,)                      the same as before
    (SET, value)                 replaced by value
    (TEXT, end)                  a text with `end` appended
    (LIST, {index: delta}, end)  a list with some entries changed and `end` appended
    (MAP, {key: delta})          a dict with some keys changed or added, and no other changes

For example, ["a", "b"] -> ["a", "bc", "d"] gives (LIST, {1: (TEXT, "c")}, ["d"]).
"""

from __future__ import annotations

from typing import Any, cast

from bass_core import Snapshot

KEEP, SET, TEXT, LIST, MAP = range(5)
Delta = tuple[Any, ...]


class DeltaEncoder:
    """The worker's side. Snapshots must not change after they were encoded."""

    def __init__(self) -> None:
        self._last: Any = None

    def encode(self, snapshot: Snapshot) -> Delta:
        """Return the delta from the previous snapshot."""
        delta, self._last = difference(self._last, snapshot), snapshot
        return delta


class DeltaDecoder:
    """The page's side."""

    def __init__(self) -> None:
        self._last: Any = None

    def decode(self, delta: Delta) -> Snapshot:
        """Return the next snapshot."""
        self._last = applied(self._last, delta)
        return cast(Snapshot, self._last)


def difference(old: Any, new: Any) -> Delta:
    """Return the delta that turns `old` into `new`."""
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
    # Compare as a whole first: entries that are the same object cost almost nothing.
    if new[: len(old)] == old:
        return (LIST, {}, new[len(old) :]) if len(new) > len(old) else (KEEP,)
    changed = {i: difference(a, b) for i, (a, b) in enumerate(zip(old, new, strict=False)) if a is not b}
    return (LIST, {i: delta for i, delta in changed.items() if delta != (KEEP,)}, new[len(old) :])


def _map(old: dict[Any, Any], new: dict[Any, Any]) -> Delta:
    # A delta can only append keys, not reorder or remove them.
    if list(new)[: len(old)] != list(old):
        return (SET, new)
    changed = {key: difference(old[key], value) if key in old else (SET, value) for key, value in new.items()}
    changed = {key: delta for key, delta in changed.items() if delta[0] != KEEP}
    return (MAP, changed) if changed else (KEEP,)


def applied(old: Any, delta: Delta) -> Any:
    """Return `old` with `delta` applied. `old` itself does not change."""
    kind = delta[0]
    if kind == KEEP:
        return old
    if kind == SET:
        return delta[1]
    if kind == TEXT:
        return old + delta[1]
    if kind == LIST:
        result = [*old, *delta[2]]
        for index, entry_delta in delta[1].items():
            result[index] = applied(old[index], entry_delta)
        return result
    return {**old, **{key: applied(old.get(key), entry_delta) for key, entry_delta in delta[1].items()}}
