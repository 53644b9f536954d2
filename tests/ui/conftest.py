"""Fixtures of the page's tests: a tiny pair on disk, servers, a browser, and pages in it.

Loading a page takes a second of CPU. So each worker loads two pages once, `opened` (with a pair) and `film`
(with recordings only), for all tests that use no setting of the form. `page` is loaded for one test.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import BrowserContext, Page, Request

from bass_core import ModelPair
from tests.support.page import HOSTILE, hosted, load_saved, pair_options, save_tiny_pair, serving

from .browser import open_page, reset


@pytest.fixture
def hostile() -> tuple[str, ...]:
    """Strings that would break a careless page. Each is one token of the tiny model."""
    return HOSTILE


@pytest.fixture(scope="session")
def pair_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a target and a draft."""
    return save_tiny_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def pair(pair_folders: tuple[Path, Path]) -> ModelPair:
    """The pair, loaded once."""
    return load_saved(pair_folders)


@pytest.fixture(scope="session")
def server(pair_folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server with a tiny pair. Its draft lengths are those of Algorithm 1 (tests/conftest.py)."""
    log = tmp_path_factory.mktemp("server") / "stderr.txt"
    with serving(log, *pair_options(pair_folders)) as (address, _):
        yield address


@pytest.fixture(scope="session")
def shelf() -> Iterator[str]:
    """Address of a page with the shipped recordings and no model."""
    with hosted(None, about="") as address:
        yield address


@pytest.fixture
def page(context: BrowserContext, server: str) -> Iterator[Page]:
    """The opened page of `server`. `watched` checks its console and its requests at the end."""
    with watched(context, server) as page:
        yield page


@pytest.fixture(scope="session")
def loaded_server(context: BrowserContext, server: str) -> Iterator[Watch]:
    with watching(context, server) as watch:
        open_page(watch.page, server)
        yield watch


@pytest.fixture(scope="session")
def loaded_shelf(context: BrowserContext, shelf: str) -> Iterator[Watch]:
    with watching(context, shelf) as watch:
        open_page(watch.page, shelf)
        yield watch


@pytest.fixture
def opened(loaded_server: Watch) -> Iterator[Page]:
    """The worker's page of `server` at the end of the recording "win"."""
    reset(loaded_server.page)
    yield loaded_server.page
    loaded_server.check()


@pytest.fixture
def film(loaded_shelf: Watch) -> Iterator[Page]:
    """The worker's page of `shelf` at the end of the recording "win"."""
    reset(loaded_shelf.page)
    yield loaded_shelf.page
    loaded_shelf.check()


class Watch:
    """A page, with the complaints in its console and the hosts of its requests since the last check."""

    def __init__(self, page: Page, server: str) -> None:
        self.page, self.server = page, server
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", self.note)

    def note(self, request: Request) -> None:
        if request.url.startswith(("http", "ws")):
            self.hosts.add(urlsplit(request.url).netloc)

    def check(self) -> None:
        """Assert that the console is clean and that all requests went to the server."""
        complaints, self.complaints = self.complaints, []
        assert complaints == []
        assert self.hosts <= {urlsplit(self.server).netloc}


@contextmanager
def watching(context: BrowserContext, server: str) -> Iterator[Watch]:
    """Watch a new page, for tests that open it themselves, and check it at the end."""
    watch = Watch(context.new_page(), server)
    yield watch
    watch.page.close()
    watch.check()


@contextmanager
def watched(context: BrowserContext, server: str) -> Iterator[Page]:
    """Open and watch a page without its opening recording."""
    with watching(context, server) as watch:
        open_page(watch.page, server)
        yield watch.page
