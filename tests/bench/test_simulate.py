"""The simulator: rounds equal the decoder's, means equal the formulas, step times follow from bytes and FLOPs.

Nothing here measures time; the full bench compares predictions with measured times.
"""

from __future__ import annotations

import numpy as np
import pytest

from bass_core import ModelPair, SimulatedClock, generate, predict_speedups, stream
from bass_core.length.costs import CostTable
from bass_core.predict.hardware import HARDWARE
from bass_core.predict.roofline import Roofline
from bass_core.predict.rounds import Acceptance
from bass_core.predict.shapes import shapes
from bench.report.tables import load
from bench.simulation import checks, sweeps, validation
from bench.simulation import command as simulate
from bench.simulation.checks import algorithm_1, speedup, tokens_per_round
from tests.bench.test_benches import run
from tests.support.models import tiny_pair

TABLE = CostTable({1: [(1.0, 10.0), (9.0, 18.0)], 4: [(4.0, 12.0), (36.0, 60.0)]}, {1: 1.0, 4: 2.0}, padded=False)


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return tiny_pair(0.05)


def test_accepted_counts_follow_from_the_origins(pair):
    length, prompts = 3, [[1, 2, 3], [7, 5]]
    options = dict(draft_length=length, drafter="model", max_new_tokens=30, eos_token_id=None)
    out = generate(pair, prompts, **options)
    real = {row: [] for row in range(2)}
    for event in stream(pair, prompts, **options):
        for row in event.rows:
            if event.kind != "prefill" and len(row.drafted) == length:
                real[row.sequence].append(row.accepted)
    counts = [validation.accepted_counts(sequence.origins, length) for sequence in out.sequences]
    assert counts == list(real.values()) and 0 < np.mean(counts[0]) < length


def test_measured_acceptance_is_pulled_towards_the_mean_of_all_rows(pair):
    prompts = [[1, 2, 3], [7, 5]]
    options = dict(drafter="model", max_new_tokens=30, eos_token_id=None)
    fitted = {length: generate(pair, prompts, draft_length=length, **options) for length in (2, 5)}
    rates = validation.measured_acceptance(fitted).rates
    assert rates.shape == (2, 5) and ((rates > 0) & (rates < 1)).all()
    counts = [
        [c for n, out in fitted.items() for c in validation.accepted_counts(out.sequences[r].origins, n)]
        for r in (0, 1)
    ]
    means = [np.mean([c > 0 for c in row_counts]) for row_counts in counts]
    pool = (sum(c > 0 for row_counts in counts for c in row_counts) + 1) / (sum(map(len, counts)) + 2)
    weights = [len(row_counts) for row_counts in counts]
    expected = [
        (n * o + validation.POOLED * pool) / (n + validation.POOLED) for n, o in zip(weights, means, strict=True)
    ]
    assert rates[:, 0] == pytest.approx(expected)


def test_tokens_per_round_and_speedup_equal_the_formulas():
    assert tokens_per_round(0.8, 7) == pytest.approx(sum(0.8**i for i in range(8)))
    assert tokens_per_round(1.0, 5) == 6
    assert speedup(0.8, 5, 0.1) == pytest.approx(tokens_per_round(0.8, 5) / 1.5)
    assert max(speedup(0.3, length, 0.31) for length in range(1, 20)) < 1 < speedup(0.3, 1, 0.29)


@pytest.mark.parametrize(
    ("rate", "rows", "length", "tokens"),
    [
        (0.7, 1, 3.3, 2.47),
        (0.7, 8, 7.8, 3.15),
        (0.8, 1, 4.6, 3.40),
        (0.8, 8, 11.5, 4.65),
        (0.9, 1, 8.0, 5.94),
        (0.9, 8, 21.6, 9.01),
    ],
)
def test_algorithm_1_agrees_with_an_earlier_simulation(rate, rows, length, tokens):
    """The expected figures come from another simulation program, with two digits."""
    assert algorithm_1(rate, rows) == pytest.approx((length, tokens), rel=0.02)


def test_checks_hold_and_can_fail(monkeypatch):
    _, claims = checks.run(seed=0, quick=True)
    assert all(claim["holds"] for claim in claims) and len(claims) == 3
    monkeypatch.setattr(checks, "tokens_per_round", lambda rate, length: 1.02 * tokens_per_round(rate, length))
    assert not checks.run(seed=0, quick=True)[1][0]["holds"]


