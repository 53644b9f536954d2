"""The two generator events: the page's Run and the API's `/race`.

Contract: each yields until its race is done, and closes the race on every path: cancelled (GeneratorExit), failed
or finished. Neither holds a thread-bound context across a yield: Gradio may resume a generator on another thread.
"""

import json
import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any
from uuid import uuid4

import gradio as gr

from bass_core import BassError, LaneSnapshot, Record, Snapshot
from ui.page.limits import Limits
from ui.page.request import RaceRequest, describe, make_request
from ui.page.setting import shown
from ui.race.feed import PageFeed
from ui.sources.source import Source, Together, give_memory_back, one_by_one, waits, words

log = logging.getLogger(__name__)
ABOUT_API = 'One prompt, several decoders: yields snapshots {"done", "lanes", "device"}, the last with done=True.'
# JavaScript for what a button's event shows, and the button: after a full queue, a lost server or a stop no
# generator is left to report it.
FAILED = """() => [
  JSON.stringify({
    phase: "lost", message: "The server is busy or unreachable: try again in a moment.", key: Date.now(),
    run: String(Date.now())}),
  {__type__: "update", interactive: true}]"""
UNEXPECTED = "An internal error stopped the race; the server's log has the details. What was shown before is kept."


class Events:
    """The handlers that the page binds; `source` gives a race's snapshots, `pair` names the models.

    together: runs a sweep's races; None: one by one from `source`.
    """

    def __init__(
        self,
        source: Source,
        limits: Limits,
        pair: Mapping[str, Any] | None = None,
        together: Together | None = None,
    ) -> None:
        self.source, self.limits, self.pair = source, limits, pair
        self.together = together or one_by_one(source)

    def run(self, *values: object) -> Iterator[tuple[Any, ...]]:
        """Takes the form's values in the table's order; trailing ones may be missing.

        Yields (log, view, charts, status, Run button); gr.skip() leaves an output unchanged.
        """
        kept, status = gr.skip(), _status("done")
        try:
            names = [setting.name for setting in shown()]
            request = make_request(dict(zip(names, values, strict=False)), self.limits)
            yield kept, kept, kept, _status("running"), gr.update(interactive=False)
            with (
                closing(PageFeed(uuid4().hex, request.settings(), self.pair)) as feed,
                closing(self._race(request)) as snapshots,
            ):
                said: tuple[str, Record | None] = ("", None)
                for snapshot in snapshots:
                    drawn = feed.update(snapshot) if snapshot["lanes"] else (kept, kept, kept)
                    before, said = said, (words(snapshot), snapshot.get("measuring"))
                    yield *drawn, kept if said == before else _status("running", *said), kept
        except BassError as error:
            status = _status("error", str(error))
        except Exception:
            log.exception("A race failed.")
            status = _status("error", UNEXPECTED)
        yield kept, kept, kept, status, gr.update(interactive=True)

    def stop(self) -> tuple[Any, Any]:
        """Returns (status, Run button); Gradio cancels the running event itself.

        Until it has, Gradio drops clicks on Run, so that event's failure handler (page.py) enables Run again.
        """
        return _status("stopped"), gr.skip()

    @property
    def api(self) -> Callable[..., Iterator[Snapshot]]:
        """The handler of `/race`: its parameters are the settings, with their defaults."""

        def answer(*values: object, **named: object) -> Iterator[Snapshot]:
            yield from self._answer(signature.bind(*values, **named).arguments)

        answer.__doc__ = ABOUT_API
        signature = describe(answer, Iterator[Snapshot])
        return answer

    def _answer(self, given: Mapping[str, Any]) -> Iterator[Snapshot]:
        with in_a_sentence(), closing(self._race(make_request(given, self.limits))) as snapshots:
            for snapshot in snapshots:
                yield snapshot if snapshot["done"] else _without_rounds(snapshot)

    def _race(self, request: RaceRequest) -> Generator[Snapshot, None, None]:
        """The source's snapshots. Raises BassError once the operator's time limit for a race is reached."""
        end = time.monotonic() + self.limits.max_seconds
        try:
            with closing(self.source(request)) as snapshots:
                for snapshot in snapshots:
                    yield snapshot
                    if waits(snapshot):
                        end = time.monotonic() + self.limits.max_seconds  # it has not begun
                    if not snapshot["done"] and time.monotonic() >= end:
                        raise BassError(
                            f"The race was stopped after {self.limits.max_seconds:g} s, this server's limit: ask "
                            "for fewer tokens or a smaller batch."
                        )
        finally:
            give_memory_back()


@contextmanager
def in_a_sentence() -> Iterator[None]:
    """Turns what goes wrong into gr.Error with one sentence, for a script."""
    try:
        yield
    except BassError as error:
        raise gr.Error(str(error), print_exception=False) from error
    except Exception as error:
        log.exception("An event of the API failed.")
        raise gr.Error(UNEXPECTED, print_exception=False) from error


def _without_rounds(snapshot: Snapshot) -> Snapshot:
    """The snapshot without its long logs of rounds: Gradio compares each value in full with the last one."""
    lanes: dict[str, LaneSnapshot] = {name: {**lane, "rounds": []} for name, lane in snapshot["lanes"].items()}
    return {**snapshot, "lanes": lanes}


def _status(phase: str, message: str = "", measuring: Record | None = None) -> str:
    """The status for page.js; the key makes each one a new value, even if the sentence is the same."""
    return json.dumps({"phase": phase, "message": message, "measuring": measuring, "key": uuid4().hex})
