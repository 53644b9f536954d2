"""Races in this process, one at a time: the default, and what each worker on Ray does too.

Contract: `Local` holds the loaded pair, measures its costs between races, counts a prompt's tokens, and runs races
of it, or of another pair where the operator allows that. Non-goals: loading (bass_core); which race waits for
which (Gradio's queue here, queue.py on Ray).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from bass_core import ModelPair, RequestError, Snapshot, count_tokens, load_pair, may_measure, measure_ahead, race
from ui.page import limits
from ui.page.choices import choices
from ui.page.limits import Limits
from ui.page.request import RaceRequest
from ui.sources.idle import IdleWork
from ui.sources.source import NOTHING, Ask, Count, Facts, Source

Stopped = Callable[[], bool]


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


def prompt_count(pair: ModelPair, bounds: Limits) -> Count | None:
    """The Count of this pair's tokenizer; None for a pair without one."""
    if pair.tokenizer is None:
        return None

    def count(prompt: str, by_line: bool = False) -> str:
        if not isinstance(prompt, str) or not prompt.strip():
            return NOTHING
        try:
            # A prompt with too many characters is not tokenized.
            text = limits.prompt("", prompt, bounds)
            prompts = limits.lines(text, bounds) if by_line else [text]
            tokens = max(count_tokens(pair, one) for one in prompts)
        except RequestError as error:
            return json.dumps({"text": str(error), "refused": True})
        words = f"{tokens:,} of {pair.context_length:,} tokens"
        if by_line:
            words = f"{len(prompts)} prompts, the longest {words}" if len(prompts) > 1 else f"1 prompt, {words}"
        return json.dumps({"text": words, "refused": False})

    return count


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

    def count(self, bounds: Limits) -> Count | None:
        """How long a prompt is in tokens; None without a tokenizer."""
        return prompt_count(self.pair, bounds)

    def facts(self, threads: int) -> Facts:
        """`threads`: of the models, on a CPU."""
        pair, ask = self.pair, self.ask
        where = " and ".join(pair.places)
        about = f"{shown_name(pair.name or ask.pair)} on {where}, {pair.weight_dtype}"
        if pair.device.type == "cpu":
            about += f", {threads} thread{'s' * (threads > 1)}"
        about += f", {pair.computed_by}" if pair.computed_by else ""
        about += f", attention by {pair.attention}" if pair.attention else ""
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
