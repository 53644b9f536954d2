"""The two generator events: the page's Run button and the API's `/race`. See `Events`.

Each yields until its race is done. It closes the race on every path: cancelled (GeneratorExit), failed or
finished. Neither holds a thread-bound context across a yield, because Gradio may resume a generator on another
thread.
"""

import json
import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from typing import Any
from uuid import uuid4

import gradio as gr

from bass_core import BassError, LaneSnapshot, Record, Snapshot
from ui.page.limits import Limits
from ui.page.request import RaceRequest, describe, make_request
from ui.page.setting import shown
from ui.race.feed import PageFeed
from ui.sources.source import RaceSource, Together, give_memory_back, one_by_one, waiting, waits, words

log = logging.getLogger(__name__)
ABOUT_API = (
    'One prompt, several decoders: yields snapshots {"done", "lanes", "device"}, the last with done=True. If a '
    'race is refused or fails, the last one has "error", one sentence.'
)
# JavaScript that returns the status and the button after a full queue, a lost server or a stop, when no generator
# is left to report it.
FAILED = """() => [
  JSON.stringify({
    phase: "lost", message: "The server is busy or unreachable: try again in a moment.", key: Date.now(),
    run: String(Date.now())}),
  {__type__: "update", interactive: true}]"""
UNEXPECTED = (
    "An internal error stopped the race. Results so far are kept: try again, or see the server's log for details."
)


class Events:
    """The handlers that the page binds.

    Args:
        together: runs the races of a sweep, by default one by one from `source`.
    """

    def __init__(
        self,
        source: RaceSource,
        limits: Limits,
        pair: Mapping[str, Any] | None = None,
        together: Together | None = None,
    ) -> None:
        self.source, self.limits, self.pair = source, limits, pair
        self.together = together or one_by_one(source)

    def run(self, *values: object) -> Iterator[tuple[Any, ...]]:
        """Run a race for the page.

        Args:
            values: the form's values in the order of SETTINGS. Trailing ones may be missing.

        Yields:
            (log, view, charts, status, Run button). gr.skip() leaves an output unchanged.
        """
        unchanged, status = gr.skip(), _status("done")
        try:
            names = [setting.name for setting in shown()]
            request = make_request(dict(zip(names, values, strict=False)), self.limits)
            yield unchanged, unchanged, unchanged, _status("running"), gr.update(interactive=False)
            with (
                closing(PageFeed(uuid4().hex, request.settings(), self.pair)) as feed,
                closing(self.race(request)) as snapshots,
            ):
                news: tuple[str, Record | None] = ("", None)
                for snapshot in snapshots:
                    drawn = feed.update(snapshot) if snapshot["lanes"] else (unchanged, unchanged, unchanged)
                    before, news = news, (words(snapshot), snapshot.get("measuring"))
                    yield *drawn, unchanged if news == before else _status("running", *news), unchanged
        except BassError as error:
            status = _status("error", str(error))
        except Exception:
            log.exception("A race failed.")
            status = _status("error", UNEXPECTED)
        yield unchanged, unchanged, unchanged, status, gr.update(interactive=True)

    def stop(self) -> tuple[Any, Any]:
        """Return (status, Run button). Gradio itself cancels the running event.

        Until it has done so, Gradio drops clicks on Run. So the failure handler of that event (page.py) enables
        Run again.
        """
        return _status("stopped"), gr.skip()

    @property
    def api(self) -> Callable[..., Iterator[Snapshot]]:
        """The handler of `/race`. Its parameters are the settings, with their defaults."""

        def answer(*values: object, **named: object) -> Iterator[Snapshot]:
            yield from self._answer(signature.bind(*values, **named).arguments)

        answer.__doc__ = ABOUT_API
        signature = describe(answer, Iterator[Snapshot])
        return answer

    def _answer(self, given: Mapping[str, Any]) -> Iterator[Snapshot]:
        last = waiting(0, None)
        try:
            with closing(self.race(make_request(given, self.limits))) as snapshots:
                for last in snapshots:
                    yield last if last["done"] else _without_rounds(last)
        except Exception as error:
            refusal = in_a_sentence(error)
            # A client's loop over the snapshots does not see the exception, so it gets the sentence as well.
            yield {**last, "done": True, "phase": "error", "error": refusal.message}
            raise refusal from error

    def race(self, request: RaceRequest) -> Generator[Snapshot, None, None]:
        """Yield the source's snapshots. Raises BassError at the operator's time limit for a race."""
        end = time.monotonic() + self.limits.max_seconds
        try:
            with closing(self.source(request)) as snapshots:
                for snapshot in snapshots:
                    yield snapshot
                    if waits(snapshot):
                        end = time.monotonic() + self.limits.max_seconds  # waiting does not count
                    if not snapshot["done"] and time.monotonic() >= end:
                        raise BassError(
                            f"The race was stopped after {self.limits.max_seconds:g} s, this server's limit: ask "
                            "for fewer tokens or a smaller batch."
                        )
        finally:
            give_memory_back()


def in_a_sentence(error: Exception) -> gr.Error:
    """Return the exception as one sentence for the caller's script. Log it if it is not a BassError."""
    if not isinstance(error, BassError):
        log.error("An event of the API failed.", exc_info=error)
    return gr.Error(str(error) if isinstance(error, BassError) else UNEXPECTED, print_exception=False)


def _without_rounds(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot without its long logs of rounds: Gradio compares each value with the previous one."""
    lanes: dict[str, LaneSnapshot] = {name: {**lane, "rounds": []} for name, lane in snapshot["lanes"].items()}
    return {**snapshot, "lanes": lanes}


def _status(phase: str, message: str = "", measuring: Record | None = None) -> str:
    """Return the status for page.js. Its unique key makes it a new value even if the message is the same."""
    return json.dumps({"phase": phase, "message": message, "measuring": measuring, "key": uuid4().hex})
