"""The keyword arguments of `generate`, `stream` and `race`, and the errors for anything else."""

from __future__ import annotations

import inspect
import re
from dataclasses import FrozenInstanceError, fields
from typing import Any, get_type_hints

import pytest

import bass_core
from bass_core import ModelPair, Options, RequestError, SamplingParams, generate, race, stream
from bass_core.decode.request import make_request
from bass_core.options import Keywords

from ...models import byte_tokenizer, tiny

PAIR = ModelPair(tiny("llama"), tiny("llama", seed=1, layers=1), byte_tokenizer(), name="tiny")
OWN = {"generate": {"method"}, "stream": {"method"}, "race": {"lanes", "scheduling", "stopped"}}


@pytest.mark.parametrize("function", [generate, stream, race, make_request])
def test_every_keyword_is_listed_and_has_one_default(function: Any) -> None:
    """The signature lists the fields of Options with their defaults, as editors and help() show them."""
    listed = inspect.signature(function).parameters
    own = {"pair", "prompt", "options"} | OWN.get(function.__name__, set())
    mine = {name: one for name, one in listed.items() if name not in own}
    assert {name: one.default for name, one in mine.items()} == {one.name: one.default for one in fields(Options)}
    assert all(one.kind is one.KEYWORD_ONLY and one.annotation is not one.empty for one in mine.values())
    assert own <= set(listed)


def test_options_are_frozen_and_explained() -> None:
    """Type checkers see the same names and types as keywords; the docstring explains each, in order."""
    assert get_type_hints(Keywords) == get_type_hints(Options)
    assert re.findall(r"^    (\w+): ", Options.__doc__ or "", re.MULTILINE) == [
        one.name for one in fields(Options)
    ]
    with pytest.raises(FrozenInstanceError):
        Options().n = 2  # type: ignore[misc]


def test_options_may_be_given_as_one_object() -> None:
    options = Options(n=2, max_new_tokens=3, sampling=SamplingParams(0.7), draft_length=1, seed=4)
    out = generate(PAIR, "abc", method="speculative", options=options)
    *_, last = race(PAIR, "abc", lanes=["speculative"], options=options)
    streamed = [row.tokens for round_ in stream(PAIR, "abc", options=options) for row in round_.rows]
    same = generate(PAIR, "abc", method="speculative", **vars(options))
    texts = [sequence.token_ids for sequence in same.sequences]
    assert [sequence.token_ids for sequence in out.sequences] == texts
    assert [s["token_ids"] for s in last["lanes"]["speculative"]["sequences"]] == texts
    assert sum(map(len, streamed)) == 6


@pytest.mark.parametrize("function", [generate, stream, race])
def test_options_are_given_in_one_way(function: Any) -> None:
    with pytest.raises(RequestError, match=r"^seed was given beside options: put it into Options\(\.\.\.\)\.$"):
        function(PAIR, [1, 2], options=Options(), seed=1)
    with pytest.raises(RequestError, match=r"^options must be an Options, or None; got 3\.$"):
        function(PAIR, [1, 2], options=3)


@pytest.mark.parametrize("function", [generate, stream, race])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("max_token", "did you mean max_new_tokens?"),
        ("draftlength", "did you mean draft_length?"),
        ("temperature", "use sampling=SamplingParams(temperature=...)."),
        ("top_k", "use sampling=SamplingParams(top_k=...)."),
        ("top_p", "use sampling=SamplingParams(top_p=...)."),
        ("zzz", "choose from "),
    ],
)
def test_an_unknown_keyword_is_refused_in_one_sentence(function: Any, name: str, says: str) -> None:
    sentence = f"{function.__name__} has no argument {name}: {says}"
    with pytest.raises(RequestError, match=re.escape(sentence)):
        function(PAIR, [1, 2], **{name: 1})


def test_all_keywords_arrive() -> None:
    """None is lost on the way; what each does is tested elsewhere."""
    given: dict[str, Any] = {
        "n": 2, "max_new_tokens": 3, "sampling": SamplingParams(0.7), "draft_length": 1, "drafter": "model",
        "attention": "pad", "verification": "coupled", "seed": 4, "sequence_ids": [3, 4], "eos_token_id": None,
        "raw": True, "time_budget_ms": 1e9, "synthetic_acceptance": None,
    }  # fmt: skip
    out = generate(PAIR, "abc", method="speculative", **given)
    *_, last = race(PAIR, "abc", lanes=["speculative"], scheduling="in_turn", **given)
    raced = last["lanes"]["speculative"]["sequences"]
    assert [s.token_ids for s in out.sequences] == [s["token_ids"] for s in raced]
    assert [len(s.token_ids) for s in out.sequences] == [3, 3] and last["scheduling"] == "in_turn"
    rounds = stream(PAIR, "abc", method="speculative", **given)
    streamed = [token for round_ in rounds for row in round_.rows for token in row.tokens]
    assert streamed == [token for sequence in out.sequences for token in sequence.token_ids]


def test_short_reprs() -> None:
    out = generate(PAIR, "abc", n=2, max_new_tokens=200, eos_token_id=None)
    assert repr(PAIR).startswith("ModelPair(tiny: LlamaForCausalLM, draft LlamaForCausalLM, float32, cpu")
    assert re.fullmatch(r"Generation\(bass, 400 tokens in 2 rows, [\d.]+ ms per token\)", repr(out))
    assert repr(out.sequences[0]).startswith("GeneratedSequence(200 tokens, length, ")
    assert len(repr(out.sequences[0])) < 120
    assert bass_core.__version__.count(".") == 2
