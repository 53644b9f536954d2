"""A CPU's peak rates are measured once, along with the costs, and stored; never while a lane exists."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bass_core import generate, measure_ahead
from bass_core.decode import calibrate, peaks
from bass_core.decode.peaks import known_peaks, measure_peaks, peaks_path
from bass_core.decode.request import make_request
from bass_core.lanes import lane as lane_module
from bass_core.machine.hardware import Peaks
from tests.support.models import prompts, tiny_pair

CPU = torch.device("cpu")
PAIR = tiny_pair(None)
PEAKS = Peaks(3e10, 2e11)


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Use an empty cache folder, and constants in place of measurements; return the list of measurements."""
    measured_names: list[str] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("BASS_MEASURE")
    monkeypatch.setattr(peaks, "read_bandwidth", lambda: measured_names.append("read") or PEAKS.bandwidth)
    monkeypatch.setattr(peaks, "product_flops", lambda dtype: measured_names.append(str(dtype)) or PEAKS.flops)
    return measured_names


def measured(dtype: torch.dtype = torch.float32) -> Peaks:
    for _ in measure_peaks(CPU, dtype):
        pass
    return known_peaks(CPU, dtype)


def test_each_number_of_threads_has_its_own_measurement() -> None:
    assert measured() == PEAKS
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        assert known_peaks(CPU, torch.float32) == Peaks()
    finally:
        torch.set_num_threads(before)
    assert known_peaks(CPU, torch.float32) == PEAKS


@pytest.mark.parametrize("obstacle", ["switched off", "ZeroGPU", "no cache folder", "no memory"])
def test_without_a_measurement_the_peaks_are_unknown(
    obstacle: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scripted: list[str]
) -> None:
    if obstacle == "switched off":
        assert measured() == PEAKS  # stored by an earlier run, but not used
        monkeypatch.setenv("BASS_MEASURE", "0")
    elif obstacle == "ZeroGPU":
        monkeypatch.setenv("SPACES_ZERO_GPU", "1")
    elif obstacle == "no cache folder":
        (tmp_path / "bass").write_text("a file where the folder should be")
    else:
        monkeypatch.setattr(peaks, "product_flops", out_of_memory)
    scripted.clear()
    assert measured() == Peaks()
    assert scripted == (["read"] if obstacle == "no memory" else [])


def test_the_flops_are_known_even_without_memory_for_the_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "read_bandwidth", lambda: None)
    assert measured() == Peaks(None, PEAKS.flops)


def test_a_missing_bandwidth_is_measured_once_there_is_memory(
    monkeypatch: pytest.MonkeyPatch, scripted: list[str]
) -> None:
    with monkeypatch.context() as short_of_memory:
        short_of_memory.setattr(peaks, "read_bandwidth", lambda: None)
        measured()
        scripted.clear()
        short_of_memory.setattr(peaks, "bandwidth_array_bytes", lambda: 0)
        assert measured() == Peaks(None, PEAKS.flops) and scripted == []
    assert measured() == PEAKS == measured()
    assert scripted == ["read", "torch.float32"]


def out_of_memory(dtype: torch.dtype) -> float:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def test_a_damaged_file_is_measured_again() -> None:
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
    assert measured() == PEAKS and json.loads(path.read_text()) == {"bandwidth": 3e10, "flops": 2e11}
    assert list(path.parent.iterdir()) == [path]


def test_the_peaks_are_measured_with_the_costs_and_reach_the_lane(
    scripted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request with a fixed draft length measures nothing. The first one with "auto" measures the peaks."""
    options = {"max_new_tokens": 8, "eos_token_id": None}
    output = generate(PAIR, prompts(2), draft_length=2, **options)
    assert (
        output.metrics.flops_utilization is None
        and output.metrics.bandwidth_utilization is None
        and scripted == []
    )
    for _ in range(2):
        output = generate(PAIR, prompts(2), **options)
        assert scripted == ["read", "torch.float32"]
        assert 0 < output.metrics.useful_flops_utilization <= output.metrics.flops_utilization
        assert output.metrics.bandwidth_utilization > 0


def test_measure_ahead_begins_with_the_peaks(scripted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_RoundTimer", None)
    steps = measure_ahead(PAIR, 2)
    next(steps)
    next(steps)
    assert known_peaks(CPU, torch.float32) == PEAKS and scripted == ["read", "torch.float32"]


def test_an_accelerators_peaks_are_not_measured(scripted: list[str]) -> None:
    assert list(measure_peaks(torch.device("meta"), torch.float32)) == [] and scripted == []


def test_a_peak_that_a_lane_exceeds_is_measured_again_once(
    scripted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first measurement ran on a busy machine. The second is larger in one figure, and then stays."""
    path = peaks_path(torch.float32)
    assert path is not None and measured() == PEAKS
    path.write_text(json.dumps({"bandwidth": 1.0, "flops": 9e20}))
    scripted.clear()
    assert measured().bandwidth == 1.0 and not scripted
    doubted: list[torch.device] = []
    monkeypatch.setattr(
        lane_module, "doubt_peaks", lambda *place: (doubted.append(place[0]), peaks.doubt_peaks(*place))
    )
    lane = lane_module.Lane(PAIR, make_request(PAIR, prompts(1), max_new_tokens=4), "regular")
    while not lane.finished:
        lane.step()
    shares = [lane.metrics().bandwidth_utilization for _ in range(3)]
    assert shares[0] is not None and shares[0] > 1 and len(doubted) == 1, "a finished lane has many snapshots"
    assert measured() == Peaks(PEAKS.bandwidth, 9e20) and scripted == ["read", "torch.float32"]
    peaks.doubt_peaks(CPU, torch.float32)
    assert measured() == Peaks(PEAKS.bandwidth, 9e20) and len(scripted) == 2
