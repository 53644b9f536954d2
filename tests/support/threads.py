"""Threads in tests: `one_thread` limits torch to one, `together` runs functions in parallel.

A conftest.py for tests of tiny models imports `one_thread`: more threads would only wait for each other.
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
    """Run each function in a separate thread, and wait until all have ended."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
