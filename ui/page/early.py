"""A page that opens while the model is prepared. It plays the recorded races and shows the progress.

See `EarlyPage`.

- It opens only if the preparation takes longer than PATIENCE_S, so it does not delay a normal start. It closes
  before the page with the model opens at the same port. ui/static/page/early.js then reloads.
- It shows only the newest progress line of the terminal, because other lines may contain file names.
- It stays closed on ZeroGPU, which allows one page, and with a public address, which would change.
- A failure here does not stop the start.
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
# A line of tqdm: its title, then a percentage or a count.
PROGRESS = re.compile(r"^(?P<title>[^|\[]+?): +(?:(?P<percent>\d+)%\|.*|(?P<count>[\d.]+\w? \w+) +\[\d+:.*)")


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
        words = f"{match['title']}: {f'{percent} %' if percent else match['count']}"
        return json.dumps({"words": words, "share": int(percent) / 100 if percent else None})


def _import_ahead() -> None:
    """Import a module that a page and a Ray worker need, because two threads that import it at once may fail."""
    with warnings.catch_warnings(), suppress(ImportError):
        warnings.simplefilter("ignore")  # it warns about newer Pythons
        import_module("pydantic.v1.fields")


class EarlyPage:
    """Context manager that shows the early page from PATIENCE_S after its start until its end.

    Args:
        opened: serves a page and returns its address and, if there is one, its public address.
        share: whether the page gets a public address.

    Attributes:
        port: the port of the early page, or None if it never opened.
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
            page = build(None, limits=Limits(), about="", preparing=self._tee.progress)
            url, _ = self._opened(page)
            self._page, self.port = page, page.server_port
            print(f"A recorded race plays at {url} while the model is prepared.", flush=True)
        except Exception:
            log.debug("The page could not be opened early.", exc_info=True)
