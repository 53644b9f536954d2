"""Runs races in this process, one at a time. This is the default, and each Ray worker does it too. See `Local`.

`Local` loads the pair, measures its costs between races, counts the tokens of a prompt, and runs races with it, or
with another pair if the operator allows that. Races wait for each other in Gradio's queue, or on Ray in queue.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Any

from bass_core import ModelPair, RequestError, Snapshot, count_tokens, load_pair, may_measure, measure_ahead
from ui.page import limits
from ui.page.choices import choices
from ui.page.first import remember
from ui.page.limits import Limits
from ui.page.request import RaceRequest
from ui.sources.idle import IdleWork
from ui.sources.source import NOTHING, Count, PairInfo, PairOptions, RaceSource

Stopped = Callable[[], bool]


class Models:
    """The operator's own pair, and the last other pair that a visitor named (never one if `load` is None)."""

    def __init__(self, own: ModelPair, load: Callable[[str], ModelPair] | None = None) -> None:
        self.own, self._load = own, load
        self._other: tuple[str, ModelPair] | None = None

    def get(self, name: str) -> ModelPair:
        """Return the pair of that name ("" for the operator's own). Raises RequestError if it is not allowed."""
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


def prompt_count(pair: ModelPair, bounds: Limits) -> Count | None:
    """Return a Count for this pair's tokenizer, or None if it has none."""
    if pair.tokenizer is None:
        return None

    def count(prompt: str, by_line: bool = False) -> str:
        if not isinstance(prompt, str) or not prompt.strip():
            return NOTHING
        try:
            # Refuses a prompt with too many characters before it is tokenized.
            text = limits.prompt("", prompt, bounds)
            prompts = limits.lines(text, bounds) if by_line else [text]
            tokens = max(count_tokens(pair, text) for text in prompts)
        except RequestError as error:
            return json.dumps({"text": str(error), "refused": True})
        words = f"{tokens:,} of {pair.context_length:,} tokens"
        if by_line:
            words = f"{len(prompts)} prompts, the longest {words}" if len(prompts) > 1 else f"1 prompt, {words}"
        return json.dumps({"text": words, "refused": False})

    return count


def race_source(pair: ModelPair, models: Models | None = None) -> RaceSource:
    """Return a generator function with plain data in and out, so that a ZeroGPU worker process can run it."""
    loaded = models or Models(pair)

    def snapshots(request: RaceRequest, stopped: Stopped = lambda: False) -> Generator[Snapshot, None, None]:
        chosen = loaded.get(request.pair)
        with closing(request.run(chosen, stopped)) as race:
            for snapshot in race:
                yield snapshot
                if snapshot["done"]:
                    remember(chosen, request.settings(), snapshot["lanes"])

    return snapshots


class Local:
    """The operator's pair, loaded and ready to race.

    Attributes:
        models: the pairs that races may use.
        idle: measures costs between races.
        unshared: runs races without pausing `idle`, for a service that never starts it.
        source: runs races, during which `idle` pauses.
    """

    def __init__(self, ask: PairOptions) -> None:
        self.ask = ask
        self.pair = load_pair(ask.pair, draft=ask.draft, **self._where())
        self.models = Models(self.pair, self._load if ask.any_model else None)
        self.idle = IdleWork(self._refine)
        self.unshared = race_source(self.pair, self.models)
        self.source = self.idle.pausing_for(self.unshared)

    def count(self, bounds: Limits) -> Count | None:
        """Return a Count for the pair's tokenizer, or None if it has none."""
        return prompt_count(self.pair, bounds)

    def facts(self, threads: int) -> PairInfo:
        """Return the page's information about the pair. `threads` is the number of the models' CPU threads."""
        return facts(self.pair, self.ask, threads)

    def _load(self, name: str) -> ModelPair:
        return load_pair(name, **self._where())

    def _where(self) -> dict[str, Any]:
        return {"device": self.ask.device, "dtype": self.ask.dtype, "device_map": self.ask.device_map}

    def _refine(self) -> Generator[None, None, None]:
        if self.ask.measures and may_measure():
            yield from measure_ahead(self.pair, self.ask.max_batch)


def facts(pair: ModelPair, ask: PairOptions, threads: int) -> PairInfo:
    """Return the page's information about a pair that was loaded with these options."""
    where = " and ".join(pair.places)
    about = f"{shown_name(pair.name or ask.pair)} on {where}, {pair.weight_dtype}"
    if pair.device.type == "cpu":
        about += f", {threads} thread{'s' * (threads > 1)}"
    about += f", {pair.computed_by}" if pair.computed_by else ""
    about += f", attention by {pair.attention}" if pair.attention else ""
    names = {
        "pair": shown_name(pair.name or ask.pair),
        "draft": ask.draft and shown_name(ask.draft),
        **({"device_map": ask.device_map} if ask.device_map else {"device": pair.device.type}),
        "dtype": pair.weight_dtype,
    }
    offered = choices(pair, ask.draft_length, ask.max_batch, ask.measures)
    return PairInfo(about, offered, names, pair.tokenizer is not None, pair.advice)


def shown_name(pair: str) -> str:
    """Return the pair's name as visitors see it. For a folder, that is its name without the path."""
    return Path(pair).resolve().name if os.path.isdir(pair) else pair
