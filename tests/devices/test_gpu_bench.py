"""The sections of `python -m bench gpu` run on the emulated device, and every case passes.

Times mean nothing here. tests/bench/test_gpu_bench.py covers the bench's processes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bass_core.machine import capture
from bench.gpu import SECTIONS
from bench.gpu.context import Context, Row

from .emulation import emulated, ledger

EMUL = torch.device(emulated.TYPE, 0)


def figures(section: str) -> dict[tuple[str, str], Row]:
    rows: list[Row] = []
    SECTIONS[section][0](Context(section, EMUL, rows.append, quick=True))
    return {(row["case"], row["what"]): row for row in rows}


@pytest.mark.slow
@pytest.mark.demand
@pytest.mark.parametrize("section", ["texts", "faults"])
def test_every_check_passes(section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # After a failed capture the process captures no more; undo that for the other tests.
    monkeypatch.setattr(capture, "_failed", False)
    rows = figures(section)
    passed = rows["cases", "passed"]
    assert passed["unit"] == f"of {passed['value']}", rows
    assert passed["value"] >= (3 if section == "faults" else 25) and not ledger.races
    if section == "faults":
        memory = [rows["memory", what]["value"] for what in ("six races", "without idle caches")]
        assert memory[0] > memory[1] > 0


@pytest.mark.slow
@pytest.mark.demand
def test_steps_and_lanes_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    steps, lanes = figures("steps"), figures("lanes")
    for case in ("target b1 x 1 kv16", "target b2 x 5 kv16", "draft b2 x 1 kv16"):
        assert steps[case, "step"]["value"] > 0 and steps[case, "step / floor"]["value"] > 0
    assert steps["products by ours at any size", "b8 x 5"]["value"] > 0
    assert any(case.startswith("round") and "calls" in row["unit"] for (case, _), row in steps.items())
    for arm in ("regular", "speculative", "bass", "generate"):
        assert lanes[f"b2 a0.8 {arm}", "ms/token"]["value"] > 0


@pytest.mark.slow
@pytest.mark.demand
def test_backends_and_readings_list_missing_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rows = figures("backends")
    for backend in ("pad", "sdpa"):
        for way in ("captured", "eager"):
            assert rows[f"attention {backend}", f"b2 x 5, {way}"]["value"] > 0
    assert rows["attention split", "b2 x 1, eager"]["value"] > 0
    assert any(case == "attention flash" and what.startswith("left out") for case, what in rows)
    rows = figures("readings")
    assert ("a race of BASS", "gpu_power_w: not read") in rows and rows["memory", "of captured steps"]["value"] > 0
