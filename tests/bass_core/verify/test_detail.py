"""With `inspect`, each round reports p, q and the residual where it ended; the tests compute them separately."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from bass_core import ModelPair, RequestError, SamplingParams, generate, race, stream
from bass_core.draft import registry
from bass_core.verify.rules import VERIFICATIONS, find_verification, stop_together
from tests.support.models import byte_tokenizer, prompts, texts_of, tiny, tiny_pair

PAIR = tiny_pair(tokenizer=byte_tokenizer())
TARGET, DRAFT = PAIR.target, PAIR.draft
ROWS = prompts(3)
TEMPERATURE = 0.8


def run_race(**arguments: Any) -> dict[str, Any]:
    """Return the lane "bass" of the last snapshot, passed through JSON."""
    defaults = {"max_new_tokens": 24, "sampling": SamplingParams(TEMPERATURE), "seed": 3, "draft_length": 3}
    *_, snapshot = race(PAIR, ROWS, lanes=("bass",), **(defaults | arguments))
    lane: dict[str, Any] = json.loads(json.dumps(snapshot["lanes"]["bass"], allow_nan=False))
    return lane


def rows_that_drafted(lane: dict[str, Any]) -> list[tuple[dict[str, Any], list[int], int]]:
    """Return (row record, prompt and text before the round, last token) of every row that drafted."""
    explained_rows = []
    for record in lane["rounds"]:
        for row in record["rows"]:
            if row["drafted"]:
                text = lane["sequences"][row["sequence"]]["token_ids"]
                text_before = [*ROWS[row["sequence"]], *text[: row["start"]]]
                explained_rows.append((row, text_before, text[row["start"] + row["written"] - 1]))
    return explained_rows


@torch.inference_mode()
def chances(model: Any, text: list[int], temperature: float) -> torch.Tensor:
    """Return the model's probabilities of the next token: float32 [V]."""
    logits = model(torch.tensor([text])).logits[0, -1].float()
    return torch.softmax(logits / temperature, -1)


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_the_residual_is_the_positive_part_of_p_less_q(verification: str) -> None:
    rejected = bonus = 0
    for row, text, last in rows_that_drafted(run_race(verification=verification, inspect=True)):
        detail, ending = row["detail"], row["detail"]["ending"]
        assert detail["rule"] == verification and detail["own_p"] is None
        assert detail["sources"] == ["model"] * len(row["drafted"])
        if ending is None:
            assert row["written"] == row["accepted"]
            continue
        accepted = row["drafted"][: row["accepted"]]
        p = chances(TARGET, [*text, *accepted], TEMPERATURE)
        top = ending["top"]
        assert [entry["token"] for entry in top[:8]] == p.topk(8).indices.tolist()
        assert [entry["p"] for entry in top] == pytest.approx(
            [float(p[entry["token"]]) for entry in top], rel=1e-4
        )
        assert ending["after"] == row["accepted"]
        if row["accepted"] == len(row["drafted"]):
            bonus += 1
            assert ending["draft"] is None and {(entry["q"], entry["residual"]) for entry in top} == {(None, None)}
            continue
        rejected += 1
        q = chances(DRAFT, [*text, *accepted], TEMPERATURE)
        reach = 1.0
        for own_p, own_q in zip(row["p"][: len(accepted)], row["q"][: len(accepted)], strict=True):
            reach = min(1.0, reach * own_p / own_q)
        reach = reach if verification == "block" else 1.0
        left = (reach * p - q).clamp(min=0)
        assert ending["draft"] == row["accepted"] and ending["reach"] == pytest.approx(reach)
        assert ending["mass"] == pytest.approx(float(left.sum()), rel=1e-3)
        for entry in top:
            assert entry["q"] == pytest.approx(float(q[entry["token"]]), rel=1e-4)
            # The page's figures can be recomputed from these fields.
            assert entry["residual"] * ending["mass"] == pytest.approx(
                max(0, reach * entry["p"] - entry["q"]), abs=1e-6
            )
            assert entry["residual"] == pytest.approx(float(left[entry["token"]] / left.sum()), abs=1e-4)
        tokens = {entry["token"]: entry for entry in top}
        assert tokens[row["drafted"][row["accepted"]]]["residual"] == 0 or verification == "block"
        assert tokens[last]["residual"] > 0
    assert rejected > 3 and bonus > 3


def test_greedy_rounds_report_the_models_own_probabilities() -> None:
    for row, text, _ in rows_that_drafted(run_race(sampling=SamplingParams(0), inspect=True)):
        detail = row["detail"]
        assert detail["rule"] == "greedy" and set(row["p"]) <= {0.0, 1.0}
        for i, token in enumerate(row["drafted"]):
            before = [*text, *row["drafted"][:i]]
            assert detail["own_p"][i] == pytest.approx(float(chances(TARGET, before, 1)[token]), rel=1e-3)
            assert detail["own_q"][i] == pytest.approx(float(chances(DRAFT, before, 1)[token]), rel=1e-3)
        if detail["ending"] is not None:
            text_to_end = [*text, *row["drafted"][: row["accepted"]]]
            assert detail["ending"]["mass"] is None
            best = detail["ending"]["top"][0]
            assert best["p"] == pytest.approx(float(chances(TARGET, text_to_end, 1).max()), rel=1e-4)
            assert best["q"] is None and best["residual"] is None


