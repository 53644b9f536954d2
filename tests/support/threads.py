"""A fixture for folders of tiny models: torch computes on one thread, as more would only wait for each other.

A conftest.py imports it: `from tests.support.threads import one_thread  # noqa: F401`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