def test_the_best_fixed_length_and_the_crossover_follow_from_the_costs():
    costs = CostTable({1: [(1.0, 10.0), (2.0, 10.0), (3.0, 10.0), (4.0, 100.0)]}, {1: 0.1}, padded=True)
    assert sweeps.best_fixed(costs, 0.8, 1) == 2
    assert sweeps.crossover([(1, 2.0), (4, 1.5), (16, 0.5)]) == pytest.approx(8.0)
    assert sweeps.crossover([(1, 0.9), (4, 0.5)]) == 1.0
    assert sweeps.crossover([(1, 2.0), (4, 1.0)]) is None


def test_the_median_of_tables_is_taken_point_by_point():
    other = CostTable({1: [(1.0, 30.0), (9.0, 1.0)], 4: TABLE.verify[4]}, {1: 3.0, 4: 2.0}, padded=False)
    third = CostTable({1: [(1.0, 20.0), (9.0, 2.0)], 4: TABLE.verify[4]}, {1: 2.0, 4: 2.0}, padded=False)
    median = validation.median_table([TABLE, other, third])
    assert median.verify[1] == [(1.0, 20.0), (9.0, 2.0)] and median.draft == {1: 2.0, 4: 2.0}


def test_a_held_out_batch_must_be_one_of_several(capsys):
    with pytest.raises(SystemExit):
        simulate.main(["--batch", "1", "2", "--held-out", "4"])
    assert "--held-out must be one of" in capsys.readouterr().err


@pytest.mark.slow
def test_the_library_predicts_the_speed_ups_of_the_stored_document():
    rows = [row for row in load("simulate-window")["results"] if row["section"] == "batch"]
    for name in ("A100", "B200"):
        stored = {row["batch"]: row for row in rows if row["hardware"] == name}
        assert list(stored) == list(sweeps.BATCHES)
        lengths = ("bass", "cost-aware", "auto")
        predicted = predict_speedups(SimulatedClock(name), draft_lengths=lengths, batches=sweeps.BATCHES)
        points = {(point["batch"], point["draft_length"]): point["speedup"] for point in predicted["points"]}
        for batch, row in stored.items():
            assert points[batch, "bass"] == pytest.approx(row["Algorithm 1"], rel=1e-12)
            assert points[batch, "cost-aware"] == pytest.approx(row["cost-aware"], rel=1e-12)
            assert points[batch, "auto"] == points[batch, "cost-aware"]


def test_the_library_predicts_the_times_of_the_bench():
    costs = Roofline(HARDWARE["H100"], *shapes("1.7B"), 300)
    row = sweeps.figures(costs, Acceptance.same(0.7), 0.7, rows=8, tokens=48, seed=5, trials=3)
    predicted = predict_speedups(
        SimulatedClock("H100", "1.7B", "135M"), acceptance=0.7, batches=(8,),
        draft_lengths=("bass", row["fixed l"]), context=300, max_new_tokens=48, seed=5, trials=3,
    )  # fmt: skip
    bass, fixed = predicted["points"]
    assert bass["regular_ms_per_token"] == pytest.approx(row["regular ms/token"], rel=1e-12)
    assert bass["ms_per_token"] == pytest.approx(row["bass ms/token"], rel=1e-12)
    assert fixed["speedup"] == pytest.approx(row["best fixed"], rel=1e-12)


@pytest.mark.slow
@pytest.mark.demand
def test_simulate_runs():
    """A quick run decides all claims except those about times, and labels predictions."""
    document = run("simulate", "--quick")
    kinds = {row["section"]: row["kind"] for row in document["results"]}
    others = dict.fromkeys(("validation", "h200"), "measured and predicted")
    others |= {"checks": "check", "hardware": "datasheet"}
    assert kinds == dict.fromkeys(simulate.SECTIONS, "predicted") | others
    open_ = [claim["name"] for claim in document["claims"] if claim["holds"] is None]
    assert sum("held out" in name for name in open_) == 6 == len(open_)
    for row in document["results"]:
        if row["section"] == "validation":
            assert row["clock rounds"] == row["measured rounds"] and row["clock ms/token"] > 0
