"""The verdict: the fastest lane, the equation with the race's numbers, ties, predicted machines."""

from __future__ import annotations

import random
from typing import Any

import pytest

from bass_core import LEAST_ROUNDS, Pace
from ui.race.verdict import LaneRounds, judge

from .test_feed import H100

Rounds = list[tuple[float, int, int]]


def lane(rounds: Rounds, finished: bool = True, count: int = 2) -> tuple[dict[str, Any], LaneRounds]:
    """A lane of `count` rows with rounds (ms, rows, tokens of all rows) after a prefill of 50 ms.

    A round with more than one token per row is a verification, otherwise a plain step. If rounds have one row
    each, the rows take turns.
    """
    lane_rounds, at, texts = LaneRounds(), 50.0, [1] * count
    records: list[dict[str, Any]] = [
        {
            "kind": "prefill",
            "time_ms": at,
            "rows": [{"sequence": i, "start": 0, "written": 1} for i in range(count)],
        }
    ]
    for turn, (ms, live, tokens) in enumerate(rounds):
        at += ms
        rows = []
        for i in range(live):
            row, written = (i if live > 1 else turn % count), tokens // live + ((i + turn) % live < tokens % live)
            rows.append({"sequence": row, "start": texts[row], "written": written})
            texts[row] += written
        records.append({"kind": "verify" if tokens > live else "plain", "time_ms": at, "rows": rows})
    for record in records:
        lane_rounds.add(record)
    finish_reason = "length" if finished else None
    sequences = [{"token_ids": [0] * length, "finish_reason": finish_reason} for length in texts]
    snapshot = {
        "metrics": {"rounds": len(rounds)},
        "finished": finished,
        "sequences": sequences,
        "rounds": records,
    }
    return snapshot | {"error": None}, lane_rounds


def verdict_on(
    settings: dict[str, Any] | None = None, clock: Any = None, **lanes: tuple[dict[str, Any], LaneRounds]
) -> dict[str, Any]:
    """The verdict on these lanes, with metrics as in a race."""
    shots: Any = {name: snapshot for name, (snapshot, _) in lanes.items()}
    paces = {name: Pace.of(shot) for name, shot in shots.items()}
    for name, snapshot in shots.items():
        snapshot["metrics"] |= {"ms_per_token": paces[name].ms_per_token} | paces[name].against(
            paces.get("regular")
        )
    return dict(
        judge(shots, {name: lane_rounds for name, (_, lane_rounds) in lanes.items()}, settings or {}, clock)
    )


PLAIN: Rounds = [(10.0, 2, 2)] * 20


def test_a_lanes_speed_is_split_into_tokens_and_cost_of_a_round() -> None:
    """Rounds with drafts write three tokens for two rows. In lane "speculative", each round has only one row."""
    ahead = verdict_on(regular=lane(PLAIN), bass=lane([(10.0, 2, 3)] * 14))
    assert ahead["head"] == "BASS was fastest: 1.50× the speed of Regular."
    assert ahead["lanes"] == {
        "bass": "BASS 1.50×: a round writes as much as 1.50 plain steps, and costs as much as 1.00."
    }
    behind = verdict_on({"draft_length": "auto"}, regular=lane(PLAIN), bass=lane([(20.0, 2, 3)] * 14))
    assert behind["head"] == "Regular was fastest: 1.33× the speed of BASS, which came next."
    assert behind["lanes"]["bass"] == (
        "BASS 0.75×: a round writes as much as 1.50 plain steps, but costs as much as 2.00."
    )
    in_turn = verdict_on(regular=lane(PLAIN), speculative=lane([(10.0, 1, 3)] * 20))
    assert in_turn["lanes"]["speculative"] == (
        "Speculative 1.50×: a round (for one of 2 rows) writes as much as 1.50 plain steps, and costs as much as "
        "1.00."
    )
    other = verdict_on({"draft_length": "auto"}, regular=lane(PLAIN), transformers=lane([(20.0, 2, 2)] * 20))
    line = "transformers 0.50×: a round writes as much as 1.00 plain steps, and costs as much as 2.00."
    assert other["lanes"] == {"transformers": line}, "a lane that never drafts has no note on few drafts"
    # If draft and target overlap, rounds have no cost. Without the lane "regular" there is no speed-up.
    overlapping = verdict_on(regular=lane(PLAIN), amusd=lane([(8.0, 2, 3)] * 14))
    assert overlapping["lanes"]["amusd"].startswith("AMUSD 1.88×: draft and target work at the same time")
    two = verdict_on(speculative=lane(PLAIN), bass=lane([(10.0, 2, 4)] * 10))
    assert two == {"head": "BASS was fastest: 2.00× the speed of Speculative, which came next.", "lanes": {}}


