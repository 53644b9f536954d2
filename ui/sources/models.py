"""The models that a visitor may race.

Contract: the operator's pair, and any other only where the operator allows it.
Non-goals: loading (bass_core) and limits on a request's size (limits.py).
"""

from __future__ import annotations

from collections.abc import Callable

from bass_core import ModelPair, RequestError


class Models:
    """The operator's own pair, and the last other pair that was asked for.

    `load` loads a pair by name, folder or Hub id; None, the default, means that visitors can't name a pair.
    """

    def __init__(self, own: ModelPair, load: Callable[[str], ModelPair] | None = None) -> None:
        self.own, self._load = own, load
        self._other: tuple[str, ModelPair] | None = None

    def get(self, name: str) -> ModelPair:
        """The pair of that name; "" is the operator's. Raises RequestError for one that is not allowed."""
        if name in ("", self.own.name):
            return self.own
        if self._load is None:
            raise RequestError(
                "This server races only its own pair: leave the pair empty. Its operator can allow others with "
                "--allow-any-model."
            )
        if self._other is None or self._other[0] != name:
            self._other = None  # free its memory before the next one is loaded
            self._other = (name, self._load(name))
        return self._other[1]
