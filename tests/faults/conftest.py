"""Contract: runs tiny models on one thread, and counts what a fault may leave behind."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch

from bass_core.model.cache import RaggedCache


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def left_behind() -> tuple[int, list[str]]:
    """(number of caches still alive, names of the race threads still running)."""
    gc.collect()
    caches = sum(type(thing) is RaggedCache for thing in gc.get_objects())
    return caches, [thread.name for thread in threading.enumerate() if thread.name == "bass-monitor"]
