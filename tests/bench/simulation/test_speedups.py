"""The library's predicted speed-ups are the figures of `python -m bench simulate`, to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bass_core import SimulatedClock, predict_speedups
from bass_core.predict.hardware import HARDWARE
from bass_core.predict.roofline import Roofline
from bass_core.predict.rounds import Acceptance
from bass_core.predict.shapes import shapes
from bench.simulation.sweeps import BATCHES, figures

RESULTS = Path(__file__).resolve().parents[3] / "bench/results/simulate-window.json"


def test_speed_ups_equal_those_of_the_document() -> None:
    document: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    for name in ("A100", "B200"):
        rows = [row for row in document["results"] if row["section"] == "batch" and row["hardware"] == name]
        assert [row["batch"] for row in rows] == list(BATCHES)
        found = predict_speedups(
            SimulatedClock(name), draft_lengths=("bass", "cost-aware", "auto"), batches=BATCHES
        )
        points = {(one["batch"], one["draft_length"]): one["speedup"] for one in found["points"]}
        for row in rows:
            assert points[row["batch"], "bass"] == pytest.approx(row["Algorithm 1"], rel=1e-12)
            assert points[row["batch"], "cost-aware"] == pytest.approx(row["cost-aware"], rel=1e-12)
            assert points[row["batch"], "auto"] == points[row["batch"], "cost-aware"]


def test_times_equal_those_that_the_bench_computes() -> None:
    costs = Roofline(HARDWARE["H100"], *shapes("1.7B"), 300)
    row = figures(costs, Acceptance.same(0.7), 0.7, rows=8, tokens=48, seed=5, trials=3)
    found = predict_speedups(
        SimulatedClock("H100", "1.7B", "135M"), acceptance=0.7, batches=(8,),
        draft_lengths=("bass", row["fixed l"]), context=300, max_new_tokens=48, seed=5, trials=3,
    )  # fmt: skip
    bass, fixed = found["points"]
    assert bass["regular_ms_per_token"] == pytest.approx(row["regular ms/token"], rel=1e-12)
    assert bass["ms_per_token"] == pytest.approx(row["bass ms/token"], rel=1e-12)
    assert fixed["speedup"] == pytest.approx(row["best fixed"], rel=1e-12)
