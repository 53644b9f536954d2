"""A CPU's peaks are measured once with the costs, kept, and never measured while a lane exists."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bass_core import generate, measure_ahead
from bass_core.decode import calibrate, peaks
from bass_core.decode.peaks import known_peaks, measure_peaks, peaks_path
from bass_core.machine.hardware import Peaks
from tests.support.models import prompts, tiny_pair

CPU = torch.device("cpu")
PAIR = tiny_pair(None)
FOUND = Peaks(3e10, 2e11)


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """An empty cache folder, and figures without measuring; what was asked is noted."""
    asked: list[str] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("BASS_MEASURE")
    monkeypatch.setattr(peaks, "read_bandwidth", lambda: asked.append("read") or FOUND.bandwidth)
    monkeypatch.setattr(peaks, "product_flops", lambda dtype: asked.append(str(dtype)) or FOUND.flops)
    return asked


def measured(dtype: torch.dtype = torch.float32) -> Peaks:
    for _ in measure_peaks(CPU, dtype):
        pass
    return known_peaks(CPU, dtype)


def test_another_number_of_threads_is_another_measurement() -> None:
    assert measured() == FOUND
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        assert known_peaks(CPU, torch.float32) == Peaks()
    finally:
        torch.set_num_threads(before)
    assert known_peaks(CPU, torch.float32) == FOUND


@pytest.mark.parametrize("obstacle", ["switched off", "ZeroGPU", "no place", "no memory"])
def test_where_nothing_can_be_measured_nothing_is_known(
    obstacle: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scripted: list[str]
) -> None:
    if obstacle == "switched off":
        assert measured() == FOUND  # kept from an earlier run, and yet not shown
        monkeypatch.setenv("BASS_MEASURE", "0")
    elif obstacle == "ZeroGPU":
        monkeypatch.setenv("SPACES_ZERO_GPU", "1")
    elif obstacle == "no place":
        (tmp_path / "bass").write_text("a file where the folder should be")
    else:
        monkeypatch.setattr(peaks, "product_flops", short)
    scripted.clear()
    assert measured() == Peaks()
    assert scripted == (["read"] if obstacle == "no memory" else [])


def test_without_room_to_read_the_flops_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "read_bandwidth", lambda: None)
    assert measured() == Peaks(None, FOUND.flops)


def test_a_bandwidth_that_was_missing_is_measured_once_there_is_room(
    monkeypatch: pytest.MonkeyPatch, scripted: list[str]
) -> None:
    with monkeypatch.context() as short_of_memory:
        short_of_memory.setattr(peaks, "read_bandwidth", lambda: None)
        measured()
        scripted.clear()
        short_of_memory.setattr(peaks, "bandwidth_array_bytes", lambda: 0)
        assert measured() == Peaks(None, FOUND.flops) and scripted == []
    assert measured() == FOUND == measured()
    assert scripted == ["read", "torch.float32"]


def short(dtype: torch.dtype) -> float:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def test_a_damaged_file_is_measured_anew() -> None:
    path = peaks_path(torch.float32)
    assert path is not None
    path.parent.mkdir(parents=True)
    for stored in (
        "", "[]", "null", '{"bandwidth": 1e10}', '{"bandwidth": 1e10, "flops": null}',
        '{"bandwidth": NaN, "flops": 1e9}', '{"bandwidth": -1.0, "flops": 1e9}', '{"bandwidth": "1", "flops": 1}',
        '{"bandwidth": Infinity, "flops": 1e11}', '{"bandwidth": 1e10, "flops": 1e11, "more": 1}',
    ):  # fmt: skip
        path.write_text(stored)
        assert known_peaks(CPU, torch.float32) == Peaks(), stored
    assert measured() == FOUND and json.loads(path.read_text()) == {"bandwidth": 3e10, "flops": 2e11}
    assert list(path.parent.iterdir()) == [path]


def test_they_come_with_the_costs_and_reach_the_lane(scripted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed draft length needs no costs and measures nothing; "auto" does; the second time they are known."""
    asked = {"max_new_tokens": 8, "eos_token_id": None}
    out = generate(PAIR, prompts(2), draft_length=2, **asked)
    assert out.metrics.flops_utilization is None and out.metrics.bandwidth_utilization is None and scripted == []
    for _ in range(2):
        out = generate(PAIR, prompts(2), **asked)
        assert scripted == ["read", "torch.float32"]
        assert 0 < out.metrics.useful_flops_utilization <= out.metrics.flops_utilization
        assert out.metrics.bandwidth_utilization > 0


def test_the_page_measures_them_first(scripted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_RoundTimer", None)
    steps = measure_ahead(PAIR, 2)
    next(steps)
    next(steps)
    assert known_peaks(CPU, torch.float32) == FOUND and scripted == ["read", "torch.float32"]


def test_an_accelerator_is_not_measured_here(scripted: list[str]) -> None:
    assert list(measure_peaks(torch.device("meta"), torch.float32)) == [] and scripted == []
