"""The load bench on Ray runs in its quick form, and what can be decided there holds."""

import pytest

from ..bench.test_benches import run


@pytest.mark.slow
def test_load_with_workers_that_are_killed() -> None:
    run("load", "--quick", "--workers", "2")