@pytest.mark.parametrize(
    ("rule", "arguments"),
    [
        ("coupled", {"verification": "coupled"}),
        ("coin", {"synthetic_acceptance": 0.5}),
        ("greedy", {"sampling": SamplingParams(0), "draft_length": "auto", "tree": (2, 1)}),
        ("coupled", {"verification": "coupled", "draft_length": "auto", "tree": (2, 1)}),
        ("tree", {"verification": "rejection", "draft_length": "auto", "tree": (3, 2)}),
    ],
)
def test_each_rule_is_named_and_only_trees_and_rejections_have_a_residual(
    rule: str, arguments: dict[str, Any]
) -> None:
    rows = rows_that_drafted(run_race(inspect=True, **arguments))
    rules = {row["detail"]["rule"] for row, _, _ in rows}
    assert rules == {rule}
    residuals = 0
    for row, text, _ in rows:
        ending = row["detail"]["ending"]
        if rule == "greedy":
            assert None not in [*row["detail"]["own_p"], *row["detail"]["own_q"]]
        if ending is None:
            continue
        path = [row["drafted"][i] for i in row["path"] or range(row["accepted"])]
        p = chances(TARGET, [*text, *path], 1 if rule == "greedy" else TEMPERATURE)
        assert ending["top"][0]["p"] == pytest.approx(float(p.max()), rel=1e-4)
        if rule != "tree":
            assert ending["mass"] is None
        elif ending["mass"] is not None:
            residuals += 1
            assert ending["draft"] is not None and ending["mass"] > 0
            for entry in ending["top"]:
                assert entry["residual"] * ending["mass"] == pytest.approx(
                    max(0, entry["p"] - entry["q"]), abs=1e-6
                )
    assert residuals or rule != "tree"


def test_the_source_of_each_draft_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "CASCADE_MATCH", 1)
    pair, text = ModelPair(TARGET, DRAFT, byte_tokenizer()), [5, 6, 7, 8, 9] * 4
    for drafter, expected in (("prompt_lookup", {"copy"}), ("adaptive", {"copy", "model"})):
        options = {"drafter": drafter, "draft_length": 3, "max_new_tokens": 30, "inspect": True}
        *_, snapshot = race(pair, [text, [1, 2]], lanes=("bass",), **options)
        rows = [row for record in snapshot["lanes"]["bass"]["rounds"] for row in record["rows"] if row["detail"]]
        assert {source for row in rows for source in row["detail"]["sources"]} == expected


def test_inspecting_changes_no_text_and_is_off_by_default() -> None:
    for sampling in (SamplingParams(0), SamplingParams(TEMPERATURE)):
        plain, inspected = (run_race(sampling=sampling, inspect=inspect) for inspect in (False, True))
        assert plain["sequences"][0]["token_ids"] == inspected["sequences"][0]["token_ids"]
        assert {row["detail"] is None for row, _, _ in rows_that_drafted(plain)} == {True}
    with pytest.raises(RequestError, match="inspect must be True or False"):
        generate(PAIR, ROWS, inspect=1)  # type: ignore[arg-type]


def test_a_common_stop_keeps_the_lengths_equal_and_the_text():
    """In each round, all rows write as many tokens as the row with the fewest accepted drafts."""
    target = tiny("llama")
    pair = tiny_pair(target=target)
    rows = prompts(3, longest=8)
    plain = texts_of(generate(pair, rows, method="regular", max_new_tokens=20))
    num_accepted = 0
    texts = [[] for _ in rows]
    without_stop = list(stream(pair, rows, draft_length=4, max_new_tokens=20))
    for round_ in stream(pair, rows, draft_length=4, verification="common_stop", max_new_tokens=20):
        assert len({len(row.tokens) for row in round_.rows}) <= 1
        fewest = min((row.accepted for row in round_.rows), default=0)
        for row in round_.rows:
            texts[row.sequence] += row.tokens
            assert row.accepted == fewest or row.finish_reason
            if round_.kind == "verify" and len(row.tokens) > fewest and len(row.drafted) > fewest:
                # The last token is an accepted draft or, if this row's draft was rejected, the target's token.
                accepted = row.p[fewest] == 1
                assert row.origins[fewest] == ("accepted" if accepted else "recovered")
                assert row.tokens[fewest] == row.drafted[fewest] or not accepted
                num_accepted += accepted
    assert texts == plain
    assert num_accepted
    assert any(len({len(row.tokens) for row in round_.rows}) > 1 for round_ in without_stop), (
        "without a common stop, the lengths were equal too"
    )


def test_common_stop_and_chen_are_not_offered():
    assert list(VERIFICATIONS) == ["auto", "block", "rejection", "coupled"]
    assert find_verification("chen") is find_verification("rejection")
    assert find_verification("common_stop").adjust is stop_together
    for name in ("hope", None, ["chen"]):
        with pytest.raises(RequestError, match="verification must be one of auto, block, rejection, coupled; got"):
            find_verification(name)
