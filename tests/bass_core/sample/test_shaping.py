"""Penalties, biases, bad words and min-p shape p and q alike, in every method.

tests/conformance/test_enumeration.py enumerates the distribution of sampled text.
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
NEW_TOKENS = 24


def transformers_text(row: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([row])
    mask, plain = torch.ones_like(ids), {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    output = TARGET.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, **plain, **options)
    return list(output[0, len(row) :].tolist())


OURS_AND_THEIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "repetition": ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
    "bias": ({"logit_bias": {9: 3.0, 40: -2.5}}, {"sequence_bias": {(9,): 3.0, (40,): -2.5}}),
    "bad words": ({"bad_words": ((2,), (8, 1))}, {"bad_words_ids": [[2], [8, 1]]}),
}
for first, second in combinations(list(OURS_AND_THEIRS), 2):
    pairs = zip(OURS_AND_THEIRS[first], OURS_AND_THEIRS[second], strict=True)
    OURS_AND_THEIRS[f"{first} and {second}"] = tuple(one | other for one, other in pairs)  # type: ignore[assignment]


def test_biases_come_before_the_repetition_penalty():
    """For a text that contains token 0, the logits equal those of transformers' processors bit for bit."""
    text, logits = [0], torch.tensor([[1.0, 3.0, 0.0, -1.0]])
    processors = LogitsProcessorList(
        [SequenceBiasLogitsProcessor({(0,): 3.0, (1,): -4.0}), RepetitionPenaltyLogitsProcessor(2.0)]
    )
    expected = processors(torch.tensor([text]), logits.clone())
    assert expected.tolist() == [[2.0, -1.0, 0.0, -1.0]]
    params = SamplingParams(repetition_penalty=2.0, logit_bias={0: 3.0, 1: -4.0})
    rows = [Sequence(0, 0, text, 8, frozenset())]
    assert torch.equal(shaped(logits[:, None], params, rows)[:, 0], expected)
    assert torch.equal(shaped_next(logits, params, rows, []), expected)


@pytest.mark.parametrize("method", ["regular", "speculative", "bass", "amusd", "tree"])
@pytest.mark.parametrize("name", OURS_AND_THEIRS)
def test_greedy_text_equals_transformers_generate(name: str, method: str):
    ours, theirs = OURS_AND_THEIRS[name]
    rows = prompts(3)
    expected = [transformers_text(row, **theirs) for row in rows]
    assert expected != [transformers_text(row) for row in rows]
    options: Any = (
        {"method": "bass", "tree": (2, 2)} if method == "tree" else {"method": method, "draft_length": 4}
    )
    written = generate(
        PAIR, rows, sampling=SamplingParams(**ours), max_new_tokens=NEW_TOKENS, eos_token_id=None, **options
    )
    assert texts_of(written) == expected


def test_only_the_bad_words_are_forbidden():
    row = prompts(1)[0]
    unrestricted = transformers_text(row)
    pair, single = tuple(unrestricted[3:5]), unrestricted[8]
    expected = transformers_text(row, bad_words_ids=[list(pair), [single]])
    assert expected != unrestricted
    for method in ("regular", "bass"):
        sampling = SamplingParams(bad_words=(pair, (single,)))
        options: Any = {"max_new_tokens": NEW_TOKENS, "eos_token_id": None, "draft_length": 4, "method": method}
        assert generate(PAIR, [row], sampling=sampling, **options).sequences[0].token_ids == expected


def test_a_bad_word_may_be_a_text():
    row = prompts(1)[0]
    options: Any = {"max_new_tokens": NEW_TOKENS, "eos_token_id": None}
    word = (generate(PAIR, [row], **options).sequences[0].text or "")[4:6]
    barred = generate(PAIR, [row], sampling=SamplingParams(bad_words=(word,)), **options).sequences[0].text
    assert barred is not None and word not in barred


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_of_the_target_itself_are_all_accepted(temperature: float):
    pair = ModelPair(TARGET, TARGET)
    sampling = SamplingParams(
        temperature, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, min_p=0.02
    )
    output = generate(
        pair,
        prompts(3),
        sampling=sampling,
        draft_length=4,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=None,
        method="bass",
    )
    assert output.metrics.acceptance_rate == 1


def test_coupled_lanes_write_the_same_text():
    sampling = SamplingParams(0.9, repetition_penalty=1.3, frequency_penalty=0.4, min_p=0.05)
    options: Any = {"max_new_tokens": NEW_TOKENS, "eos_token_id": None, "verification": "coupled"}
    snapshot = list(race(PAIR, prompts(2), sampling=sampling, **options))[-1]
    assert snapshot["comparison"] and not any(any(rows) for rows in snapshot["comparison"].values())


def test_penalties_count_the_text_and_the_drafts_that_lead_to_a_token():
    row = Sequence(0, 0, [1, 2], 9, frozenset())
    row.write([2, 3], ["sampled"] * 2)
    logits = torch.zeros(1, 4, 6)
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=0.5)
    # A tree: 3 and 4 follow the newest token, and 5 follows 4.
    penalties = -shaped(logits, params, [row], torch.tensor([[3, 4, 5]]), [[-1, -1, 1]])[0]
    assert penalties.tolist() == [
        [0, 0, 1.5, 1.5, 0, 0],
        [0, 0, 1.5, 2.0, 0, 0],
        [0, 0, 1.5, 1.5, 1.5, 0],
        [0, 0, 1.5, 1.5, 1.5, 1.5],
    ]
    assert not logits.any()


