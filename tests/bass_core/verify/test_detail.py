"""With `inspect`, each round tells p, q and the residual where it ended, as found here independently."""

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


def raced(**arguments: Any) -> dict[str, Any]:
    """The lane "bass" of the last snapshot, passed through JSON."""
    given = {"max_new_tokens": 24, "sampling": SamplingParams(TEMPERATURE), "seed": 3, "draft_length": 3}
    *_, snapshot = race(PAIR, ROWS, lanes=("bass",), **(given | arguments))
    lane: dict[str, Any] = json.loads(json.dumps(snapshot["lanes"]["bass"], allow_nan=False))
    return lane


def explained(lane: dict[str, Any]) -> list[tuple[dict[str, Any], list[int], int]]:
    """(row record, prompt and text before the round, last token of the round) of every row that drafted."""
    found = []
    for record in lane["rounds"]:
        for row in record["rows"]:
            if row["drafted"]:
                text = lane["sequences"][row["sequence"]]["token_ids"]
                before = [*ROWS[row["sequence"]], *text[: row["start"]]]
                found.append((row, before, text[row["start"] + row["written"] - 1]))
    return found


@torch.inference_mode()
def chances(model: Any, text: list[int], temperature: float) -> torch.Tensor:
    """What the model gives the next token: float32 [V]."""
    logits = model(torch.tensor([text])).logits[0, -1].float()
    return torch.softmax(logits / temperature, -1)


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_the_residual_is_what_q_leaves_of_p(verification: str) -> None:
    rejected = bonus = 0
    for row, text, last in explained(raced(verification=verification, inspect=True)):
        detail, ending = row["detail"], row["detail"]["ending"]
        assert detail["rule"] == verification and detail["own_p"] is None
        assert detail["sources"] == ["model"] * len(row["drafted"])
        if ending is None:
            assert row["written"] == row["accepted"]
            continue
        kept = row["drafted"][: row["accepted"]]
        p = chances(TARGET, [*text, *kept], TEMPERATURE)
        top = ending["top"]
        assert [one["token"] for one in top[:8]] == p.topk(8).indices.tolist()
        assert [one["p"] for one in top] == pytest.approx([float(p[one["token"]]) for one in top], rel=1e-4)
        assert ending["after"] == row["accepted"]
        if row["accepted"] == len(row["drafted"]):
            bonus += 1
            assert ending["draft"] is None and {(one["q"], one["residual"]) for one in top} == {(None, None)}
            continue
        rejected += 1
        q = chances(DRAFT, [*text, *kept], TEMPERATURE)
        reach = 1.0
        for own_p, own_q in zip(row["p"][: len(kept)], row["q"][: len(kept)], strict=True):
            reach = min(1.0, reach * own_p / own_q)
        reach = reach if verification == "block" else 1.0
        left = (reach * p - q).clamp(min=0)
        assert ending["draft"] == row["accepted"] and ending["reach"] == pytest.approx(reach)
        assert ending["mass"] == pytest.approx(float(left.sum()), rel=1e-3)
        for one in top:
            assert one["q"] == pytest.approx(float(q[one["token"]]), rel=1e-4)
            # What the page shows can be recomputed from what it is given.
            assert one["residual"] * ending["mass"] == pytest.approx(max(0, reach * one["p"] - one["q"]), abs=1e-6)
            assert one["residual"] == pytest.approx(float(left[one["token"]] / left.sum()), abs=1e-4)
        tokens = {one["token"]: one for one in top}
        assert tokens[row["drafted"][row["accepted"]]]["residual"] == 0 or verification == "block"
        assert tokens[last]["residual"] > 0
    assert rejected > 3 and bonus > 3


