"""What a sweep may be asked for, and the races that it asks for in turn."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from bass_core import RequestError
from ui.page.limits import Limits
from ui.sweep.request import MOST_RACES, TEMPERATURE, Arm, make_sweep

GIVEN = {"prompt": "Hello"}


def test_the_default_sweep_goes_batch_by_batch_through_three_draft_lengths() -> None:
    request = make_sweep(GIVEN, Limits())
    assert request.arms() == [Arm(batch, length) for batch in (1, 2, 4, 8) for length in ("bass", "auto", 4)]
    assert request.seconds == 60 and not request.resampled
    small = make_sweep(GIVEN, Limits(max_batch=5, max_seconds=30))
    assert small.batches == (1, 2, 4) and small.seconds == 15


def test_each_race_has_its_arm_and_the_form_s_other_settings_and_is_plain_data() -> None:
    given = GIVEN | {"temperature": 1.1, "seed": 2**32 - 1, "top_k": 7, "verification": "coupled", "batch_size": 3}
    request = make_sweep(given | {"lanes": ["speculative"], "time_budget_ms": 5}, Limits())
    race = request.race_of(Arm(4, "bass"))
    assert (race.batch_size, race.draft_length, race.lanes) == (4, "bass", ("regular", "bass"))
    assert (race.temperature, race.top_k, race.verification) == (1.1, 7, "coupled")
    assert (race.scheduling, race.time_budget_ms) == ("fair", None)
    # The next race of an arm has the next seed, which begins anew behind the last one.
    assert race.seed == 2**32 - 1 and request.race_of(Arm(4, "bass"), 2).seed == 1
    again = pickle.loads(pickle.dumps(race))
    assert again == race and again.arguments()["n"] == 4 and again.arguments()["inspect"] is False


def test_rows_of_one_prompt_are_sampled_so_that_they_differ() -> None:
    request = make_sweep(GIVEN | {"temperature": 0}, Limits())
    assert request.resampled and request.race_of(Arm(2, 4)).temperature == TEMPERATURE
    assert request.settings()["temperature"] == TEMPERATURE and request.settings()["resampled"]
    lines = make_sweep({"prompt": "one\ntwo", "prompts": "lines", "temperature": 0}, Limits())
    assert not lines.resampled and lines.race_of(Arm(2, 4)).temperature == 0


def test_with_a_prompt_a_line_the_rows_take_the_lines_in_turn() -> None:
    request = make_sweep({"prompt": "one\n\n two \nthree", "prompts": "lines"}, Limits())
    for batch, rows in ((1, ["one"]), (2, ["one", "two"]), (8, ["one", "two", "three"] * 2 + ["one", "two"])):
        assert request.race_of(Arm(batch, 4)).arguments()["prompt"] == rows


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"prompt": " "}, "The prompt is empty"),
        ({"batches": [1, 9]}, "Each batch must be a whole number from 1 to 8"),
        ({"batches": []}, "batches must be a list"),
        ({"batches": "8"}, "batches must be a list"),
        ({"draft_lengths": []}, "draft_lengths must be a list"),
        ({"draft_lengths": ["17"]}, "A fixed draft length must be a whole number from 1 to 16"),
        ({"draft_lengths": [1.5]}, "A fixed draft length must be"),
        ({"seconds": 4}, "seconds must be a number from 5 to 600"),
        ({"seconds": "long"}, "seconds must be a number"),
        ({"batches": list(range(1, 9)), "draft_lengths": [1, 2, 3, 4, 5]}, f"at most {MOST_RACES}: name fewer"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(given: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says) as refusal:
        make_sweep(GIVEN | given, Limits(max_batch=8))
    assert "\n" not in str(refusal.value)


def test_named_batches_and_lengths_are_taken_once_each() -> None:
    request = make_sweep(GIVEN | {"batches": [4, 1, 4], "draft_lengths": ["2", 2, "auto"]}, Limits())
    assert request.batches == (1, 4) and request.draft_lengths == (2, "auto")
