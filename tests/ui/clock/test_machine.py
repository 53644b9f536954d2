"""The settings of another machine: what they make, what is refused, and what the page says of it."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from bass_core import HARDWARE, PAIRS, Hardware, ModelSize, RequestError, SimulatedClock
from ui.page import clock as machine
from ui.page import clock as words
from ui.page.limits import Limits
from ui.page.request import RaceRequest, make_request
from ui.race.feed import PageFeed
from ui.race.verdict import judge

from ..race.test_feed import snapshot
from ..race.test_verdict import lane

H100 = {"kind": "predicted", "hardware": "H100", "gpus": 1, "target": "7.8B", "draft": "310M"}


def asked(**given: Any) -> RaceRequest:
    return make_request({"prompt": "Hello", "batch_size": 1} | given, Limits())


def test_every_machine_and_pair_of_the_library_is_offered_and_no_other() -> None:
    offered = [value for _, value in machine.CLOCKS if value not in (machine.MEASURED, machine.OWN)]
    assert offered == [name.lower() for name in HARDWARE]
    assert [value for _, value in machine.MODELS if value != machine.OWN] == [name.lower() for name in PAIRS]


def test_the_default_clock_is_the_measured_one() -> None:
    request = asked()
    assert machine.clock(vars(request)) is machine.code(vars(request)) is None
    assert "clock" not in request.arguments() and request.arguments()["synthetic_acceptance"] is None


@pytest.mark.parametrize("models", ["7.8b", "1.7b", "70b"])
def test_a_named_clock_is_the_library_s(models: str) -> None:
    request = pickle.loads(pickle.dumps(asked(clock="h100", clock_models=models, acceptance=0.8)))
    draft = {"7.8b": "310m", "1.7b": "135m", "70b": "8b"}[models]
    assert request.arguments()["clock"] == SimulatedClock("h100", models, draft)
    assert request.arguments()["synthetic_acceptance"] == 0.8


def test_own_numbers_make_the_clock() -> None:
    own = {"clock": "own", "clock_models": "own", "clock_bandwidth": 500, "clock_tflops": 40}
    made = asked(**own, clock_target=3, clock_draft=0.5, clock_bytes=0.5).arguments()["clock"]
    assert (made.machine.bandwidth, made.machine.flops) == (500, 40e12)
    assert [(one.parameters, one.cost.weight_bytes) for one in made.models] == [(3e9, 1.5e9), (5e8, 2.5e8)]
    assert words.machine_of(made.record()) == "machine of 500 GB/s and 40 TFLOP/s with 3B and 500M"


@pytest.mark.parametrize("clock", ["h100", "laptop", "own"])
@pytest.mark.parametrize("models", ["7.8b", "own"])
def test_the_code_makes_the_same_clock(clock: str, models: str) -> None:
    settings = vars(asked(clock=clock, clock_models=models))
    names = {"SimulatedClock": SimulatedClock, "Hardware": Hardware, "ModelSize": ModelSize}
    assert eval(str(machine.code(settings)), names) == machine.clock(settings)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"clock": "tpu"}, "clock must be one of measured, a100, h100, h200, b200, laptop, own; got 'tpu'."),
        ({"clock": None}, "clock must be one of"),
        ({"clock": "h100", "clock_models": "9b"}, "clock_models must be one of 7.8b, 1.7b, 70b, own; got '9b'."),
        ({"clock": "own", "clock_bandwidth": 0}, "The memory bandwidth must be a number of GB/s above 0"),
        ({"clock": "own", "clock_tflops": None}, "The peak must be a number of TFLOP/s above 0"),
        ({"clock": "own", "clock_tflops": float("inf")}, "The peak must be a number of TFLOP/s above 0"),
        ({"clock": "h100", "clock_models": "own", "clock_target": -1}, "The target's size must be a number"),
        ({"clock": "h100", "clock_models": "own", "clock_draft": "big"}, "The draft's size must be a number"),
        ({"clock": "h100", "clock_models": "own", "clock_bytes": [2]}, "The size of a weight must be a number"),
        ({"clock": "laptop", "clock_models": "70b"}, "do not fit"),
        ({"acceptance": 1.5}, "Acceptance must be a number from 0 to 1, or empty"),
        ({"acceptance": "often"}, "Acceptance must be a number from 0 to 1, or empty"),
    ],
)
def test_what_is_no_machine_gets_one_sentence(given: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError) as refusal:
        asked(**given)
    assert says in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_number_that_the_form_hides_is_never_refused() -> None:
    for clock, models in (("measured", "own"), ("h100", "7.8b")):
        asked(clock=clock, clock_models=models, clock_bandwidth=-1, clock_target=None, clock_bytes=0)


def told(clock: dict[str, Any] | None, settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(head, view) of a snapshot."""
    shot: Any = snapshot(["a", "b"], 20, done=True) | ({"clock": clock} if clock else {})
    log, view, _ = PageFeed("r", settings).update(shot)
    return json.loads(log.split("\n")[0]), json.loads(view)


def test_the_head_names_the_predicted_machine() -> None:
    head, _ = told(H100, {"clock": "h100"})
    assert (head["clock"], head["machine"]) == (H100, "H100 with 7.8B and 310M")
    assert head["code"] == "SimulatedClock('h100', target='7.8b', draft='310m')"
    two = words.where(H100 | {"gpus": 2, "target": "70B", "draft": "8B"})
    assert two == "on 2 predicted H100 with 70B and 8B"


def test_the_verdict_names_it_too() -> None:
    lanes = {"regular": lane([(10.0, 2, 2)] * 20), "bass": lane([(10.0, 2, 3)] * 4 + [(10.0, 2, 2)] * 16)}
    lanes["bass"][0]["metrics"]["speedup"] = 1.1
    shots: Any = {name: made for name, (made, _) in lanes.items()}
    rounds = {name: counted for name, (_, counted) in lanes.items()}
    said = judge(shots, rounds, {"draft_length": "auto"}, H100)
    assert said["head"] and said["head"].endswith(", on a predicted H100 with 7.8B and 310M.")
    line = said["lanes"]["bass"]
    assert line.startswith("BASS 1.10×, predicted: 1.10 tokens a row-round")
    assert line.endswith("elsewhere a draft would cost more than it brings there.")
    measured = judge(shots, rounds, {"draft_length": "auto"})
    assert "predicted" not in f"{measured}" and "there" not in measured["lanes"]["bass"]


def test_a_measured_race_has_no_clock() -> None:
    head, view = told(None, {"clock": "measured"})
    assert not head.keys() & {"clock", "machine", "code"} and "predicted" not in json.dumps(view)


@pytest.mark.parametrize("settings", [{}, {"clock": "tpu"}, {"clock": "own", "clock_tflops": "x"}])
def test_a_recording_whose_settings_do_not_say_has_no_code(settings: dict[str, Any]) -> None:
    assert told(H100, settings)[0]["code"] is None
    assert words.machine_of({}) == "machine"
