"""The expected speed-up comes from the stored costs of this machine, and runs no model."""

from __future__ import annotations

from pathlib import Path

import pytest

from bass_core import SamplingParams, costs_file, expected_speedup
from bass_core.decode.cost_store import costs_path
from bass_core.draft.registry import choose_drafter
from bass_core.length.costs import CostTable, write_table
from bass_core.model.attention import choose_backend
from tests.support.models import tiny_pair

PAIR = tiny_pair()
ASKED = {"rows": 4, "draft_length": 3, "max_new_tokens": 32}


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def store(table: CostTable, temperature: float = 0.0) -> None:
    kind, backend = choose_drafter(PAIR, "auto"), choose_backend("auto", PAIR.device, PAIR.dtype)
    write_table(costs_path(PAIR, kind, backend, SamplingParams(temperature=temperature)), table)


def flat(draft_ms: float, proposal_ms: float) -> CostTable:
    """A table in which a verification takes 10 ms, whatever its size."""
    sizes = (1, 4)
    return CostTable(
        {rows: [(1.0, 10.0), (99.0, 10.0)] for rows in sizes}, dict.fromkeys(sizes, draft_ms), False,
        proposal=dict.fromkeys(sizes, proposal_ms),
    )  # fmt: skip


def test_without_stored_costs_nothing_is_expected() -> None:
    assert expected_speedup(PAIR, [0.8], **ASKED) is None
    store(CostTable({1: [(1.0, 10.0)]}, {1: 1.0}, False))
    assert expected_speedup(PAIR, [0.8], **ASKED) is None  # nothing is known about four rows
    assert expected_speedup(PAIR, [0.8], **ASKED | {"rows": 1}) is not None


def test_the_speedup_follows_from_tokens_and_costs() -> None:
    """With every draft accepted, a round writes 4 tokens, in 10 ms + 3 drafts + the proposal."""
    store(flat(draft_ms=2.0, proposal_ms=4.0))
    # 31 tokens follow the prompt's: 7 rounds of 4 tokens, and one of 3 with 2 drafts.
    assert expected_speedup(PAIR, [1.0], **ASKED) == pytest.approx(310 / (7 * 20 + 18))
    # A rejected draft costs time and writes nothing. The last token of a row needs no draft.
    assert expected_speedup(PAIR, [0.0], **ASKED) == pytest.approx(310 / (28 * 20 + 18 + 16 + 10))
    assert expected_speedup(PAIR, [0.0], **ASKED | {"draft_length": 0}) == 1
    # The batch ends with its last row.
    assert expected_speedup(PAIR, [1.0, 0.0], **ASKED) == expected_speedup(PAIR, [0.0], **ASKED)


def test_costs_of_sampling_are_separate() -> None:
    store(flat(draft_ms=2.0, proposal_ms=4.0), temperature=1.0)
    assert expected_speedup(PAIR, [1.0], **ASKED) is None
    assert expected_speedup(PAIR, [1.0], **ASKED, temperature=0.7) is not None


def test_missing_costs_are_measured_and_stored_if_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    assert expected_speedup(PAIR, [0.8], **ASKED, measure_s=60.0) is None  # BASS_MEASURE=0
    monkeypatch.delenv("BASS_MEASURE")
    measured = expected_speedup(PAIR, [0.8], **ASKED, measure_s=60.0)
    assert measured is not None
    path = costs_file(PAIR)
    assert path is not None and path.exists()
    assert expected_speedup(PAIR, [0.8], **ASKED) == measured
