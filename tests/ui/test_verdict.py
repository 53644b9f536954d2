"""The verdict: who is ahead, the equation in the race's own numbers, ties, and another machine's clock."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ui.race.verdict import EARLY, LaneRounds, judge

from .test_feed import H100

Rounds = list[tuple[float, int, int]]


def lane(rounds: Rounds, finished: bool = True, speedup: float | None = None) -> tuple[dict[str, Any], LaneRounds]:
    """A lane of rounds (ms, rows, tokens of all rows) behind a prefill of 50 ms; one drafted if it wrote more."""
    counted, at, rows = LaneRounds(), 50.0, max(rows for _, rows, _ in rounds)
    counted.add({"kind": "prefill", "time_ms": at, "rows": []})  # type: ignore[typeddict-item]
    for ms, live, tokens in rounds:
        at += ms
        written = [{"written": tokens // live + (i < tokens % live)} for i in range(live)]
        kind = "verify" if tokens > live else "plain"
        counted.add({"kind": kind, "time_ms": at, "rows": written})  # type: ignore[arg-type, typeddict-item]
    each = rows * sum(ms for ms, _, _ in rounds) / sum(tokens for _, _, tokens in rounds)
    return {"metrics": {"ms_per_token": each, "speedup": speedup}, "finished": finished}, counted


def said(
    settings: dict[str, Any] | None = None, clock: Any = None, **lanes: tuple[dict[str, Any], LaneRounds]
) -> dict[str, Any]:
    """The verdict on these lanes, with the speed-ups that a race gives them."""
    base = lanes.get("regular")
    for made, _ in lanes.values():
        if base is not None:
            made["metrics"]["speedup"] = base[0]["metrics"]["ms_per_token"] / made["metrics"]["ms_per_token"]
    shots: Any = {name: made for name, (made, _) in lanes.items()}
    return dict(judge(shots, {name: counted for name, (_, counted) in lanes.items()}, settings or {}, clock))


PLAIN: Rounds = [(10.0, 2, 2)] * 20


def test_a_lane_is_taken_apart() -> None:
    """Rounds write three tokens of two rows; each row of "speculative" has rounds of its own."""
    ahead = said(regular=lane(PLAIN), bass=lane([(10.0, 2, 3)] * 14))
    assert ahead["head"] == "BASS is ahead: 1.50× the speed of Regular."
    assert ahead["lanes"] == {
        "bass": "BASS 1.50×: 1.50 tokens a round for each of 2 rows, and a round cost 1.00 plain steps."
    }
    behind = said({"draft_length": "auto"}, regular=lane(PLAIN), bass=lane([(20.0, 2, 3)] * 14))
    assert behind["head"] == "Regular is ahead: 1.33× the speed of BASS, which comes next."
    assert behind["lanes"]["bass"] == (
        "BASS 0.75×: 1.50 tokens a round for each of 2 rows, but a round cost 2.00 plain steps."
    )
    alone, counted = lane([(10.0, 1, 2)] * 20)
    alone["metrics"]["ms_per_token"] *= 2
    in_turn = said(regular=lane(PLAIN), speculative=(alone, counted))
    assert in_turn["lanes"]["speculative"] == (
        "Speculative 1.00×: 2.00 tokens a round, and a round of each of 2 rows, one after another, cost 2.00 "
        "plain steps."
    )
    other = said({"draft_length": "auto"}, regular=lane(PLAIN), transformers=lane([(20.0, 2, 2)] * 20))
    line = "transformers 0.50×: 1.00 tokens a round for each of 2 rows, and a round cost 2.00 plain steps."
    assert other["lanes"] == {"transformers": line}, "it never drafts, so it is not said to draft seldom"
    # Overlapping rounds have no cost, and without the reference there is no speed-up.
    beside = said(regular=lane(PLAIN), amusd=lane([(8.0, 2, 3)] * 14))
    assert beside["lanes"]["amusd"].startswith("AMUSD 1.88×: draft and target work at the same time")
    two = said(speculative=lane(PLAIN), bass=lane([(10.0, 2, 4)] * 10))
    assert two == {"head": "BASS is ahead: 2.00× the speed of Speculative, which comes next.", "lanes": {}}


@pytest.mark.parametrize(("drafted", "words"), [(0, "none"), (4, "4")])
@pytest.mark.parametrize("policy", ["auto", "bass"])
def test_few_drafts_are_explained_where_a_policy_chose(drafted: int, words: str, policy: str) -> None:
    rounds = [(12.0, 2, 3)] * drafted + [(10.0, 2, 2)] * (20 - drafted)
    line = said({"draft_length": policy}, regular=lane(PLAIN), bass=lane(rounds))["lanes"]["bass"]
    assert f"It drafted in {words} of 20 rounds" in line
    assert ("costs more than it brings here" in line or "cost more than it brings here" in line) == (
        policy == "auto"
    )


def test_a_difference_within_the_rounds_scatter_is_a_tie() -> None:
    chance = random.Random(0)
    noisy: Rounds = [(10 + 4 * chance.random(), 2, 2) for _ in range(20)]
    other: Rounds = [(10 + 4 * chance.random(), 2, 2) for _ in range(20)]
    assert "are level: the" in said(regular=lane(noisy), bass=lane(other))["head"]
    # The same difference of the means, without scatter, is none.
    even = [[(sum(ms for ms, _, _ in rounds) / 20, 2, 2)] * 20 for rounds in (noisy, other)]
    assert "is ahead" in said(regular=lane(even[0]), bass=lane(even[1]))["head"]
    fast: Rounds = [(10.0, 2, 3), (10.0, 2, 5)] * 8
    found = said(regular=lane(PLAIN), speculative=lane(fast), bass=lane(fast))
    assert found["head"].startswith(
        "Speculative and BASS are level, ahead of Regular: the 0 % between them may be chance"
    )


def test_nothing_is_said_too_early_or_of_one_lane() -> None:
    assert said(regular=lane(PLAIN))["head"] is None
    early = lane([(10.0, 2, 3)] * (EARLY - 1), finished=False)
    assert said(regular=lane(PLAIN, finished=False), bass=early) == {"head": None, "lanes": {}}
    later = lane([(10.0, 2, 3)] * EARLY, finished=False)
    assert said(regular=lane(PLAIN), bass=later)["head"] == "BASS is ahead so far: 1.50× the speed of Regular."


def test_it_names_the_predicted_machine() -> None:
    lanes = {"regular": lane(PLAIN), "bass": lane([(10.0, 2, 3)] * 4 + [(10.0, 2, 2)] * 16)}
    found = said({"draft_length": "auto"}, H100, **lanes)
    assert found["head"].endswith(", on a predicted H100 with 7.8B and 310M.")
    line = found["lanes"]["bass"]
    assert line.startswith("BASS 1.10×, predicted: 1.10 tokens a round for each of 2 rows")
    assert line.endswith("elsewhere a draft would cost more than it brings there.")
    measured = said({"draft_length": "auto"}, **lanes)
    assert "predicted" not in f"{measured}" and "there" not in measured["lanes"]["bass"]
