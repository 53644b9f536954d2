"""The endpoints /race and /sweep: results as in the library, errors in one sentence."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import httpx
import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError

from bass_core import ModelPair, SamplingParams, race
from tests.support.page import lane_texts

pytestmark = pytest.mark.slow
LANES = {"regular", "speculative", "bass"}


@pytest.fixture(scope="module")
def client(server: str) -> Client:
    return Client(server, verbose=False)


# The default values of the settings after the seed and before the pair.
UP_TO_PAIR = (0, 1.0, "auto", "auto", "auto", "fair", "auto", None, None)


def test_both_endpoints_have_defaults_and_one_output(client: Client) -> None:
    api = client.view_api(return_format="dict", print_info=False)
    assert set(api["named_endpoints"]) == {"/race", "/sweep"} and not api["unnamed_endpoints"]
    for name, endpoint in api["named_endpoints"].items():
        assert all(parameter["parameter_has_default"] for parameter in endpoint["parameters"]), name
        assert len(endpoint["returns"]) == 1


def test_snapshots_grow_and_end_with_the_texts_of_the_library(client: Client, pair: ModelPair) -> None:
    snapshots = list(client.submit("Hello", 2, 200, 0.9, 5, api_name="/race"))
    *_, local = race(pair, "Hello", n=2, max_new_tokens=200, sampling=SamplingParams(temperature=0.9), seed=5)
    assert lane_texts(snapshots[-1]) == lane_texts(local)
    assert len(snapshots) > 2 and [s["done"] for s in snapshots] == [False] * (len(snapshots) - 1) + [True]
    for before, after in pairwise(snapshots):
        for lane in LANES:
            for old, new in zip(lane_texts(before)[lane], lane_texts(after)[lane], strict=True):
                assert new.startswith(old)
    assert set(snapshots[-1]["lanes"]) == LANES
    for name, lane in snapshots[-1]["lanes"].items():
        assert len(lane["sequences"]) == 2
        for sequence in lane["sequences"]:
            count = len(sequence["token_ids"])
            assert 0 < count == len(sequence["origins"]) == len(sequence["times_ms"])
            assert sequence["finish_reason"] in ("eos", "length")
            allowed = {"sampled"} if name == "regular" else {"sampled", "accepted", "recovered", "bonus"}
            assert set(sequence["origins"]) <= allowed
            assert sequence["times_ms"] == sorted(sequence["times_ms"])
        assert lane["metrics"]["ms_per_token"] > 0 and lane["metrics"]["throughput_tps"] > 0
        assert (lane["metrics"]["acceptance_rate"] is None) == (name == "regular")
    assert "cpu_percent" in snapshots[-1]["device"]


def test_a_cancelled_race_frees_the_device(client: Client) -> None:
    job = client.submit("Hello", 8, 1024, 0.9, 0, api_name="/race")
    next(iter(job))
    job.cancel()
    assert client.submit("Hello", 1, 4, 0, 0, api_name="/race").result()["done"]


def test_malformed_calls_are_refused_in_one_sentence(server: str) -> None:
    """The fixture `server` checks at the end that the server's log has no traceback."""
    call, queue = f"{server}/gradio_api/call/race", f"{server}/gradio_api/queue"
    event = httpx.post(call, json={"data": ["Hello", 2]}).json()["event_id"]
    answer = httpx.get(f"{call}/{event}").text
    assert "event: error" in answer
    assert "The request lacks 30 of 32 values: /gradio_api/info lists them." in answer

    def sentence(event: int, values: list[Any], session: str) -> str:
        session_key = {"session_hash": session}
        assert httpx.post(f"{queue}/join", json={"fn_index": event, "data": values, **session_key}).is_success
        with httpx.stream("GET", f"{queue}/data", params=session_key) as answer:
            (done,) = [json.loads(line[5:]) for line in answer.iter_lines() if "process_completed" in line]
        assert not done["success"]
        return str(done["output"]["error"])

    events = httpx.get(f"{server}/config").json()["dependencies"]
    # Besides the event of Run, there are events that only the page's script uses.
    (run,) = [event["id"] for event in events if event["backend_fn"] and len(event["inputs"]) == 26]
    for values in (["Hello"], ["Hello", 2, 3, 0.5, 0, 0, 1.0, ["no choice"], *[None] * 7]):
        assert "\n" not in sentence(run, values, f"raw{len(values)}")
    idle = [event["id"] for event in events if not event["backend_fn"]]
    assert idle
    for event_id in idle:
        assert "belongs to the page's own script" in sentence(event_id, [], f"idle{event_id}")


def test_a_sweep_yields_its_points_one_by_one(client: Client) -> None:
    settings: dict[str, Any] = {
        "batches": [1, 2],
        "draft_lengths": ["bass", "3"],
        "seconds": 5,
        "max_new_tokens": 24,
    }
    *states, last = client.submit("Hello", **settings, api_name="/sweep")
    assert last["done"] and [(point["batch"], point["draft_length"]) for point in last["points"]] == [
        (1, "bass"), (1, 3), (2, "bass"), (2, 3)
    ]  # fmt: skip
    assert all(point["speedup"] > 0 for point in last["points"])
    assert [len(state["points"]) for state in states] == sorted(len(state["points"]) for state in states)
    assert states[0]["points"] == [] and not any(state["done"] for state in states)
    job = client.submit("Hello", batches=[33], api_name="/sweep")
    (refusal,) = job
    assert refusal["done"] and refusal["points"] == []
    assert refusal["error"] == "Each batch must be a whole number from 1 to 32."
    with pytest.raises(AppError, match=refusal["error"]):
        job.result()


def test_bad_input_is_refused_in_one_sentence(client: Client) -> None:
    for arguments, message in (
        (("Hello", "many", 8, 0.7, 0), "Batch size must be a whole number from 1 to 32."),
        (("Hello", 2, 8, "nan", 0), "Temperature must be a number of 0 or more"),
        (("x" * 2**20, 2, 8, 0.7, 0), "this server takes at most 20000: shorten it"),
        (("Hello", 2, 8, 0.7, 0, *UP_TO_PAIR, "/etc"), "races only its own pair"),
        (("Hello", 2, 8, 0.7, 0, 0, 1.0, "quick"), "draft_length must be"),
    ):
        job = client.submit(*arguments, api_name="/race")
        (last,) = job
        assert last["done"] and last["phase"] == "error" and last["lanes"] == {} and message in last["error"]
        with pytest.raises(AppError, match=message) as refusal:
            job.result()
        assert "\n" not in str(refusal.value)
