"""Options of the suite, and fixtures of several folders: the real model's folder and a browser.

`--all` also runs the tests marked `demand`, `--seconds FILE` writes the CPU seconds of each test file, and .ci/run
uses `--stamp` (support/tested.py). Only tests of tests/ray can import Ray in their own process.

Kernels run on CPU tensors under Triton's interpreter, which must be enabled before triton is first imported. The
number of threads must be set before torch is imported.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import tested
from tests.support.seconds import Seconds, long_tests

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext

os.environ["TRITON_INTERPRET"] = "1"
# Measured costs, and so draft lengths, depend on the machine. If no costs are measured, "auto" is Algorithm 1.
# Servers that tests start inherit BASS_MEASURE.
os.environ["BASS_MEASURE"] = "0"
# Several test workers share the cores. With more than one thread per worker, they were ten times slower.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

RAY = Path(__file__).parent / "ray"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run tests marked demand")
    parser.addoption("--stamp", action="store_true", help="note which parts have passed whole")
    parser.addoption(
        "--seconds", metavar="FILE", type=Path, help="write the CPU seconds of each test file to FILE"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Seconds(config), "bass-seconds")
    if config.option.stamp and "PYTEST_XDIST_WORKER" not in os.environ:
        parts = list(tested.PARTS) if config.option.all else tested.due()
        config.pluginmanager.register(tested.Stamp(parts), "bass-stamp")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests as slow that need a browser, or took long in the last whole run.

    Leave out tests marked `demand`, and slow tests that need nothing but a part, unless that part has changed
    since it was tested whole.
    """
    took_long = long_tests()
    for item in items:
        if "browser_executable" in getattr(item, "fixturenames", ()) or item.nodeid in took_long:
            item.add_marker(pytest.mark.slow)
    due, kept, left_out = set(tested.due()), [], []
    for item in items:
        part = tested.WITHIN.get(item.nodeid.partition("::")[0])
        if part and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.demand(part))
        mark = item.get_closest_marker("demand")
        if mark:
            item.user_properties.append(("parts", mark.args))
        runs = mark is None or config.option.all or due.intersection(mark.args)
        (kept if runs else left_out).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Hide Ray from tests outside tests/ray."""
    if item.path.is_relative_to(RAY):
        return (yield)
    ray, sys.modules["ray"] = sys.modules.pop("ray", None), None  # type: ignore[assignment]
    try:
        return (yield)
    finally:
        sys.modules.pop("ray", None)
        if ray is not None:
            sys.modules["ray"] = ray


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """Return the folder of the real model in the user's cache. Download and convert the model if it is missing."""
    from bass_core.model.loading.weights import ensure_smollm2

    return ensure_smollm2()


@pytest.fixture(scope="session")
def browser_executable() -> str:
    """Return the browser that BASS_BROWSER names, or an installed Chromium or Chrome.

    Without a browser the test is skipped, or fails if BASS_REQUIRE_BROWSER is set.
    """
    names = (os.environ.get("BASS_BROWSER"), "chromium", "chromium-browser", "google-chrome")
    browser = next((path for name in names if name and (path := shutil.which(name))), None)
    if browser is None:
        missing = "No Chromium or Chrome is installed: install one, or name it in BASS_BROWSER."
        if os.environ.get("BASS_REQUIRE_BROWSER"):
            pytest.fail(missing)
        pytest.skip(missing)
    return browser


@pytest.fixture(scope="session")
def context(browser_executable: str) -> Iterator[BrowserContext]:
    """One browser context, so that the page's files are fetched once; a process can have only one."""
    from playwright.sync_api import sync_playwright

    from tests.ui.browser import FLAGS, PATIENCE_MS

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_executable, args=FLAGS)
        context = browser.new_context(viewport={"width": 1400, "height": 900}, accept_downloads=True)
        context.set_default_timeout(PATIENCE_MS)
        yield context
        browser.close()
