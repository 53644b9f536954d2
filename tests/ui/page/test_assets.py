"""Every script and sheet of the page is fetched once, by a tag or in Gradio's sheet; an idle queue is calm."""

from __future__ import annotations

from collections.abc import Generator

from ui.page.assets import MODES, SCRIPTS, STATIC, STYLES, head, style, url
from ui.page.events import Snapshot
from ui.page.limits import Limits
from ui.page.page import build
from ui.page.request import RaceRequest


def test_every_file_is_fetched_once() -> None:
    files = [path.relative_to(STATIC).as_posix() for kind in ("js", "css") for path in STATIC.rglob(f"*.{kind}")]
    assert sorted([*SCRIPTS, *STYLES, *MODES]) == sorted(files)
    assert all(head().count(url(STATIC / name)) == 1 for name in (*SCRIPTS, *MODES))
    assert style().count("--type") > 10, "lengths of type follow presenter mode"


def test_gradio_s_queue_does_not_poll_every_millisecond() -> None:
    def none(request: RaceRequest) -> Generator[Snapshot, None, None]:
        yield from ()

    queue = build(none, limits=Limits(), about="nothing")._queue
    assert queue.sleep_when_free >= 0.05 and queue.progress_update_sleep_when_free >= 0.05
