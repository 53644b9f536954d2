"""The exactness bench on a tiny pair: in float32 all rows are equal, and a difference is reported in detail."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch

from bass_core import ModelPair, generate
from bench.cpu import exactness
from bench.report.tables import described
from tests.support.models import tiny_pair

ARGUMENTS = Namespace(batch=[1, 2], prompts=3, max_new_tokens=10, seed=5)
PROMPTS: list[Any] = [[5, 17, 3], [40, 2, 33, 60, 7], [1, 2, 3, 4, 5, 6, 7]]
BASS = ("bass", "bass, model", "bass, prompt lookup")


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return tiny_pair()


@pytest.mark.slow
def test_every_arm_is_compared_and_a_difference_is_reported_with_its_place(
    pair: ModelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate_with_an_error(pair: ModelPair, prompt: Any, **arguments: Any) -> Any:
        out = generate(pair, prompt, **arguments)
        if arguments["method"] == "speculative" and prompt[0] == PROMPTS[1]:
            for sequence in out.sequences:
                sequence.token_ids[4] = (sequence.token_ids[4] + 1) % pair.vocab
        return out

    monkeypatch.setattr(exactness, "generate", generate_with_an_error)
    results = list(exactness.compare(pair, PROMPTS, ARGUMENTS))
    drafted = {name + suffix for name in BASS for suffix in ("", ", fixed 4")} | {"amusd"}
    for text in ("greedy", "coupled"):
        by_batch = {n: {r["arm"] for r in results if (r["text"], r["batch"]) == (text, n)} for n in (1, 2)}
        assert by_batch == {1: {"speculative"} | drafted, 2: {"regular"} | drafted}
    unlike = [row for row in results if row["differences"]]
    assert {row["identical"] for row in results if row not in unlike} == {1.0}
    assert [(row["text"], row["arm"]) for row in unlike] == [("greedy", "speculative"), ("coupled", "speculative")]
    for row in unlike:
        assert row["identical"] == pytest.approx(2 / 3) and row["first difference at"] == 4
        assert not exactness._claim(row)["holds"]
        (difference,) = row["differences"]
        assert (difference["prompt"], difference["at"]) == (1, 4) and difference["ours"] == (
            difference["theirs"] + 1
        ) % pair.vocab
        assert 0 <= difference["tie"] == row["farthest tie"] < 1
        assert f"prompt 1 at 4, {difference['ours']} for {difference['theirs']}: " in described(difference)
    greedy = unlike[0]["differences"][0]
    text = generate(pair, PROMPTS[1], method="regular", max_new_tokens=10).sequences[0].token_ids[:4]
    with torch.inference_mode():
        p = torch.softmax(pair.target(torch.tensor([PROMPTS[1] + text])).logits[0, -1], -1)
    expected = p[[greedy["ours"], greedy["theirs"]]].tolist()
    assert [greedy["p_ours"], greedy["p_theirs"]] == pytest.approx(expected, rel=1e-3)
