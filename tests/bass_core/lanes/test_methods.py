"""A new decoder takes one file and one line in the table, and then works like any other method.

The toy decoder is greedy and reads the whole text again for every token, without a cache or a batch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields
from typing import Any, get_type_hints

import pytest
import torch

import bass_core
from bass_core import (  # fmt: skip
    DEFAULT_LANES,
    METHODS,
    Method,
    ModelPair,
    Options,
    RequestError,
    SamplingParams,
    generate,
    race,
    register,
    stream,
    unregister,
)
from bass_core.decode.request import Request, make_request
from bass_core.lanes.lane import Lane
from bass_core.options import Keywords
from bass_core.sequence import Round, RowRound, Sequence
from tests.support.models import byte_tokenizer, prompts, reference, texts_of, tiny, tiny_pair

from ...conformance import table

PAIR = tiny_pair("self")
TARGET = PAIR.target


class Slow:
    """Has only the members that a lane needs of a decoder."""

    timeline = None

    def __init__(self, pair: ModelPair, request: Request, sequences: list[Sequence]) -> None:
        self.target, self.sequences, self.target_forwards = pair.target, sequences, 0

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason for sequence in self.sequences)

    def prepare(self) -> None: ...

    def pause(self) -> None: ...

    def close(self) -> None: ...

    @torch.inference_mode()
    def step(self) -> Round:
        kind, rows = "plain" if self.target_forwards else "prefill", []
        for sequence in self.sequences:
            if not sequence.finish_reason:
                token = int(self.target(torch.tensor([sequence.tokens])).logits[0, -1].argmax())
                sequence.write([token], ["sampled"])
                rows.append(
                    RowRound(sequence.index, [], [], [], [], 0, [token], ["sampled"], sequence.finish_reason)
                )
        self.target_forwards += 1
        return Round(kind, rows=rows)


def refuse_sampling(pair: ModelPair, request: Request) -> None:
    if not request.sampling.greedy:
        raise RequestError('method="slow" is greedy: leave sampling out.')


SLOW = Method("slow", "Slow", "Reads the whole text for every token.", Slow, drafts=False, check=refuse_sampling)


@pytest.fixture
def toy() -> Iterator[Method]:
    register(SLOW)
    yield SLOW
    unregister("slow")


def test_the_toy_generates_and_races(toy: Method) -> None:
    rows = prompts(3)
    texts = [reference(TARGET, row, 8) for row in rows]
    out = generate(PAIR, rows, method="slow", max_new_tokens=8)
    assert texts_of(out) == texts
    assert out.metrics.target_forwards == 8 and out.metrics.ms_per_token
    *_, last = race(PAIR, rows, lanes=("regular", "slow"), max_new_tokens=8)
    lane = last["lanes"]["slow"]
    assert lane["error"] is None and [s["token_ids"] for s in lane["sequences"]] == texts
    assert lane["metrics"]["speedup"] and last["comparison"]["slow"] == [None] * 3


def test_the_toy_refuses_sampling(toy: Method) -> None:
    sampling: Any = table.SAMPLING["coupled"]
    for call in (
        lambda: generate(PAIR, [1], method="slow", sampling=sampling),
        lambda: race(PAIR, [1], lanes=["slow"], sampling=sampling),
    ):
        with pytest.raises(RequestError, match="is greedy"):
            call()


@pytest.mark.slow
def test_the_conformance_suite_runs_the_toy(toy: Method) -> None:
    cases = [case for case in table.covering(2) if case.method == "slow"]
    assert {case.architecture for case in cases} == set(table.BUILDERS)
    assert {case.text for case in cases} == {"greedy"}
    for case in cases[:4]:
        assert texts_of(case.run()) == case.expected(), str(case)


def test_methods_have_unique_names_in_order(toy: Method) -> None:
    assert list(METHODS) == ["regular", "speculative", "bass", "amusd", "transformers", "slow"]
    assert set(DEFAULT_LANES) <= set(METHODS)
    assert [name for name, method in METHODS.items() if method.reference] == ["regular"]
    with pytest.raises(ValueError, match="registered already"):
        register(SLOW)
    unregister("slow")
    with pytest.raises(RequestError, match="one of regular, speculative, bass, amusd, transformers; got 'slow'"):
        generate(PAIR, [1], method="slow")
    register(SLOW)


def test_closing_a_stream_ends_its_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(Lane, "end", lambda lane, reason: ended.append(reason))
    rounds: Any = stream(PAIR, [1, 2], method="regular", max_new_tokens=8)
    next(rounds)
    rounds.close()
    assert ended == ["stopped"]


NAMED = ModelPair(TARGET, tiny("llama", seed=1, layers=1), byte_tokenizer(), name="tiny")
OTHER_PARAMETERS = {"generate": {"method"}, "stream": {"method"}, "race": {"lanes", "scheduling", "stopped"}}


@pytest.mark.parametrize("function", [generate, stream, race, make_request])
def test_every_keyword_is_listed_and_has_one_default(function: Any) -> None:
    """Signatures list the fields of Options with their defaults, for editors and help()."""
    listed = inspect.signature(function).parameters
    others = {"pair", "prompt", "options"} | OTHER_PARAMETERS.get(function.__name__, set())
    options = {name: entry for name, entry in listed.items() if name not in others}
    assert {name: entry.default for name, entry in options.items()} == {
        entry.name: entry.default for entry in fields(Options)
    }
    assert all(
        entry.kind is entry.KEYWORD_ONLY and entry.annotation is not entry.empty for entry in options.values()
    )
    assert others <= set(listed)


def test_options_are_frozen_and_documented() -> None:
    """Type checkers see the same names and types as keywords; the docstring explains each in order."""
    assert get_type_hints(Keywords) == get_type_hints(Options)
    assert re.findall(r"^    (\w+): ", inspect.getdoc(Options) or "", re.MULTILINE) == [
        field.name for field in fields(Options)
    ]
    with pytest.raises(FrozenInstanceError):
        Options().n = 2  # type: ignore[misc]


def test_options_may_be_given_as_one_object() -> None:
    options = Options(n=2, max_new_tokens=3, sampling=SamplingParams(0.7), draft_length=1, seed=4)
    out = generate(NAMED, "abc", method="speculative", options=options)
    *_, last = race(NAMED, "abc", lanes=["speculative"], options=options)
    streamed = [row.tokens for round_ in stream(NAMED, "abc", options=options) for row in round_.rows]
    from_keywords = generate(NAMED, "abc", method="speculative", **vars(options))
    texts = texts_of(from_keywords)
    assert texts_of(out) == texts
    assert [s["token_ids"] for s in last["lanes"]["speculative"]["sequences"]] == texts
    assert sum(map(len, streamed)) == 6


def test_mixed_options_and_unknown_keywords_are_refused() -> None:
    for function in (generate, stream, race):
        refused: list[tuple[dict[str, Any], str]] = [
            ({"options": Options(), "seed": 1}, "seed was given together with options: put it into Options(...)."),
            ({"options": 3}, "options must be an Options, or None; got 3."),
            ({"max_token": 1}, f"{function.__name__} has no argument max_token: did you mean max_new_tokens?"),
            ({"zzz": 1}, f"{function.__name__} has no argument zzz: choose from "),
            *(
                ({name: 1}, f"use sampling=SamplingParams({name}=...).")
                for name in ("temperature", "top_k", "top_p")
            ),
        ]
        for arguments, message in refused:
            with pytest.raises(RequestError, match=re.escape(message)):
                function(NAMED, [1, 2], **arguments)


def test_short_reprs() -> None:
    out = generate(NAMED, "abc", n=2, max_new_tokens=200, eos_token_id=None)
    assert repr(NAMED).startswith("ModelPair(tiny: LlamaForCausalLM, draft LlamaForCausalLM, float32, cpu")
    assert re.fullmatch(r"Generation\(bass, 400 tokens in 2 rows, [\d.]+ ms per token\)", repr(out))
    assert repr(out.sequences[0]).startswith("GeneratedSequence(200 tokens, length, ")
    assert len(repr(out.sequences[0])) < 120
    assert bass_core.__version__.count(".") == 2