@pytest.mark.parametrize(("drafted", "words"), [(0, "none"), (4, "4")])
@pytest.mark.parametrize("policy", ["auto", "bass"])
def test_few_drafts_are_explained_if_a_policy_chose_them(drafted: int, words: str, policy: str) -> None:
    rounds = [(12.0, 2, 3)] * drafted + [(10.0, 2, 2)] * (20 - drafted)
    line = verdict_on({"draft_length": policy}, regular=lane(PLAIN), bass=lane(rounds))["lanes"]["bass"]
    assert f"It drafted in {words} of its 20 rounds" in line
    why = "in the others a draft would cost" if drafted else "on this machine a draft costs"
    assert (f": {why} more than it saves" in line) == (policy == "auto")


def test_a_difference_within_the_rounds_scatter_is_a_tie() -> None:
    chance = random.Random(0)
    noisy: Rounds = [(10 + 4 * chance.random(), 2, 2) for _ in range(20)]
    other: Rounds = [(10 + 4 * chance.random(), 2, 2) for _ in range(20)]
    assert "were level: the" in verdict_on(regular=lane(noisy), bass=lane(other))["head"]
    # If the means differ by as much but the rounds have no scatter, it is no tie.
    even = [[(sum(ms for ms, _, _ in rounds) / 20, 2, 2)] * 20 for rounds in (noisy, other)]
    assert "was fastest" in verdict_on(regular=lane(even[0]), bass=lane(even[1]))["head"]
    fast: Rounds = [(10.0, 2, 3), (10.0, 2, 5)] * 8
    verdict = verdict_on(regular=lane(PLAIN), speculative=lane(fast), bass=lane(fast))
    assert verdict["head"] == "Speculative and BASS were level, ahead of Regular."


def test_a_tie_during_a_race_is_not_announced() -> None:
    fast: Rounds = [(10.0, 2, 3), (10.0, 2, 5)] * 8
    level = verdict_on(speculative=lane(fast, finished=False), bass=lane(fast))
    assert level == {"head": None, "lanes": {}}
    ahead = verdict_on(regular=lane(PLAIN), speculative=lane(fast, finished=False), bass=lane(fast))
    assert ahead["head"] == "Speculative and BASS are ahead of Regular so far."
    assert ahead["lanes"].keys() == {"speculative", "bass"}


def test_there_is_no_verdict_too_early_or_on_one_lane() -> None:
    assert verdict_on(regular=lane(PLAIN))["head"] is None
    early = lane([(10.0, 2, 3)] * (LEAST_ROUNDS - 1), finished=False)
    assert verdict_on(regular=lane(PLAIN, finished=False), bass=early) == {"head": None, "lanes": {}}
    later = lane([(10.0, 2, 3)] * LEAST_ROUNDS, finished=False)
    assert (
        verdict_on(regular=lane(PLAIN), bass=later)["head"] == "BASS is ahead so far: 1.50× the speed of Regular."
    )


def test_other_lanes_are_compared_if_the_reference_failed() -> None:
    failed, counted = lane([])
    failed |= {"rounds": [], "error": "out of memory"}
    failed["sequences"] = [{"token_ids": [], "finish_reason": "error"}] * 2
    lanes = {"speculative": lane(PLAIN), "bass": lane([(10.0, 2, 4)] * 10)}
    verdict = verdict_on(regular=(failed, counted), **lanes)
    assert verdict == {"head": "BASS was fastest: 2.00× the speed of Speculative, which came next.", "lanes": {}}
    waits = lane([], finished=False)
    assert verdict_on(regular=waits, **lanes) == {"head": None, "lanes": {}}, (
        "the verdict waits for a running reference"
    )


def test_a_lane_that_failed_is_not_ranked() -> None:
    failed, counted = lane([(10.0, 2, 6)] * 10)
    failed["error"] = "out of memory"
    lanes = {"speculative": lane([(10.0, 2, 3)] * 14), "bass": (failed, counted)}
    verdict = verdict_on(regular=lane(PLAIN), **lanes)
    assert verdict["head"] == "Speculative was fastest: 1.50× the speed of Regular."
    assert verdict["lanes"].keys() == {"speculative"}
    assert verdict_on(**lanes)["head"] is None


def test_the_verdict_names_the_predicted_machine() -> None:
    lanes = {"regular": lane(PLAIN), "bass": lane([(10.0, 2, 3)] * 4 + [(10.0, 2, 2)] * 16)}
    verdict = verdict_on({"draft_length": "auto"}, H100, **lanes)
    assert verdict["head"].endswith(", on a predicted H100 with 7.8B and 310M.")
    line = verdict["lanes"]["bass"]
    assert line.startswith("BASS 1.10×, predicted: a round writes as much as 1.10 plain steps")
    assert line.endswith("It drafted in 4 of its 20 rounds: in the others a draft would cost more than it saves.")
    never = {"regular": lane(PLAIN), "bass": lane(PLAIN)}
    assert "on that machine a draft costs" in verdict_on({"draft_length": "auto"}, H100, **never)["lanes"]["bass"]
    assert "predicted" not in f"{verdict_on({'draft_length': 'auto'}, **lanes)}"
