"""The page while the model is prepared: it plays the recorded races, and says what the terminal says.

Contract: opened only if the preparation takes longer than PATIENCE_S, so that a usual start is not delayed by it,
and closed before the page with the model opens at the same port; ui/static/page/early.js then loads that one. Of
what is printed it shows the newest progress alone, since other lines may name files. Not on ZeroGPU, which allows
one page, nor with a public address, which would change. A failure here is none of the start.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

import gradio as gr

from bass_core import on_zero_gpu

log = logging.getLogger(__name__)
PATIENCE_S = 3.0
# A line of tqdm: what it is, then its share or its count.
PROGRESS = re.compile(r"^(?P<what>[^|\[]+?): +(?:(?P<percent>\d+)%\|.*|(?P<count>[\d.]+\w? \w+) +\[\d+:.*)")


class Tee:
    """Standard error, and what progress it showed last."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.line = stream, ""

    def write(self, text: str) -> int:
        """Pass the text on, and keep its last line of progress."""
        for part in re.split(r"[\r\n]", text):
            if PROGRESS.match(part):
                self.line = part
        return int(self.stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def told(self) -> str:
        """JSON {"words", "share"}; share is None where the end is not known."""
        found = PROGRESS.match(self.line)
        if found is None:
            return json.dumps({"words": "", "share": None})
        percent = found["percent"]
        words = f"{found['what']}: {f'{percent} %' if percent else found['count']}"
        return json.dumps({"words": words, "share": int(percent) / 100 if percent else None})


def _import_ahead() -> None:
    """Import what FastAPI imports for a page and Ray for a worker: in two threads at once both may fail."""
    with warnings.catch_warnings(), suppress(ImportError):
        warnings.simplefilter("ignore")  # it warns of newer Pythons
        import_module("pydantic.v1.fields")


class EarlyPage:
    """A context: while it is entered the page is there, after PATIENCE_S. port: which it had, or None.

    opened: serves a page and returns its address first.
    """

    def __init__(self, opened: Callable[[gr.Blocks], tuple[str, str | None]], *, share: bool = False) -> None:
        self._opened, self._wanted = opened, not (share or on_zero_gpu())
        self._timer = threading.Timer(PATIENCE_S, self._open)
        self._timer.daemon = True
        self._page: gr.Blocks | None = None
        self._tee = Tee(sys.stderr)
        self.port: int | None = None

    def __enter__(self) -> EarlyPage:
        if self._wanted:
            _import_ahead()
            sys.stderr = self._tee
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._wanted:
            return
        sys.stderr = self._tee.stream
        self._timer.cancel()
        self._timer.join()
        if self._page is not None:
            self._page.close(verbose=False)

    def _open(self) -> None:
        from ui.page.limits import Limits
        from ui.page.page import build

        try:
            page = build(None, limits=Limits(), about="", preparing=self._tee.told)
            url, _ = self._opened(page)
            self._page, self.port = page, page.server_port
            print(f"A recorded race plays at {url} while the model is prepared.", flush=True)
        except Exception:
            log.debug("The page could not be opened early.", exc_info=True)
