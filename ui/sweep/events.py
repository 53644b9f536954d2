"""The sweep's generator events: the page's button and the API's `/sweep`. See `SweepEvents`.

As with a race (ui/page/events.py), each event closes its race on every path, returns freed memory to the system,
and waits for the device in the same queue. Points that were measured before an error or a limit are kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import partial
from typing import Any
from uuid import uuid4

import gradio as gr

from bass_core import BassError
from ui.page.events import UNEXPECTED, Events, in_a_sentence
from ui.page.setting import SETTINGS, shown
from ui.race.feed import text
from ui.sources.source import give_memory_back

from .answer import answer
from .figures import Sweep, sentences
from .measure import measured
from .predicted import assumptions, predicted
from .request import SweepRequest, default_lengths, make_sweep

log = logging.getLogger(__name__)
ABOUT_API = """Speed-up of BASS over regular decoding by batch or prompt: yields {"done", "points", "overall"}.

If a sweep is refused or fails, the last state has "error", one sentence, next to the points so far.

Parameters:
    prompt: the text that every row answers. Rows are sampled, so they differ.
    max_new_tokens: the most new tokens per row and race; null: 160.
    temperature: 0 counts as 0.7, because all rows of one prompt would be equal at 0.
    seed: the same seed gives the same rows.
    batches: batch sizes; null: 1, 2, 4 and 8.
    draft_lengths: values as for "draft_length" of /race; null: "bass" (Algorithm 1), "auto" and 4.
    seconds: about how long the sweep may take; null: a minute.
    own_prompts: 2 to 12 texts to sweep over, at one batch (null: 4) and one draft length (null: "auto"). "overall"
        is their speed-up, with a 95 % interval over the prompts.
"""


class SweepEvents:
    """The handlers that the sweep's panel binds, for the races of `events`."""

    def __init__(self, events: Events) -> None:
        self.events = events

    def measure(self, fixed: object, own: object, *values: object) -> Iterator[tuple[Any, Any]]:
        """Measure a sweep for the page.

        Args:
            fixed: the fixed draft length.
            own: the visitor's own prompts, or an empty text.
            values: the form's values in the order of SETTINGS.

        Yields:
            (state of the panel as JSON, the button).
        """
        state: dict[str, Any] = {"run": uuid4().hex, "phase": "running", "message": "", "sweep": None}
        yield text(state), gr.update(interactive=False)
        try:
            names = [setting.name for setting in shown()]
            settings = dict(zip(names, values, strict=True))
            settings |= {"own_prompts": own, "max_new_tokens": None}
            if str(own or "").strip():
                settings["batches"] = [settings["batch_size"]]
            else:
                settings["draft_lengths"] = default_lengths(fixed)
            request = make_sweep(settings, self.events.limits)
            with closing(self._sweep(request)) as sweeps:
                for sweep in sweeps:
                    state["sweep"] = {**sweep, "sentences": _sentences(sweep)}
                    yield text(state), gr.skip()
            state["phase"] = "done"
        except BassError as error:
            state |= {"phase": "error", "message": str(error)}
        except Exception:
            log.exception("A sweep failed.")
            state |= {"phase": "error", "message": UNEXPECTED}
        yield text(state), gr.update(interactive=True)

    @staticmethod
    def predict(fixed: object, machine: object, models: object, acceptance: object, origin: object) -> str:
        """Return the state of the panel, as JSON, for the sweep that is predicted for these values."""
        state: dict[str, Any] = {"run": uuid4().hex, "phase": "done", "message": "", "sweep": None}
        try:
            sweep = predicted(fixed, machine, models, acceptance, origin)
            state["sweep"] = {**sweep, "sentences": sentences(sweep), "assumptions": assumptions(sweep)}
        except BassError as error:
            state |= {"phase": "error", "message": str(error)}
        return text(state)

    @property
    def api(self) -> Callable[..., Iterator[dict[str, Any]]]:
        """The handler of `/sweep`."""

        def answer(
            prompt: str = SETTINGS["prompt"].default,
            max_new_tokens: int | None = None,
            temperature: float = SETTINGS["temperature"].default,
            seed: int = SETTINGS["seed"].default,
            batches: list[int] | None = None,
            draft_lengths: list[str] | None = None,
            seconds: float | None = None,
            own_prompts: list[str] | None = None,
        ) -> Iterator[dict[str, Any]]:
            settings: dict[str, Any] = {
                "prompt": prompt,
                "max_new_tokens": max_new_tokens,
                "temperature": temperature,
                "seed": seed,
            }
            settings |= {"batches": batches, "draft_lengths": draft_lengths, "seconds": seconds}
            yield from self._answer(settings | {"own_prompts": own_prompts})

        answer.__doc__ = ABOUT_API
        return answer

    def _answer(self, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
        last: dict[str, Any] = {"points": [], "overall": None}
        try:
            with closing(self._sweep(make_sweep(settings, self.events.limits))) as sweeps:
                for sweep in sweeps:
                    last = {**sweep}
                    yield last
        except Exception as error:
            refusal = in_a_sentence(error)
            yield {**last, "done": True, "error": refusal.message}
            raise refusal from error

    def _sweep(self, request: SweepRequest) -> Generator[Sweep, None, None]:
        try:
            races = partial(measured, request, limits=self.events.limits)
            yield from self.events.together(races, request.most_seconds)
        finally:
            give_memory_back()


def _sentences(sweep: Sweep) -> list[str]:
    return answer(sweep) if sweep["settings"]["own_prompts"] else sentences(sweep)
