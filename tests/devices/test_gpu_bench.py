"""The sections of `python -m bench gpu` run on the emulated device, and every case passes.

Times mean nothing here. tests/bench/test_gpu_bench.py covers the bench's processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bass_core.machine import capture
from bench.gpu import SECTIONS, speed
from bench.gpu.context import Context, LaneCases, Row

from .emulation import emulated, ledger

EMUL = torch.device(emulated.TYPE, 0)


def figures(section: str) -> dict[tuple[str, str], Row]:
    rows: list[Row] = []
    SECTIONS[section].run(Context(section, EMUL, rows.append, quick=True))
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
    steps, lanes, one_layer = (figures(section) for section in ("steps", "lanes", "one-layer"))
    for case in ("target b1 x 1 kv16", "target b2 x 5 kv16", "draft b2 x 1 kv16"):
        assert steps[case, "step"]["value"] > 0 and steps[case, "step / floor"]["value"] > 0
    assert steps["products by ours at any size", "b8 x 5"]["value"] > 0
    assert any(case.startswith("round") and "calls" in row["unit"] for (case, _), row in steps.items())
    for arm in ("regular", "bass", "bass, 3 drafts"):
        assert lanes[f"b2 a0.8 {arm}", "ms/token"]["value"] > 0
        assert one_layer[f"b2 a0.8 {arm}", "ms/token"]["value"] > 0


@pytest.mark.slow
@pytest.mark.demand
def test_a_round_is_split_into_its_graphs() -> None:
    rows = figures("rounds")
    for method, graphs in (("regular", 1), ("bass", 2)):
        assert rows[f"b2 {method}", "graphs"]["value"] == graphs
        for what in ("clock", "wall", "graphs alone", "kernels", "graphs in a row, without a read"):
            assert rows[f"b2 {method}", what]["value"] > 0


def test_lanes_run_the_cases_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, float, tuple[str, ...]]] = []

    def samples(
        pair: object, prompts: list[object], tokens: int, repeats: int, names: Sequence[str], **options: Any
    ) -> dict[str, Any]:
        seen.append((len(prompts), options["synthetic_acceptance"], tuple(names)))
        return {}

    monkeypatch.setattr(speed, "samples_of", samples)
    monkeypatch.setattr(speed, "rows_of", lambda size, samples, machine: [])
    monkeypatch.setattr(speed, "measure", lambda device, dtype: None)
    cases = LaneCases((4, 1), (0.7,), ("bass", "generate"))
    speed.lanes(Context("lanes", torch.device("cpu"), lambda row: None, lanes=cases))
    assert seen == [(4, 0.7, ("bass", "generate")), (1, 0.7, ("bass", "generate"))]


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
