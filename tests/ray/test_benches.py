"""The load bench runs on Ray with --quick, and its decided claims hold."""

import pytest

from ..bench.test_benches import run


@pytest.mark.slow
@pytest.mark.demand
def test_load_runs_with_workers_that_are_killed() -> None:
    run("load", "--quick", "--workers", "2")
