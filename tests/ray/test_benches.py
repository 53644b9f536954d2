"""The benches of Ray run in their quick form, and what can be decided there holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..bench.test_benches import check, run


@pytest.mark.slow
def test_placement() -> None:
    check(run("placement", "--quick"), "placement")


@pytest.mark.slow
def test_load_with_workers_that_are_killed() -> None:
    check(run("load", "--quick", "--workers", "2"), "load")


@pytest.mark.slow
def test_workers_beside_this_process(tiny_pair: tuple[Path, Path]) -> None:
    """The texts; speed is the full run's."""
    document = run("workers", "--quick", "--pair", tiny_pair[0], "--draft", tiny_pair[1])
    assert [one["value"] for one in document["claims"] if one["name"].startswith("texts")] == [1.0]