def test_greedy_tells_the_models_own_probabilities() -> None:
    for row, text, _ in explained(raced(sampling=SamplingParams(0), inspect=True)):
        detail = row["detail"]
        assert detail["rule"] == "greedy" and set(row["p"]) <= {0.0, 1.0}
        for i, token in enumerate(row["drafted"]):
            before = [*text, *row["drafted"][:i]]
            assert detail["own_p"][i] == pytest.approx(float(chances(TARGET, before, 1)[token]), rel=1e-3)
            assert detail["own_q"][i] == pytest.approx(float(chances(DRAFT, before, 1)[token]), rel=1e-3)
        if detail["ending"] is not None:
            kept = [*text, *row["drafted"][: row["accepted"]]]
            assert detail["ending"]["mass"] is None
            best = detail["ending"]["top"][0]
            assert best["p"] == pytest.approx(float(chances(TARGET, kept, 1).max()), rel=1e-4)
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
def test_each_rule_is_named_and_a_residual_told_only_where_there_is_one(
    rule: str, arguments: dict[str, Any]
) -> None:
    rows = explained(raced(inspect=True, **arguments))
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
            for one in ending["top"]:
                assert one["residual"] * ending["mass"] == pytest.approx(max(0, one["p"] - one["q"]), abs=1e-6)
    assert residuals or rule != "tree"


def test_who_proposed_a_draft_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "CASCADE_MATCH", 1)
    pair, text = ModelPair(TARGET, DRAFT, byte_tokenizer()), [5, 6, 7, 8, 9] * 4
    for drafter, expected in (("prompt_lookup", {"copy"}), ("adaptive", {"copy", "model"})):
        given = {"drafter": drafter, "draft_length": 3, "max_new_tokens": 30, "inspect": True}
        *_, snapshot = race(pair, [text, [1, 2]], lanes=("bass",), **given)
        rows = [row for record in snapshot["lanes"]["bass"]["rounds"] for row in record["rows"] if row["detail"]]
        assert {source for row in rows for source in row["detail"]["sources"]} == expected


def test_inspecting_changes_no_text_and_without_it_nothing_is_told() -> None:
    for sampling in (SamplingParams(0), SamplingParams(TEMPERATURE)):
        plain, told = (raced(sampling=sampling, inspect=inspect) for inspect in (False, True))
        assert plain["sequences"][0]["token_ids"] == told["sequences"][0]["token_ids"]
        assert {row["detail"] is None for row, _, _ in explained(plain)} == {True}
    with pytest.raises(RequestError, match="inspect must be True or False"):
        generate(PAIR, ROWS, inspect=1)  # type: ignore[arg-type]


def test_a_common_stop_keeps_the_lengths_alike_and_the_text():
    """In a round, all rows write as many tokens as the first rejection leaves; the text is the target's."""
    target = tiny("llama")
    pair = tiny_pair(target=target)
    rows = prompts(3, longest=8)
    plain = texts_of(generate(pair, rows, method="regular", max_new_tokens=20))
    others = 0
    texts = [[] for _ in rows]
    own = list(stream(pair, rows, draft_length=4, max_new_tokens=20))
    for round_ in stream(pair, rows, draft_length=4, verification="common_stop", max_new_tokens=20):
        assert len({len(row.tokens) for row in round_.rows}) <= 1
        least = min((row.accepted for row in round_.rows), default=0)
        for row in round_.rows:
            texts[row.sequence] += row.tokens
            assert row.accepted == least or row.finish_reason
            if round_.kind == "verify" and len(row.tokens) > least and len(row.drafted) > least:
                # The last token is an accepted draft or, where this row was refused, the target's own token.
                stood = row.p[least] == 1
                assert row.origins[least] == ("accepted" if stood else "recovered")
                assert row.tokens[least] == row.drafted[least] or not stood
                others += stood
    assert texts == plain
    assert others
    assert any(len({len(row.tokens) for row in round_.rows}) > 1 for round_ in own), "nothing was cut short"


def test_users_are_offered_the_others_alone():
    assert list(VERIFICATIONS) == ["auto", "block", "rejection", "coupled"]
    assert find_verification("chen") is find_verification("rejection")
    assert find_verification("common_stop").adjust is stop_together
    for name in ("hope", None, ["chen"]):
        with pytest.raises(RequestError, match="verification must be one of auto, block, rejection, coupled; got"):
            find_verification(name)
