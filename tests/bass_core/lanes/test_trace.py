"""The log of a race's rounds explains every token, and a recorded run can be repeated."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bass_core import RecordedLengths, RequestError, SamplingParams, generate, race, stream
from bass_core.decode.request import make_request
from bass_core.decode.text import TextStream
from bass_core.lanes.lane import Lane
from bass_core.length.base import Feedback
from bass_core.length.policies import Algorithm1
from tests.support.models import byte_tokenizer, prompts, texts_of, tiny_pair

PAIR = tiny_pair(tokenizer=byte_tokenizer())
TARGET = PAIR.target
ROWS = prompts(3)


def last_lanes(**arguments: Any) -> dict[str, Any]:
    """Return the lanes of the last snapshot, passed through JSON."""
    arguments = {"max_new_tokens": 24, "sampling": SamplingParams(0.8), "seed": 3} | arguments
    *_, snapshot = race(PAIR, ROWS, **arguments)
    lanes: dict[str, Any] = json.loads(json.dumps(snapshot["lanes"], allow_nan=False))
    return lanes


@pytest.mark.parametrize("verification", ["rejection", "block", "coupled"])
def test_every_token_has_its_round_and_every_draft_its_verdict(verification: str) -> None:
    for name, lane in last_lanes(verification=verification, draft_length=3).items():
        written = [0] * len(ROWS)
        drafted = accepted = 0
        for record in lane["rounds"]:
            for row in record["rows"]:
                sequence = lane["sequences"][row["sequence"]]
                start, end = row["start"], row["start"] + row["written"]
                assert start == written[row["sequence"]]
                written[row["sequence"]] = end
                accepted_len = row["accepted"]
                assert row["drafted"][:accepted_len] == sequence["token_ids"][start : start + accepted_len]
                assert sequence["origins"][start:end].count("accepted") == accepted_len
                assert set(sequence["times_ms"][start:end]) == {record["time_ms"]}
                widths = {len(row[key]) for key in ("drafted", "drafted_text", "p", "q", "u", "chance")}
                assert widths == {len(row["drafted"])}
                drafted += len(row["drafted"])
                accepted += accepted_len
                check_verdicts(row, record["kind"], verification)
        assert written == [len(sequence["token_ids"]) for sequence in lane["sequences"]]
        assert (drafted, accepted) == (lane["metrics"]["drafted"], lane["metrics"]["accepted"])
        numbers = [record["round"] for record in lane["rounds"] if record["kind"] != "prefill"]
        assert numbers == list(range(1, lane["metrics"]["rounds"] + 1)), name


def check_verdicts(row: dict[str, Any], kind: str, verification: str) -> None:
    """Recompute each verdict from the logged p, q and u, or from u and the chances under the block rule."""
    if kind == "prefill":
        assert row["next_p"] is None and not row["drafted"]
        return
    assert 0 < row["next_p"] <= 1
    if verification == "coupled":
        assert set(row["u"]) | set(row["chance"]) <= {None}
        assert row["one_by_one"] == row["accepted"]
        return
    rejection_rule = [u * q < p for p, q, u in zip(row["p"], row["q"], row["u"], strict=True)]
    accepted_len, one_by_one = row["accepted"], row["one_by_one"]
    assert all(rejection_rule[:one_by_one]) and not any(rejection_rule[one_by_one : one_by_one + 1])
    passed = [u < chance for u, chance in zip(row["u"], row["chance"], strict=True)]
    if verification == "rejection":
        assert (
            accepted_len == one_by_one
            and all(passed[:accepted_len])
            and not any(passed[accepted_len : accepted_len + 1])
        )
    elif row["written"] > accepted_len:  # otherwise the text ended at an accepted draft
        assert not any(passed[accepted_len:]) and (not accepted_len or passed[accepted_len - 1])


class Growing(Algorithm1):
    """A policy that is not built in, so that only the recorded lengths can repeat its run."""

    def observe(self, feedback: Feedback) -> None:
        self.length = 1 + (self.length + sum(feedback.accepted)) % 5


def test_a_run_repeats_from_its_recorded_lengths() -> None:
    rounds = last_lanes(draft_length=Growing())["bass"]["rounds"]
    lengths = [record["draft_length"] for record in rounds if record["kind"] != "prefill"]
    assert len(set(lengths)) > 2
    again = generate(
        PAIR, ROWS, max_new_tokens=24, sampling=SamplingParams(0.8), seed=3, draft_length=RecordedLengths(lengths)
    )
    original = last_lanes(draft_length=Growing())["bass"]["sequences"]
    assert texts_of(again) == [s["token_ids"] for s in original]


def test_a_run_repeats_if_a_row_ends_with_its_first_token() -> None:
    """Lengths are asked for before the prefill, but recorded after it."""
    first = generate(PAIR, ROWS, method="regular", max_new_tokens=1).sequences[0].token_ids
    options: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": first}
    rounds = [round_ for round_ in stream(PAIR, ROWS, draft_length=2, **options) if round_.kind != "prefill"]
    lengths = [round_.lengths for round_ in rounds]
    assert len(lengths[0]) < len(ROWS)
    expected = texts_of(generate(PAIR, ROWS, draft_length=2, **options))
    assert texts_of(generate(PAIR, ROWS, draft_length=RecordedLengths(lengths), **options)) == expected
    with pytest.raises(RequestError, match="has 1 rows in round 1, but this batch has"):
        generate(PAIR, ROWS, draft_length=RecordedLengths([[2]]), max_new_tokens=8, eos_token_id=None)


def test_invalid_recorded_lengths_are_refused() -> None:
    for length in (2.5, "x", -3, None, True, 1025):
        with pytest.raises(RequestError, match=r"whole numbers from 0 to 1024, one per round, .*; got .*\.$"):
            RecordedLengths([4, length])
    for entry in (["x"], [-1], [1, 2.5], []):
        with pytest.raises(RequestError, match="RecordedLengths takes"):
            RecordedLengths([entry])
    with pytest.raises(RequestError, match="at least one"):
        RecordedLengths([])


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_tree_is_logged_with_its_parents_and_accepted_path(temperature: float) -> None:
    lane = last_lanes(draft_length="auto", tree=(3, 2), sampling=SamplingParams(temperature), lanes=["bass"])[
        "bass"
    ]
    branched = 0
    for record in lane["rounds"]:
        for row in record["rows"]:
            if record["kind"] == "prefill" or row["parents"] is None:
                assert row["parents"] is row["path"] is None
                continue
            parents, path, start = row["parents"], row["path"], row["start"]
            assert len(parents) == len(row["drafted"]) and len(path) == row["accepted"]
            assert [parents[node] for node in path] == [-1, *path][: len(path)]
            written = lane["sequences"][row["sequence"]]["token_ids"][start : start + len(path)]
            assert [row["drafted"][node] for node in path] == written
            branched += len(set(parents)) < len(parents)
    assert branched > 3


def test_texts_are_decoded_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step waits for the tokenizer."""
    pushed, push = list[int](), TextStream.push

    def recording(text: TextStream, token: int) -> str:
        pushed.append(token)
        return push(text, token)

    monkeypatch.setattr(TextStream, "push", recording)
    lane = Lane(PAIR, make_request(PAIR, ROWS, max_new_tokens=4), "regular")
    while not lane.finished:
        lane.step()
    assert not pushed
    for sequence, text in zip(lane.sequences, lane.texts, strict=True):
        assert text is not None and text.ids == sequence.token_ids
        assert text.text == PAIR.tokenizer.decode(sequence.token_ids, skip_special_tokens=True)
    assert len(pushed) == sum(len(sequence.token_ids) for sequence in lane.sequences)
