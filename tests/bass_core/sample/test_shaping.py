"""Penalties, biases, bad words and min-p: what a text says of its next token beside the model.

Contract: greedy text is that of transformers' `generate` with the same options, by every method, and drafts that
are the target's own are all accepted: q is shaped as p is. The distribution of sampled text is enumerated in
tests/conformance/test_enumeration.py.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from bass_core import ModelPair, RequestError, SamplingParams, generate, race
from bass_core.sample import shaping
from bass_core.sample.distribution import probabilities
from bass_core.sample.shaping import shaped, shaped_next
from bass_core.sequence import Sequence
from tests.support.models import byte_tokenizer, prompts, texts_of, tiny_pair

PAIR = tiny_pair(tokenizer=byte_tokenizer())
TARGET = PAIR.target
NEW = 24


def by_transformers(row: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([row])
    mask, plain = torch.ones_like(ids), {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    out = TARGET.generate(ids, attention_mask=mask, max_new_tokens=NEW, **plain, **options)
    return list(out[0, len(row) :].tolist())


OURS_AND_THEIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "repetition": ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
    "bias": ({"logit_bias": {9: 3.0, 40: -2.5}}, {"sequence_bias": {(9,): 3.0, (40,): -2.5}}),
    "bad words": ({"bad_words": ((2,), (8, 1))}, {"bad_words_ids": [[2], [8, 1]]}),
}
for first, second in combinations(list(OURS_AND_THEIRS), 2):
    pairs = zip(OURS_AND_THEIRS[first], OURS_AND_THEIRS[second], strict=True)
    OURS_AND_THEIRS[f"{first} and {second}"] = tuple(one | other for one, other in pairs)  # type: ignore[assignment]


def test_biases_come_before_the_repetition_penalty():
    """The logits, to the last bit, as transformers' processors make them of a text that holds token 0."""
    text, logits = [0], torch.tensor([[1.0, 3.0, 0.0, -1.0]])
    processors = LogitsProcessorList(
        [SequenceBiasLogitsProcessor({(0,): 3.0, (1,): -4.0}), RepetitionPenaltyLogitsProcessor(2.0)]
    )
    wanted = processors(torch.tensor([text]), logits.clone())
    assert wanted.tolist() == [[2.0, -1.0, 0.0, -1.0]]
    params = SamplingParams(repetition_penalty=2.0, logit_bias={0: 3.0, 1: -4.0})
    rows = [Sequence(0, 0, text, 8, frozenset())]
    assert torch.equal(shaped(logits[:, None], params, rows)[:, 0], wanted)
    assert torch.equal(shaped_next(logits, params, rows, []), wanted)


@pytest.mark.parametrize("method", ["regular", "speculative", "bass", "amusd", "tree"])
@pytest.mark.parametrize("name", OURS_AND_THEIRS)
def test_greedy_text_is_transformers_own(name: str, method: str):
    ours, theirs = OURS_AND_THEIRS[name]
    rows = prompts(3)
    wanted = [by_transformers(row, **theirs) for row in rows]
    assert wanted != [by_transformers(row) for row in rows]
    ways: Any = {"method": "bass", "tree": (2, 2)} if method == "tree" else {"method": method, "draft_length": 4}
    written = generate(PAIR, rows, sampling=SamplingParams(**ours), max_new_tokens=NEW, eos_token_id=None, **ways)
    assert texts_of(written) == wanted


def test_bad_words_are_not_written_and_nothing_else_is_forbidden():
    row = prompts(1)[0]
    free = by_transformers(row)
    pair, lone = tuple(free[3:5]), free[8]
    wanted = by_transformers(row, bad_words_ids=[list(pair), [lone]])
    assert wanted != free
    for method in ("regular", "bass"):
        sampling = SamplingParams(bad_words=(pair, (lone,)))
        options: Any = {"max_new_tokens": NEW, "eos_token_id": None, "draft_length": 4, "method": method}
        assert generate(PAIR, [row], sampling=sampling, **options).sequences[0].token_ids == wanted


def test_a_bad_word_is_a_text_too():
    row = prompts(1)[0]
    options: Any = {"max_new_tokens": NEW, "eos_token_id": None}
    word = (generate(PAIR, [row], **options).sequences[0].text or "")[4:6]
    barred = generate(PAIR, [row], sampling=SamplingParams(bad_words=(word,)), **options).sequences[0].text
    assert barred is not None and word not in barred


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_of_the_target_itself_are_all_accepted(temperature: float):
    same = ModelPair(TARGET, TARGET)
    sampling = SamplingParams(
        temperature, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, min_p=0.02
    )
    out = generate(
        same, prompts(3), sampling=sampling, draft_length=4, max_new_tokens=NEW, eos_token_id=None, method="bass"
    )
    assert out.metrics.acceptance_rate == 1


def test_coupled_lanes_write_the_same():
    sampling = SamplingParams(0.9, repetition_penalty=1.3, frequency_penalty=0.4, min_p=0.05)
    options: Any = {"max_new_tokens": NEW, "eos_token_id": None, "verification": "coupled"}
    snapshot = list(race(PAIR, prompts(2), sampling=sampling, **options))[-1]
    assert snapshot["comparison"] and not any(any(rows) for rows in snapshot["comparison"].values())


def test_penalties_count_the_text_and_the_drafts_that_lead_to_a_token():
    row = Sequence(0, 0, [1, 2], 9, frozenset())
    row.write([2, 3], ["sampled"] * 2)
    logits = torch.zeros(1, 4, 6)
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=0.5)
    # A tree: 3 and 4 behind the newest token, and 5 behind 4.
    made = -shaped(logits, params, [row], torch.tensor([[3, 4, 5]]), [[-1, -1, 1]])[0]
    assert made.tolist() == [
        [0, 0, 1.5, 1.5, 0, 0],
        [0, 0, 1.5, 2.0, 0, 0],
        [0, 0, 1.5, 1.5, 1.5, 0],
        [0, 0, 1.5, 1.5, 1.5, 1.5],
    ]
    assert not logits.any()


