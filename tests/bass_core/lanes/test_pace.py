"""The speed figures of random races with rows of different lengths, and what must not change these figures."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest

from bass_core import LEAST_ROUNDS, ModelPair, SamplingParams, SimulatedClock, predict_speedups, race
from bass_core.lanes.pace import STALL, Pace, Tally
from bass_core.length.options import make_policy
from bass_core.predict.rounds import Acceptance, play
from tests.support.models import prompts, tiny

SEEDS = range(40)


@dataclass(frozen=True)
class TimedStep:
    """A round: its time in ms, and the number of tokens that each of its rows writes."""

    ms: float
    written: dict[int, int]
    kind: str = "verify"


def regular(rng: random.Random, lengths: list[int], cost: float = 50.0) -> list[TimedStep]:
    """Return regular decoding's steps: a prefill, then one token per step for every unfinished row."""
    rows = range(len(lengths))
    steps = [TimedStep(rng.uniform(5, 500), dict.fromkeys(rows, 1), "prefill")]
    for at in range(1, max(lengths)):
        live = [row for row in rows if lengths[row] > at]
        steps.append(TimedStep((cost + 3 * len(live)) * rng.uniform(0.5, 2), dict.fromkeys(live, 1), "plain"))
    return steps


def drafting(rng: random.Random, lengths: list[int], one_by_one: bool = False) -> list[TimedStep]:
    """Return rounds with 1 to 5 tokens per unfinished row.

    one_by_one: decode one row after another, each with its own prefill.
    """
    groups = [[row] for row in range(len(lengths))] if one_by_one else [list(range(len(lengths)))]
    steps = []
    for rows in groups:
        steps.append(TimedStep(rng.uniform(5, 500), dict.fromkeys(rows, 1), "prefill"))
        left = {row: lengths[row] - 1 for row in rows}
        while live := [row for row in rows if left[row]]:
            written = {row: min(left[row], rng.randint(1, 5)) for row in live}
            left = {row: left[row] - written.get(row, 0) for row in rows}
            steps.append(TimedStep(rng.uniform(20, 200), written))
    return steps


def pace(steps: list[TimedStep], lengths: list[int], finished: bool = True) -> Pace:
    tally, at = Tally(len(lengths)), Counter()
    for step in steps:
        at.update(step.written)
        tally.add(step.kind, step.ms, [(row, n, at[row] == lengths[row]) for row, n in step.written.items()])
    return tally.pace(finished)


def decode_ms(steps: list[TimedStep]) -> float:
    return sum(step.ms for step in steps if step.kind != "prefill")


def some_lengths(rng: random.Random) -> list[int]:
    return [rng.randint(2, 40) for _ in range(rng.randint(1, 9))]


@pytest.mark.parametrize("seed", SEEDS)
def test_equal_texts_give_the_ratio_of_the_finishing_times(seed: int) -> None:
    rng = random.Random(seed)
    lengths = some_lengths(rng)
    plain = regular(rng, lengths)
    reference = pace(plain, lengths)
    assert reference.speedup(reference) == pytest.approx(1)
    assert reference.round_cost(reference) == pytest.approx(1)
    assert reference.plain_steps == pytest.approx(max(lengths) - 1)
    for steps in (drafting(rng, lengths), drafting(rng, lengths, one_by_one=True), regular(rng, lengths)):
        lane = pace(steps, lengths)
        speedup = lane.speedup(reference)
        assert speedup == pytest.approx(decode_ms(plain) / decode_ms(steps))
        # The speed-up is above 1 only if the lane finishes first.
        assert speedup is not None and (speedup > 1) == (decode_ms(steps) < decode_ms(plain))
        assert lane.plain_steps == pytest.approx(max(lengths) - 1)
        assert lane.ms_per_token == pytest.approx(decode_ms(steps) / (max(lengths) - 1))


