"""Nothing on the page shows a predicted time without saying so, and nothing of a measured race says so.

What comes from times is found by looking: the page shows one race twice, with other times the second time; every
text that differs must stand in a labelled place that says "predicted", or "this machine" where it was read here.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gradio_client import Client
from playwright.sync_api import BrowserContext, Page, expect

from bass_core import ModelPair, load_pair, race
from ui.page.choices import choices
from ui.page.events import Snapshot
from ui.page.limits import Limits
from ui.page.page import build, launch_options
from ui.page.request import RaceRequest

from ..browser import fill, run_to_the_end
from ..conftest import watched
from .snapshots import slower

pytestmark = pytest.mark.slow
LOOK = (Path(__file__).parent / "look.js").read_text(encoding="utf-8")


@dataclass
class Served:
    """A page of this process: its address, its pair, and whether its races are shown with other times."""

    address: str
    pair: ModelPair
    slow: bool = False


@pytest.fixture(scope="module")
def served(tiny_pair: tuple[Path, Path]) -> Iterator[Served]:
    target, draft = map(str, tiny_pair)
    made = Served("", load_pair(target, draft=draft, device="cpu", dtype="float32"))

    def source(request: RaceRequest) -> Generator[Snapshot, None, None]:
        STUB = request.arguments(); c = STUB.pop("clock", None)
        for snapshot in race(made.pair, **STUB):
            if c: snapshot["clock"] = {"kind":"predicted","hardware":"H100","gpus":1,"target":"7.8B","draft":"310M","assumptions":{"bandwidth":.8,"compute":.6,"layer_us":5.0},"source":"datasheet: NVIDIA H100"}
            yield slower(snapshot) if made.slow else snapshot  # type: ignore[arg-type, misc]

    names = {"pair": target, "draft": draft, "device": "cpu", "dtype": "float32"}
    page = build(
        source, limits=Limits(max_batch=8), about="toy", choices=choices(made.pair, "auto"), pair=names
    )
    _, url, _ = page.launch(server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, **launch_options())
    made.address = url.rstrip("/")
    yield made
    page.close()


@pytest.fixture(scope="module")
def page(served: Served, context: BrowserContext) -> Iterator[Page]:
    """A page whose form asks for a predicted H100."""
    address = f"{served.address}#race?clock=h100&clock_models=7.8b&draft_length=3"
    with watched(context, address) as page:
        yield page


def raced(page: Page, served: Served, *, slow: bool = False) -> None:
    """Run the race once more, with its own times or with others."""
    served.slow = slow
    fill(page, batch=2, tokens=40)
    run_to_the_end(page)


def looked(page: Page) -> dict[str, Any]:
    """Every visible text by its place: {"text", "says"}; says: whether its labelled place tells whose time it is."""
    found: dict[str, Any] = page.evaluate(LOOK)
    return found


def bare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The places whose text differs without a mark."""
    return [
        f"{place}: {after[place]['text']!r}"
        for place in before.keys() & after.keys()
        if before[place]["text"] != after[place]["text"] and not after[place]["says"]
    ]


def test_every_text_that_comes_from_predicted_times_says_so(page: Page, served: Served) -> None:
    raced(page, served)
    before = looked(page)
    raced(page, served, slow=True)
    after = looked(page)
    differing = [place for place in before.keys() & after.keys() if before[place]["text"] != after[place]["text"]]
    assert len(differing) > 40
    print(page.evaluate("JSON.stringify(Bass.run().head.settings)+JSON.stringify(Bass.clock())")); print("\n".join(bare(before, after)))
    assert bare(before, after) == []
