"""The log of a race's rounds explains every token, and a recorded run can be repeated."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bass_core import RecordedLengths, RequestError, SamplingParams, generate, race
from bass_core.length.base import Feedback
from bass_core.length.policies import Algorithm1
from tests.support.models import byte_tokenizer, prompts, texts_of, tiny_pair

PAIR = tiny_pair(tokenizer=byte_tokenizer())
TARGET = PAIR.target
ROWS = prompts(3)


def last(**arguments: Any) -> dict[str, Any]:
    """The lanes of the last snapshot, passed through JSON."""
    arguments = {"max_new_tokens": 24, "sampling": SamplingParams(0.8), "seed": 3} | arguments
    *_, snapshot = race(PAIR, ROWS, **arguments)
    lanes: dict[str, Any] = json.loads(json.dumps(snapshot["lanes"], allow_nan=False))
    return lanes


@pytest.mark.parametrize("verification", ["rejection", "block", "coupled"])
def test_every_token_has_its_round_and_every_draft_its_verdict(verification: str) -> None:
    for name, lane in last(verification=verification, draft_length=3).items():
        written = [0] * len(ROWS)
        drafted = accepted = 0
        for record in lane["rounds"]:
            for row in record["rows"]:
                sequence = lane["sequences"][row["sequence"]]
                start, end = row["start"], row["start"] + row["written"]
                assert start == written[row["sequence"]]
                written[row["sequence"]] = end
                kept = row["accepted"]
                assert row["drafted"][:kept] == sequence["token_ids"][start : start + kept]
                assert sequence["origins"][start:end].count("accepted") == kept
                assert set(sequence["times_ms"][start:end]) == {record["time_ms"]}
                widths = {len(row[key]) for key in ("drafted", "drafted_text", "p", "q", "u", "chance")}
                assert widths == {len(row["drafted"])}
                drafted += len(row["drafted"])
                accepted += kept
                check_verdicts(row, record["kind"], verification)
        assert written == [len(sequence["token_ids"]) for sequence in lane["sequences"]]
        assert (drafted, accepted) == (lane["metrics"]["drafted"], lane["metrics"]["accepted"])
        numbers = [record["round"] for record in lane["rounds"] if record["kind"] != "prefill"]
        assert numbers == list(range(1, lane["metrics"]["rounds"] + 1)), name


def check_verdicts(row: dict[str, Any], kind: str, verification: str) -> None:
    """Recomputes each verdict from the logged p, q and u, and under the block rule from the chances."""
    if kind == "prefill":
        assert row["next_p"] is None and not row["drafted"]
        return
    assert 0 < row["next_p"] <= 1
    if verification == "coupled":
        assert set(row["u"]) | set(row["chance"]) <= {None}
        assert row["one_by_one"] == row["accepted"]
        return
    stands = [u * q < p for p, q, u in zip(row["p"], row["q"], row["u"], strict=True)]
    kept, alone = row["accepted"], row["one_by_one"]
    assert all(stands[:alone]) and not any(stands[alone : alone + 1])
    passed = [u < chance for u, chance in zip(row["u"], row["chance"], strict=True)]
    if verification == "rejection":
        assert kept == alone and all(passed[:kept]) and not any(passed[kept : kept + 1])
    elif row["written"] > kept:  # else the text ended among the accepted drafts
        assert not any(passed[kept:]) and (not kept or passed[kept - 1])


class Growing(Algorithm1):
    """Not the default rule: only the recorded lengths can repeat such a run."""

    def observe(self, feedback: Feedback) -> None:
        self.length = 1 + (self.length + sum(feedback.accepted)) % 5


def test_a_run_repeats_from_its_recorded_lengths() -> None:
    rounds = last(draft_length=Growing())["bass"]["rounds"]
    lengths = [record["draft_length"] for record in rounds if record["kind"] != "prefill"]
    assert len(set(lengths)) > 2
    again = generate(
        PAIR, ROWS, max_new_tokens=24, sampling=SamplingParams(0.8), seed=3, draft_length=RecordedLengths(lengths)
    )
    first = last(draft_length=Growing())["bass"]["sequences"]
    assert texts_of(again) == [s["token_ids"] for s in first]


def test_what_is_no_recorded_length_is_refused() -> None:
    for length in (2.5, "x", -3, None, True, 1025):
        with pytest.raises(RequestError, match=r"whole numbers from 0 to 1024, one per round, .*; got .*\.$"):
            RecordedLengths([4, length])
    for entry in (["x"], [-1], [1, 2.5], []):
        with pytest.raises(RequestError, match="RecordedLengths takes"):
            RecordedLengths([entry])
    with pytest.raises(RequestError, match="at least one"):
        RecordedLengths([])


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_tree_is_logged_with_its_parents_and_the_path_that_stood(temperature: float) -> None:
    lane = last(draft_length="auto", tree=(3, 2), sampling=SamplingParams(temperature), lanes=["bass"])["bass"]
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
