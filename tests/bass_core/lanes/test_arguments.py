"""The keyword arguments of `generate`, `stream` and `race`, and the errors for anything else."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

import bass_core
from bass_core import ModelPair, RequestError, SamplingParams, generate, race, stream
from bass_core.decoding.request import make_request

from ...models import byte_tokenizer, tiny

PAIR = ModelPair(tiny("llama"), tiny("llama", seed=1, layers=1), byte_tokenizer(), name="tiny")
OWN = {"generate": {"method"}, "stream": {"method"}, "race": {"lanes", "scheduling", "stopped"}}


@pytest.mark.parametrize("function", [generate, stream, race])
def test_every_keyword_is_listed_and_has_one_default(function: Any) -> None:
    """The signature lists the request's arguments with its defaults, as editors and help() show them."""
    mine, request = (
        {
            name: one
            for name, one in inspect.signature(which).parameters.items()
            if one.kind is one.KEYWORD_ONLY and name not in OWN.get(which.__name__, set())
        }
        for which in (function, make_request)
    )
    assert {name: one.default for name, one in mine.items()} == {n: one.default for n, one in request.items()}
    assert all(one.annotation is not one.empty for one in mine.values())
    assert OWN[function.__name__] <= set(inspect.signature(function).parameters)


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
    assert repr(PAIR) == "ModelPair(tiny: LlamaForCausalLM, draft LlamaForCausalLM, float32, cpu)"
    assert re.fullmatch(r"Generation\(bass, 400 tokens in 2 rows, [\d.]+ ms per token\)", repr(out))
    assert repr(out.sequences[0]).startswith("GeneratedSequence(200 tokens, length, ")
    assert len(repr(out.sequences[0])) < 120
    assert bass_core.__version__.count(".") == 2
