"""Fixtures of the page's tests: a tiny pair on disk, a server that runs app.py with it, and a browser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import BrowserContext, Page, sync_playwright

from bass_core import ModelPair
from tests.support.page import HOSTILE, load_saved, pair_options, save_tiny_pair, serving

from .browser import FLAGS, PATIENCE_MS, open_page


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
def context(browser_executable: str) -> Iterator[BrowserContext]:
    """One browser context for all tests, so that the page's files are fetched once."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_executable, args=FLAGS)
        context = browser.new_context(viewport={"width": 1400, "height": 900}, accept_downloads=True)
        context.set_default_timeout(PATIENCE_MS)
        yield context
        browser.close()


@pytest.fixture
def page(context: BrowserContext, server: str) -> Iterator[Page]:
    """The opened page of `server`. `watched` checks its console and its requests at the end."""
    with watched(context, server) as page:
        yield page


@contextmanager
def watched(context: BrowserContext, server: str) -> Iterator[Page]:
    """Open a page. At the end, check that its console is clean and that all requests went to the server."""
    page = context.new_page()
    complaints: list[str] = []
    hosts: set[str] = set()
    page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda r: hosts.add(urlsplit(r.url).netloc) if r.url.startswith(("http", "ws")) else None)
    open_page(page, server)
    yield page
    page.close()
    assert complaints == []
    assert hosts == {urlsplit(server).netloc}
