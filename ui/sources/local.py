"""Races in this process, one at a time: the default, and what each worker on Ray does too.

Contract: `Local` holds the loaded pair, measures its costs between races, and runs races of it or of another pair
that the operator allows. Non-goals: who waits for whom (Gradio's queue here, queue.py on Ray).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from bass_core import ModelPair, Snapshot, load_pair, may_measure, measure_ahead, race
from ui.page.choices import choices
from ui.page.limits import Limits
from ui.page.request import RaceRequest
from ui.sources.count import Count, prompt_count
from ui.sources.idle import IdleWork
from ui.sources.models import Models
from ui.sources.source import Ask, Facts, Source

Stopped = Callable[[], bool]


def race_source(pair: ModelPair, models: Models | None = None) -> Source:
    """A generator function with plain data in and out, so that a ZeroGPU worker process can run it."""
    shelf = models or Models(pair)

    def snapshots(request: RaceRequest, stopped: Stopped = lambda: False) -> Generator[Snapshot, None, None]:
        yield from race(shelf.get(request.pair), **request.arguments(), stopped=stopped)

    return snapshots


class Local:
    """The operator's pair, loaded."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.pair = load_pair(ask.pair, draft=ask.draft, **self._where())
        self.models = Models(self.pair, self._load if ask.any_model else None)
        self.idle = IdleWork(self._refine)
        self.alone = race_source(self.pair, self.models)
        self.source = self.idle.beside(self.alone)

    def count(self, limits: Limits) -> Count | None:
        """How long a prompt is in tokens; None without a tokenizer."""
        return prompt_count(self.pair, limits)

    def facts(self, threads: int) -> Facts:
        """`threads`: of the models, on a CPU."""
        pair, ask = self.pair, self.ask
        where = " and ".join(pair.places)
        about = f"{shown_name(pair.name or ask.pair)} on {where}, {pair.weight_dtype}"
        if pair.device.type == "cpu":
            about += f", {threads} thread{'s' * (threads > 1)}"
            about += f", {pair.computed_by}" if pair.computed_by else ""
        names = {
            "pair": shown_name(ask.pair),
            "draft": ask.draft and shown_name(ask.draft),
            **({"device_map": ask.device_map} if ask.device_map else {"device": pair.device.type}),
            "dtype": pair.weight_dtype,
        }
        return Facts(about, choices(pair, ask.draft_length), names, pair.tokenizer is not None)

    def _load(self, name: str) -> ModelPair:
        return load_pair(name, **self._where())

    def _where(self) -> dict[str, Any]:
        return {"device": self.ask.device, "dtype": self.ask.dtype, "device_map": self.ask.device_map}

    def _refine(self) -> Generator[None, None, None]:
        if self.ask.measures and may_measure():
            yield from measure_ahead(self.pair, self.ask.max_batch)


def shown_name(pair: str) -> str:
    """The pair's name as visitors see it; for a folder, the folder's name without its path."""
    return Path(pair).resolve().name if os.path.isdir(pair) else pair
