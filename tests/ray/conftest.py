"""Tests that need Ray (requirements-ray.txt). Without Ray none is collected.

Most tests share a local Ray with two workers of a tiny pair. Each test must leave both workers ready.
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
from filelock import FileLock

from ui.page.limits import Limits
from ui.page.request import RaceRequest, make_request
from ui.sources.source import PairOptions, Service

from ..ui.conftest import pair_folders  # noqa: F401

# Ray reads these variables when it is first imported. The tests' clusters need a token, as in the program.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
HAS_RAY = importlib.util.find_spec("ray") is not None
collect_ignore_glob = [] if HAS_RAY else ["test_*.py"]
# Wait this many seconds, because other tests may keep the cores busy.
PATIENCE_S = 300.0


def until(condition: Callable[[], object], event: str) -> None:
    """Wait until the condition holds; fail after PATIENCE_S with the name of the missing event."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {event}"
        time.sleep(0.05)


def race_request(tokens: int = 24, seed: int = 0, **more: object) -> RaceRequest:
    """Return the request of a small sampled race."""
    fields = {"prompt": "Hello", "batch_size": 2, "max_new_tokens": tokens, "temperature": 0.8, "seed": seed}
    return make_request(fields | more, Limits())


@pytest.fixture(scope="module", autouse=True)
def one_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Wait while another worker of pytest-xdist has a cluster. Two take too much memory."""
    folder = tmp_path_factory.getbasetemp()
    with FileLock(folder.parent / "one-ray.lock" if "PYTEST_XDIST_WORKER" in os.environ else folder / "lock"):
        yield


@pytest.fixture(scope="session")
def ask(pair_folders: tuple[Path, Path]) -> PairOptions:  # noqa: F811
    return PairOptions(str(pair_folders[0]), str(pair_folders[1]), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def service(ask: PairOptions) -> Iterator[Service]:
    """Return a service with two workers on this machine."""
    from ui.sources.service import on_this_machine

    running = on_this_machine(ask, Limits(), workers=2, threads=1)
    yield running
    running.close()


def workers(of: int | None = None) -> list[psutil.Process]:
    """Return the worker processes below a process, by default this one."""
    children = psutil.Process(of).children(recursive=True)
    return [process for process in children if _is_worker(process)]


def _is_worker(process: psutil.Process) -> bool:
    with suppress(psutil.Error):  # it has just ended
        return "ray::Worker" in "".join(process.cmdline())
    return False


def finishes(service: Service) -> bool:
    *_, last = service.source(race_request())
    return bool(last["done"])