@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("drawn", [0, 1, 4])
def test_the_next_draft_s_logits_are_the_last_of_all_and_made_alone(
    drawn: int, accelerator: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shaping, "is_accelerator", lambda device: accelerator)
    torch.manual_seed(3)
    rows = [Sequence(r, r, prompt, 9, frozenset()) for r, prompt in enumerate(([1, 2, 2], [4]))]
    for row in rows:
        row.write([2, 3], ["sampled"] * 2)
    logits, drafts = torch.randn(2, 6), torch.tensor([[5, 1, 1, 4], [0, 0, 3, 2]])[:, :drawn]
    params = SamplingParams(
        repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=0.5, logit_bias={3: 2.0, 4: -1.0},
        bad_words=((5,), (4, 0), (2, 3, 5, 1), (2, 2), (3, 1)),
    )  # fmt: skip
    every = shaped(logits[:, None].expand(-1, drawn + 1, -1), params, rows, drafts)[:, -1]
    seen: list[int] = []
    name = "_penalised" if accelerator else "_penalise"
    penalised = getattr(shaping, name)
    monkeypatch.setattr(shaping, name, lambda x, *rest: seen.append(x.shape[1]) or penalised(x, *rest))
    assert torch.equal(shaped_next(logits, params, rows, list(drafts.unbind(1))), every)
    assert seen == [1] and every.isinf().any()


@pytest.mark.parametrize("parents", [None, [[-1, -1, 1], [-1, 0, 1], [-1, 0, 0]]])
def test_an_accelerator_s_logits_are_the_host_s(parents: Any, monkeypatch: pytest.MonkeyPatch):
    """On the host only the tokens of the texts and of the drafts are touched: the same numbers, bit for bit."""
    torch.manual_seed(0)
    params = SamplingParams(repetition_penalty=0.7, presence_penalty=-1.1, frequency_penalty=0.3)
    rows = [Sequence(r, r, torch.randint(0, 50, (5 * r + 1,)).tolist(), 99, frozenset()) for r in range(3)]
    for row in rows:
        row.write(torch.randint(0, 50, (7,)).tolist(), ["sampled"] * 7)
    given: Any = (torch.randn(3, 4, 50) * 3, params, rows, torch.randint(0, 50, (3, 3)), parents)
    ours = shaped(*given)
    monkeypatch.setattr(shaping, "is_accelerator", lambda device: True)
    assert torch.equal(ours, shaped(*given)) and not torch.equal(ours, given[0])


def test_a_bias_and_a_bad_word_may_name_one_token():
    row = Sequence(0, 0, [1, 2], 9, frozenset())
    params = SamplingParams(logit_bias={0: 1.0, 1: 2.0, 2: -math.inf}, bad_words=((1,),))
    assert shaped(torch.zeros(1, 1, 4), params, [row]).tolist() == [[[1.0, -math.inf, -math.inf, 0.0]]]


def test_min_p_is_measured_by_the_likeliest():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert torch.allclose(
        probabilities(logits, SamplingParams(1.0, min_p=0.3)), torch.tensor([[10, 6, 3, 0]]) / 19
    )
    assert torch.allclose(probabilities(logits, SamplingParams(1.0, min_p=1.0)), torch.eye(4)[:1])


BAD: dict[str, dict[str, Any]] = {
    "min_p must be from 0 to 1": {"min_p": 1.5},
    "repetition_penalty must be a number from 0.001 to 1000": {"repetition_penalty": 0},
    "presence_penalty must be a number": {"presence_penalty": math.nan},
    "frequency_penalty must be a number": {"frequency_penalty": "1"},
    "logit_bias must be a dictionary": {"logit_bias": {1: math.inf}},
    "logit_bias must be": {"logit_bias": 3},
    "bad_words must be a list": {"bad_words": "word"},
    "bad_words must be": {"bad_words": [[]]},
}


@pytest.mark.parametrize("many", [1e-40, 1e39, 10**400], ids=["tiny", "large", "whole"])
def test_what_float32_does_not_hold_is_refused(many: float):
    options: list[dict[str, Any]] = [{"repetition_penalty": many}, {"temperature": 10**400}]
    if many > 1:
        options += [{name: -many} for name in ("presence_penalty", "frequency_penalty")]
        options += [{"logit_bias": {5: many}}, {"logit_bias": {5: -many}}]
    for one in options:
        with pytest.raises(RequestError, match=f"^{next(iter(one))} must be "):
            SamplingParams(**one)


@pytest.mark.parametrize("said", BAD)
def test_what_can_not_be_used_is_refused(said: str):
    with pytest.raises(RequestError, match=said):
        SamplingParams(1.0, **BAD[said])


def test_ids_that_the_model_has_not_are_refused():
    for sampling in (SamplingParams(logit_bias={96: 1.0}), SamplingParams(bad_words=([5, 96],))):
        with pytest.raises(RequestError, match="ids from 0 to 95; got 96"):
            generate(PAIR, [5, 6], sampling=sampling)
    with pytest.raises(RequestError, match="bad_words given as texts need a tokenizer"):
        generate(ModelPair(TARGET), [5, 6], sampling=SamplingParams(bad_words=("a",)))
    with pytest.raises(RequestError, match="would penalise the padding"):
        generate(PAIR, [5, 6], method="transformers", sampling=SamplingParams(repetition_penalty=1.2))
