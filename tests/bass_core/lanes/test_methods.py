"""A new decoder takes one file and one line in the table, and then works like any other method.

Contract: the toy decoder is greedy and feeds the whole text again for every token, without a cache or a batch; it
appears wherever methods are listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bass_core import (  # fmt: skip
    DEFAULT_LANES,
    METHODS,
    Method,
    ModelPair,
    RequestError,
    generate,
    race,
    register,
    stream,
    unregister,
)
from bass_core.decode.request import Request
from bass_core.lanes.lane import Lane
from bass_core.lanes.methods import find_method
from bass_core.sequence import Round, RowRound, Sequence

from ...conformance import table
from ...models import prompts, reference, tiny

TARGET = tiny("llama")
PAIR = ModelPair(TARGET, TARGET)


class Slow:
    """The members a lane needs of a decoder, and no others."""

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


def refuse_heat(pair: ModelPair, request: Request) -> None:
    if not request.sampling.greedy:
        raise RequestError('method="slow" is greedy: leave sampling out.')


SLOW = Method("slow", "Slow", "Reads the whole text for every token.", Slow, drafts=False, check=refuse_heat)


@pytest.fixture
def toy() -> Iterator[Method]:
    register(SLOW)
    yield SLOW
    unregister("slow")


def test_the_toy_answers_and_races(toy: Method) -> None:
    rows = prompts(3)
    texts = [reference(TARGET, row, 8) for row in rows]
    out = generate(PAIR, rows, method="slow", max_new_tokens=8)
    assert [sequence.token_ids for sequence in out.sequences] == texts
    assert out.metrics.target_forwards == 8 and out.metrics.ms_per_token
    *_, last = race(PAIR, rows, lanes=("regular", "slow"), max_new_tokens=8)
    lane = last["lanes"]["slow"]
    assert lane["error"] is None and [s["token_ids"] for s in lane["sequences"]] == texts
    assert lane["metrics"]["speedup"] and last["comparison"]["slow"] == [None] * 3


def test_the_toy_refuses_what_it_cannot_do(toy: Method) -> None:
    warm: Any = table.SAMPLING["coupled"]
    for ask in (
        lambda: generate(PAIR, [1], method="slow", sampling=warm),
        lambda: race(PAIR, [1], lanes=["slow"], sampling=warm),
    ):
        with pytest.raises(RequestError, match="is greedy"):
            ask()


def test_the_toy_is_run_by_the_conformance_suite(toy: Method) -> None:
    cases = [case for case in table.covering(2) if case.method == "slow"]
    assert {case.architecture for case in cases} == set(table.BUILDERS)
    assert {case.text for case in cases} == {"greedy"}
    for case in cases[:4]:
        assert [s.token_ids for s in case.run().sequences] == case.expected(), str(case)


def test_the_table(toy: Method) -> None:
    assert list(METHODS) == ["regular", "speculative", "bass", "amusd", "transformers", "slow"]
    assert set(DEFAULT_LANES) <= set(METHODS)
    assert [name for name, method in METHODS.items() if method.reference] == ["regular"]
    with pytest.raises(ValueError, match="registered already"):
        register(SLOW)
    with pytest.raises(
        RequestError, match="method must be one of regular, speculative, bass, amusd, transformers, slow; got"
    ):
        find_method("slower")


def test_what_was_taken_out_is_unknown() -> None:
    with pytest.raises(
        RequestError, match="method must be one of regular, speculative, bass, amusd, transformers; got 'slow'"
    ):
        generate(PAIR, [1], method="slow")


def test_a_stream_that_is_closed_ends_its_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(Lane, "end", lambda lane, reason: ended.append(reason))
    rounds: Any = stream(PAIR, [1, 2], method="regular", max_new_tokens=8)
    next(rounds)
    rounds.close()
    assert ended == ["stopped"]