@pytest.mark.parametrize("seed", SEEDS)
def test_figures_do_not_depend_on_row_order_units_or_split_rounds(seed: int) -> None:
    rng = random.Random(seed)
    lengths, theirs = some_lengths(rng), some_lengths(rng)
    plain, steps = regular(rng, theirs), drafting(rng, lengths, one_by_one=seed % 2 == 0)
    reference, lane = pace(plain, theirs), pace(steps, lengths)
    speedup, cost = lane.speedup(reference), lane.round_cost(reference)
    assert speedup and cost

    order = list(range(len(lengths)))
    rng.shuffle(order)
    moved = [replace(step, written={order[row]: n for row, n in step.written.items()}) for step in steps]
    permuted = pace(moved, [lengths[order.index(row)] for row in range(len(lengths))])
    assert permuted.speedup(reference) == pytest.approx(speedup)

    slower = [replace(step, ms=7 * step.ms) for step in steps]
    assert pace(slower, lengths).speedup(reference) == pytest.approx(speedup / 7)
    both = pace(slower, lengths), pace([replace(step, ms=7 * step.ms) for step in plain], theirs)
    assert both[0].speedup(both[1]) == pytest.approx(speedup)
    assert both[0].round_cost(both[1]) == pytest.approx(cost)

    # Split each round into two of half the time, each with half of the rows.
    halves = []
    for step in steps:
        rows = list(step.written.items())
        parts = [dict(rows[: len(rows) // 2]), dict(rows[len(rows) // 2 :])]
        halves += [replace(step, ms=step.ms / 2, written=part) for part in parts]
    assert pace(halves, lengths).speedup(reference) == pytest.approx(speedup)
    assert pace(halves, lengths).ms_per_token == pytest.approx(lane.ms_per_token)

    # If the cost of a step does not depend on its rows, the speed-up is the ratio of the times per token.
    level = pace([replace(step, ms=50.0) for step in plain], theirs)
    assert lane.ms_per_token and lane.speedup(level) == pytest.approx(50 / lane.ms_per_token)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_token_counts_as_one_over_the_rows_at_its_position(seed: int) -> None:
    """Compare with the definition, token by token, after every round of a race."""
    rng = random.Random(seed)
    lengths = some_lengths(rng)
    theirs = some_lengths(rng)
    plain = regular(rng, theirs)
    steps = drafting(rng, lengths, one_by_one=seed % 2 == 0)
    for end in range(1, len(steps) + 1):
        so_far, written = steps[:end], Counter()
        for step in so_far:
            written.update(step.written)
        texts = [written[row] for row in range(len(lengths))]
        sharing = {
            (row, place): sum(n >= place or n < whole for n, whole in zip(texts, lengths, strict=True))
            for row, length in enumerate(texts)
            for place in range(2, length + 1)
        }
        lane = pace(so_far, lengths, finished=end == len(steps))
        assert lane.plain_steps == pytest.approx(sum(1 / m for m in sharing.values()))
        if end == len(steps):
            step_ms = means(plain, theirs)
            expected = sum(step_ms(m) / m for m in sharing.values()) / decode_ms(steps)
            assert lane.speedup(pace(plain, theirs)) == pytest.approx(expected)


def means(plain: list[TimedStep], lengths: list[int]):  # type: ignore[no-untyped-def]
    """Return a function: regular decoding's mean step time for a number of rows.

    The function interpolates between measured numbers of rows, and is constant beyond the smallest and the
    largest.
    """
    times: dict[int, list[float]] = {}
    for step in plain:
        if step.kind != "prefill":
            times.setdefault(len(step.written), []).append(step.ms)
    known = sorted((m, sum(ms) / len(ms)) for m, ms in times.items())

    def step_ms(m: int) -> float:
        if m <= known[0][0]:
            return known[0][1]
        for (low, before), (high, after) in pairwise(known):
            if m <= high:
                return before + (after - before) * (m - low) / (high - low)
        return known[-1][1]

    return step_ms


def test_ended_rows_do_not_make_a_lane_faster() -> None:
    """Three of four rows end early.

    A speed-up computed as if all four rows were still running would name the wrong winner.
    """
    lengths, other = [40, 40, 40, 40], [60, 4, 4, 4]
    plain = [TimedStep(9.0, dict.fromkeys(range(4), 1), "prefill")]
    plain += [TimedStep(50.0, dict.fromkeys(range(4), 1), "plain")] * 39
    rounds = [TimedStep(9.0, dict.fromkeys(range(4), 1), "prefill"), TimedStep(50.0, dict.fromkeys(range(4), 3))]
    rounds += [TimedStep(50.0, {0: 1})] * 56
    lane, reference = pace(rounds, other), pace(plain, lengths)
    # Regular decoding would need 59 steps for this lane's text. The lane took 57 rounds of equal length.
    assert lane.speedup(reference) == pytest.approx(59 / 57)
    assert lane.ms_per_token == pytest.approx(50 * 57 / 59)
    assert lane.round_cost(reference) == pytest.approx(1)


def test_a_token_of_one_of_four_rows_is_a_quarter_of_a_step() -> None:
    rng = random.Random(0)
    lengths = [20] * 4
    one_by_one = drafting(rng, lengths, one_by_one=True)
    first = 1 + next(i for i, step in enumerate(one_by_one) if i and step.kind == "prefill")
    lane = pace(one_by_one[: first - 1], lengths, finished=False)
    assert lane.plain_steps == pytest.approx(19 / 4)


def test_a_cut_text_counts_as_unfinished() -> None:
    """A lane must not look faster because its time ran out."""
    rng = random.Random(1)
    lengths = [30] * 3
    steps = drafting(rng, lengths, one_by_one=True)[:5]
    cut, running = pace(steps, lengths, finished=True), pace(steps, lengths, finished=False)
    assert cut.plain_steps == running.plain_steps


def test_there_is_no_early_speedup_and_none_from_a_stall() -> None:
    lengths = [100]
    plain = [TimedStep(9.0, {0: 1}, "prefill"), *[TimedStep(50.0, {0: 1}, "plain")] * 20]
    lane, few = pace(plain, lengths, finished=False), pace(plain[:LEAST_ROUNDS], lengths, finished=False)
    assert few.speedup(lane) is None and lane.speedup(few) is None and few.round_cost(lane) is None
    assert pace(plain[: LEAST_ROUNDS + 1], lengths, finished=False).speedup(lane) == pytest.approx(1)
    stalled = [*plain, TimedStep(10_000.0, {0: 1}, "plain")]
    reference = pace(stalled, lengths, finished=False)
    assert lane.speedup(reference) == pytest.approx((20 + STALL) / 21)
    assert reference.speedup(reference) == pytest.approx(1)
    finished = pace(stalled, [22]), pace([*plain, TimedStep(50.0, {0: 1}, "plain")], [22])
    assert finished[1].speedup(finished[0]) == pytest.approx((20 * 50 + 10_000) / (21 * 50)), (
        "after the end all time must count"
    )
    assert pace(plain[:1], lengths).speedup(lane) is None


def test_scatter_measures_how_much_rounds_vary() -> None:
    rng = random.Random(2)
    lengths = [300, 300]
    plain = pace(regular(rng, lengths), lengths)
    same = [TimedStep(9.0, {0: 1, 1: 1}, "prefill"), *[TimedStep(40.0, {0: 2, 1: 2})] * 50]
    assert pace(same, lengths).scatter(plain) == pytest.approx(0, abs=1e-9)
    assert pace(same[:2], lengths).scatter(plain) == math.inf
    # Halving the number of rounds raises the error by about the square root of two.
    noisy = drafting(rng, [4000, 4000])
    whole, half = (pace(steps, [4000, 4000]).scatter(plain) for steps in (noisy, noisy[: len(noisy) // 2]))
    assert half / whole == pytest.approx(math.sqrt(2), rel=0.1)


def test_several_races_add_up_to_one_pace() -> None:
    rng = random.Random(3)
    lengths = [[9, 20], [14, 5]]
    plain = [regular(rng, row_lengths) for row_lengths in lengths]
    steps = [drafting(rng, row_lengths) for row_lengths in lengths]
    combined = [
        Pace.together(pace(rounds, row_lengths) for rounds, row_lengths in zip(races, lengths, strict=True))
        for races in (steps, plain)
    ]
    assert combined[0].speedup(combined[1]) == pytest.approx(
        sum(map(decode_ms, plain)) / sum(map(decode_ms, steps))
    )


def test_predicted_speed_ups_follow_the_same_definition() -> None:
    clock, tokens, rows = SimulatedClock("h100"), 64, 5
    point = predict_speedups(
        clock, batches=(rows,), draft_lengths=(3,), max_new_tokens=tokens, context=64, trials=1
    )["points"][0]
    costs = clock.costs(64)
    paces = []
    for length in (3, 0):
        policy = make_policy(length, costs, timed=False)
        (played,) = play(policy, Acceptance.same(0.8), rows, tokens, 0, 1)
        steps = [TimedStep(1.0, dict.fromkeys(range(rows), 1), "prefill")]
        for round_ in played:
            written = {row: n + 1 for row, n in zip(round_.rows, round_.accepted, strict=True)}
            steps.append(TimedStep(round_.ms(costs), written))
        paces.append(pace(steps, [tokens] * rows))
    assert point["speedup"] == pytest.approx(paces[0].speedup(paces[1]))
    assert point["ms_per_token"] == pytest.approx(paces[0].ms_per_token)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_race_reports_the_pace_of_its_snapshots(temperature: float) -> None:
    """Each snapshot's speed figures follow from the rounds in it, and regular decoding's speed-up is always 1."""
    pair = ModelPair(tiny("llama"), tiny("llama"))
    ids = prompts(3)
    snapshots = list(race(pair, ids, max_new_tokens=24, draft_length=3, sampling=SamplingParams(temperature)))
    num_speedups = 0
    for snapshot in snapshots:
        lanes = snapshot["lanes"]
        if not lanes:
            continue
        paces = {name: Pace.of(lane) for name, lane in lanes.items()}
        for name, lane in lanes.items():
            metrics = lane["metrics"]
            assert metrics["ms_per_token"] == (
                None if paces[name].ms_per_token is None else pytest.approx(paces[name].ms_per_token)
            )
            speedup = paces[name].speedup(paces["regular"])
            assert metrics["speedup"] == (None if speedup is None else pytest.approx(speedup))
            num_speedups += speedup is not None
        if lanes["regular"]["metrics"]["speedup"] is not None:
            assert lanes["regular"]["metrics"]["speedup"] == pytest.approx(1)
    assert num_speedups
    last = snapshots[-1]["lanes"]
    texts = [[sequence["token_ids"] for sequence in lane["sequences"]] for lane in last.values()]
    if temperature == 0:
        assert texts[0] == texts[1] == texts[2]
        ends = {name: float(np.sum(Pace.of(lane).ms)) for name, lane in last.items()}
        for name, lane in last.items():
            assert lane["metrics"]["speedup"] == pytest.approx(ends["regular"] / ends[name])
