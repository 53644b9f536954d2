"""Threads in tests: `one_thread` for torch, `together` for the test's own.

A conftest.py of tiny models imports the fixture: more threads would only wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def together(*works: Callable[[], object]) -> None:
    """Run each in a thread of its own, and wait until all have ended."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
