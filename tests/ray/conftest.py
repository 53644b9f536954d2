"""The tests that need Ray (requirements-ray.txt): `pytest -n0 -m "" tests/ray`. Without Ray none is collected.

Contract: one local Ray with two workers of a tiny pair serves most tests. Each test leaves both workers ready.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from ui.page.limits import Limits
from ui.page.request import RaceRequest, make_request
from ui.sources.source import Ask, Service

from ..ui.conftest import context, pair_folders  # noqa: F401

# Ray reads these when it is first imported; the tests' own clusters need a token as those of the program do.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
HAS_RAY = importlib.util.find_spec("ray") is not None
# Each starts a cluster of its own: never beside each other, as workers of pytest-xdist would run them.
collect_ignore_glob = [] if HAS_RAY and "PYTEST_XDIST_WORKER" not in os.environ else ["test_*.py"]
# Generous: two cores may be busy with other tests.
PATIENCE_S = 120.0


def until(true: Callable[[], object], what: str) -> None:
    """Wait for a condition."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, f"never came: {what}"
        time.sleep(0.05)


def asked(tokens: int = 24, seed: int = 0, **more: object) -> RaceRequest:
    """A small sampled race; a long one with more tokens."""
    given = {"prompt": "Hello", "batch_size": 2, "max_new_tokens": tokens, "temperature": 0.8, "seed": seed}
    return make_request(given | more, Limits())


@pytest.fixture(scope="session")
def ask(pair_folders: tuple[Path, Path]) -> Ask:  # noqa: F811
    return Ask(str(pair_folders[0]), str(pair_folders[1]), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def place(ask: Ask) -> Iterator[Service]:
    """Two workers on this machine."""
    from ui.sources.service import on_this_machine

    made = on_this_machine(ask, Limits(), workers=2, threads=1)
    yield made
    made.close()


def workers(of: int | None = None) -> list[psutil.Process]:
    """The worker processes below a process, by default this one."""
    below = psutil.Process(of).children(recursive=True)
    return [one for one in below if _is_worker(one)]


def _is_worker(process: psutil.Process) -> bool:
    with suppress(psutil.Error):  # it has just ended
        return "ray::Worker" in "".join(process.cmdline())
    return False


def finishes(place: Service) -> bool:
    *_, last = place.source(asked())
    return bool(last["done"])