@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("drawn", [0, 1, 4])
def test_shaped_next_computes_only_the_last_of_all_logits(
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
    expected = shaped(logits[:, None].expand(-1, drawn + 1, -1), params, rows, drafts)[:, -1]
    seen: list[int] = []
    owner: Any = shaping.Shaper if accelerator else shaping
    name = "_penalised" if accelerator else "_penalise"
    penalised = getattr(owner, name)
    shapes = (lambda _, x, *rest: x.shape[1]) if accelerator else (lambda x, *rest: x.shape[1])
    monkeypatch.setattr(owner, name, lambda *args: seen.append(shapes(*args)) or penalised(*args))
    assert torch.equal(shaped_next(logits, params, rows, list(drafts.unbind(1))), expected)
    assert seen == [1] and expected.isinf().any()


@pytest.mark.parametrize("parents", [None, [[-1, -1, 1], [-1, 0, 1], [-1, 0, 0]]])
def test_an_accelerators_logits_equal_the_hosts(parents: Any, monkeypatch: pytest.MonkeyPatch):
    """The logits are equal bit for bit, although the host changes only those of tokens in the texts and drafts."""
    torch.manual_seed(0)
    params = SamplingParams(
        repetition_penalty=0.7, presence_penalty=-1.1, frequency_penalty=0.3, logit_bias={3: 1.5, 7: -math.inf},
        bad_words=((9,), (21, 8), (4, 5, 6), (30, 31, 32, 33), (21, 30)),
    )  # fmt: skip
    rows = [Sequence(r, r, torch.randint(0, 50, (5 * r + 1,)).tolist(), 99, frozenset()) for r in range(3)]
    for row in rows:
        row.write(torch.randint(0, 50, (7,)).tolist(), ["sampled"] * 7)
    rows[0].write([30], ["sampled"])
    rows[1].write([4], ["sampled"])
    rows[2].write([30, 31], ["sampled"] * 2)
    drafts = torch.tensor([[31, 32, 33], [5, 21, 5], [32, 21, 4]])
    args: Any = (torch.randn(3, 4, 50) * 3, params, rows, drafts, parents)
    ours = shaped(*args)
    # More than the bias and the word of one token are forbidden.
    assert (ours.isinf().sum((1, 2)) > 2 * ours.shape[1]).any()
    monkeypatch.setattr(shaping, "is_accelerator", lambda device: True)
    assert torch.equal(ours, shaped(*args)) and not torch.equal(ours, args[0])


def test_a_bias_and_a_bad_word_may_name_one_token():
    row = Sequence(0, 0, [1, 2], 9, frozenset())
    params = SamplingParams(logit_bias={0: 1.0, 1: 2.0, 2: -math.inf}, bad_words=((1,),))
    assert shaped(torch.zeros(1, 1, 4), params, [row]).tolist() == [[[1.0, -math.inf, -math.inf, 0.0]]]


def test_min_p_is_relative_to_the_most_likely_token():
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


@pytest.mark.parametrize("number", [1e-40, 1e39, 10**400], ids=["tiny", "large", "whole"])
def test_numbers_that_float32_cannot_represent_are_refused(number: float):
    options: list[dict[str, Any]] = [{"repetition_penalty": number}, {"temperature": 10**400}]
    if number > 1:
        options += [{name: -number} for name in ("presence_penalty", "frequency_penalty")]
        options += [{"logit_bias": {5: number}}, {"logit_bias": {5: -number}}]
    for option in options:
        with pytest.raises(RequestError, match=f"^{next(iter(option))} must be "):
            SamplingParams(**option)


@pytest.mark.parametrize("message", BAD)
def test_invalid_parameters_are_refused(message: str):
    with pytest.raises(RequestError, match=message):
        SamplingParams(1.0, **BAD[message])


def test_parameters_that_the_pair_or_method_cannot_use_are_refused():
    for sampling in (SamplingParams(logit_bias={96: 1.0}), SamplingParams(bad_words=([5, 96],))):
        with pytest.raises(RequestError, match="ids from 0 to 95; got 96"):
            generate(PAIR, [5, 6], sampling=sampling)
    biases = {token: -math.inf for token in range(2, 96)}
    with pytest.raises(RequestError, match="forbid every token of the model: allow at least one"):
        generate(PAIR, [5, 6], sampling=SamplingParams(logit_bias=biases, bad_words=([0], [1])))
    generate(PAIR, [5, 6], max_new_tokens=2, sampling=SamplingParams(logit_bias=biases, bad_words=([0],)))
    with pytest.raises(RequestError, match="bad_words given as texts need a tokenizer"):
        generate(ModelPair(TARGET), [5, 6], sampling=SamplingParams(bad_words=("a",)))
    with pytest.raises(RequestError, match=r"can't read the bad word '\\ud800' \(TypeError\): correct it"):
        generate(PAIR, [5, 6], sampling=SamplingParams(bad_words=("\ud800",)))
    with pytest.raises(RequestError, match="would penalise the padding"):
        generate(PAIR, [5, 6], method="transformers", sampling=SamplingParams(repetition_penalty=1.2))
