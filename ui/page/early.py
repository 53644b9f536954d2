"""A page that opens while the model is prepared. It plays the recorded races, shows the progress, and has the API.

See `EarlyPage`.

- The early page opens only if the preparation takes longer than PATIENCE_S, so a normal start is not delayed.
- The page with the model takes its place on the same server (ui/page/server.py), which ui/static/page/early.js
  notices and reloads.
- `/race` and `/sweep` yield snapshots of phase "starting". A call can't go on in the page with the model, because
  that has its own sessions. So each call ends with an error that asks its script to connect again.
- It shows only the newest progress line of the terminal, because other lines may contain file names.
- It never opens on ZeroGPU, which allows only one page.
- No smaller pair races meanwhile: while transformers makes a 16-bit model, it changes the default dtype of all
  threads, so a race next to it could fail (bass_core/machine/torch_state.py).
- If the early page fails, the program still starts.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import gradio as gr

from bass_core import BassError, Snapshot, on_zero_gpu

if TYPE_CHECKING:
    from ui.page.limits import Limits

log = logging.getLogger(__name__)
PATIENCE_S = 3.0
# How often a waiting call of the API gets a snapshot, how many calls may wait, and how long we wait at the end
# until all of them have received their errors.
UPDATE_S, CALLS, DELIVERY_S = 1.0, 16, 3.0
READY = "The model is ready now: connect again."
FAILED = "The model could not be prepared: see the server's terminal for the reason."
# A line of tqdm: its title, then a percentage, perhaps with whole numbers such as 112/175, or a count.
PROGRESS = re.compile(
    r"^(?P<title>[^|\[]+?): +"
    r"(?:(?P<percent>\d+)%\|(?:[^|]*\| *(?P<done>\d+)/(?P<total>\d+) \[)?.*|(?P<count>[\d.]+\w? \w+) +\[\d+:.*)"
)


class Tee:
    """Wraps standard error and remembers its last line of progress."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.line = stream, ""

    def write(self, text: str) -> int:
        """Pass the text on, and remember its last line of progress."""
        for part in re.split(r"[\r\n]", text):
            if PROGRESS.match(part):
                self.line = part
        return int(self.stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def progress(self) -> str:
        """Return JSON {"words", "share"}. The share is None if the total is not known."""
        match = PROGRESS.match(self.line)
        if match is None:
            return json.dumps({"words": "", "share": None})
        percent = match["percent"]
        share = f"{match['done']} of {match['total']}" if match["total"] else f"{percent} %"
        words = f"{match['title']}: {share if percent else match['count']}"
        return json.dumps({"words": words, "share": int(percent) / 100 if percent else None})


def _import_ahead() -> None:
    """Import a module that pages and Ray workers need: it may fail if two threads import it at the same time."""
    with warnings.catch_warnings(), suppress(ImportError):
        warnings.simplefilter("ignore")  # it warns about newer Pythons
        import_module("pydantic.v1.fields")


class EarlyPage:
    """Context manager that shows the early page from PATIENCE_S after its start until its end.

    Call `settle` inside, and show the page with the model before the end: until then, the early page is served.

    Args:
        opened: serves a page and returns its address and, if there is one, its public address.
        name: the pair that is prepared, or "" if it is not known yet.
    """

    def __init__(
        self,
        opened: Callable[[gr.Blocks], tuple[str, str | None]],
        *,
        name: str = "",
        limits: Limits | None = None,
    ) -> None:
        self._opened, self._name, self._limits, self._wanted = opened, name, limits, not on_zero_gpu()
        self._ended, self._outcome = threading.Event(), READY
        self._timer = threading.Timer(PATIENCE_S, self._open)
        self._timer.daemon = True
        self._page: gr.Blocks | None = None
        self._tee = Tee(sys.stderr)

    def __enter__(self) -> EarlyPage:
        if self._wanted:
            _import_ahead()
            sys.stderr = self._tee
            self._timer.start()
        return self

    def settle(self) -> None:
        """Open no early page from now on; wait for one that is just being built."""
        if self._wanted:
            self._timer.cancel()
            self._timer.join()

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if not self._wanted:
            return
        self.settle()
        sys.stderr = self._tee.stream
        self._outcome = READY if failure is None else FAILED
        self._ended.set()
        if self._page is not None:
            self._deliver(self._page)
            self._page.close(verbose=False)
            self._page = None

    def _source(self, request: object) -> Generator[Snapshot, None, None]:
        """Answer a call of the API: yield snapshots without lanes until the preparation has ended, then raise."""
        from ui.sources.source import waiting

        start = time.monotonic()
        while not self._ended.is_set():
            yield {**waiting(0, None), "elapsed_ms": 1000 * (time.monotonic() - start)}
            self._ended.wait(UPDATE_S)
        raise BassError(self._outcome)

    @staticmethod
    def _deliver(page: gr.Blocks) -> None:
        """Wait until all calls have received their errors, but at most DELIVERY_S."""
        end = time.monotonic() + DELIVERY_S
        # The attributes are Gradio's own (6.31). Without them, calls end when the server closes.
        with suppress(AttributeError):
            while any(page._queue.pending_event_ids_session.values()) and time.monotonic() < end:
                time.sleep(0.05)

    def _open(self) -> None:
        from ui.page.limits import Limits
        from ui.page.page import build

        try:
            # The time limit of a race does not apply to the preparation.
            limits = replace(self._limits or Limits(), max_seconds=math.inf)
            page = build(
                None,
                limits=limits,
                about=self._name,
                preparing=self._tee.progress,
                early_source=self._source,
                at_once=CALLS,
            )
            url, _ = self._opened(page)
            self._page = page
            print(f"A recorded race plays at {url} while the model is prepared.", flush=True)
        except Exception:
            log.debug("The page could not be opened early.", exc_info=True)
