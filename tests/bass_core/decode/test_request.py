"""Bad input is refused with a one-sentence RequestError before a model runs or memory is allocated.

tests/faults/test_bad_values.py tests numbers out of range, test_admission.py tests memory.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bass_core import (
    DEFAULT_LANES,
    METHODS,
    BassError,
    ModelPair,
    RequestError,
    generate,
    race,
    stream,
)
from bass_core.decode.admission import admit
from bass_core.decode.request import make_request
from bass_core.draft.base import wrap_user_drafter
from bass_core.draft.registry import DRAFTERS, DrafterKind
from bass_core.length.policies import FixedLength
from tests.support.models import VOCAB, tiny

PAIR = ModelPair(tiny("llama"), tiny("llama", seed=1, layers=1))
TARGET_ONLY = ModelPair(tiny("gpt2", layers=1))
PROMPT = [5, 6, 7]
ENDLESS = SimpleNamespace(length=3, limit="8", update=print)


@pytest.fixture(autouse=True)
def no_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if a model runs or a cache is allocated."""

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a model ran before the request was checked")

    for step in (PAIR.target_step, PAIR.draft_step, TARGET_ONLY.target_step):
        monkeypatch.setattr(step, "forward", forbidden)
        monkeypatch.setattr(step, "new_cache", forbidden)


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no tokens": ([], {}, "empty"),
    "no text": ("", {}, "empty"),
    "blank text": (" \n", {}, "empty"),
    "an empty row": ([PROMPT, []], {}, "empty"),
    "text without a tokenizer": ("hello", {}, "no tokenizer"),
    "no prompt at all": (None, {}, "prompt"),
    "a tensor": (torch.tensor(PROMPT), {}, "prompt"),
    "tokens that are not ids": ([1.5, 2.0], {}, "token ids"),
    "booleans": ([True, False], {}, "token ids"),
    "as long as the context": ([1] * 512, {}, "512"),
    "longer than the context": ([PROMPT, [1] * 600], {}, "600"),
    "an id below 0": ([3, -1], {}, "-1"),
    "an id past the vocabulary": ([3, VOCAB], {}, str(VOCAB)),
    "n unlike the number of prompts": ([PROMPT, PROMPT], {"n": 3}, "3"),
    "a number as sampling": (PROMPT, {"sampling": 0.7}, "SamplingParams"),
    "unknown drafter": (PROMPT, {"drafter": "oracle"}, "oracle"),
    "drafter without methods": (PROMPT, {"drafter": object()}, "drafter"),
    "unknown attention": (PROMPT, {"attention": "flashy"}, "flashy"),
    "unknown verification": (PROMPT, {"verification": "hope"}, "hope"),
    "an incomplete policy": (PROMPT, {"draft_length": SimpleNamespace(length=3)}, "draft_length"),
    "a policy with a limit that is not a number": (PROMPT, {"draft_length": ENDLESS}, "limit"),
    "ids of too few rows": ([PROMPT, PROMPT], {"sequence_ids": [0]}, "sequence_ids"),
    "an id in place of a list": (PROMPT, {"sequence_ids": 5}, "sequence_ids"),
    "an id that is not a number": (PROMPT, {"sequence_ids": ["a"]}, "sequence id"),
    "a word as end of text": (PROMPT, {"eos_token_id": "</s>"}, "eos_token_id"),
    "words as ends of text": (PROMPT, {"eos_token_id": ["a"]}, "eos_token_id"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_sentence(case: str) -> None:
    prompt, arguments, named = BAD[case]
    messages = set()
    for call in (generate, stream, race):
        with pytest.raises(RequestError) as refusal:
            call(PAIR, prompt, **arguments)
        messages.add(str(refusal.value))
    (message,) = messages
    assert named in message
    assert message.endswith(".") and "\n" not in message
    assert isinstance(refusal.value, BassError) and isinstance(refusal.value, ValueError)


@pytest.mark.parametrize("option", ["auto", "bass", "cost-aware", 0, 5, FixedLength(3)], ids=str)
def test_checking_and_admitting_a_request_run_no_model(
    option: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Checking and admitting also measure no costs, although none are stored.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("BASS_MEASURE")
    request = make_request(PAIR, PROMPT, n=4, draft_length=option)
    admit(PAIR, request, [METHODS[name] for name in DEFAULT_LANES])
    race(PAIR, PROMPT, n=4, draft_length=option).close()
    assert not list(tmp_path.iterdir())
    longest = {"auto": 32, "bass": 32, "cost-aware": 16}.get(str(option), getattr(option, "limit", option))
    assert request.draft_length is option and request.longest_draft == longest


class Reader:
    """A user's drafter without `reads_others`."""

    def propose(self, *_: Any) -> Any:
        raise AssertionError("nothing runs here")


@pytest.mark.parametrize("drafter", ["reader", Reader()], ids=["by name", "a user's"])
def test_equal_sequence_ids_are_refused_if_the_drafter_reads_other_rows(
    drafter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = DrafterKind("reads other rows", lambda parts: wrap_user_drafter(Reader()), reads_others=True)
    monkeypatch.setitem(DRAFTERS, "reader", kind)
    equal_ids = {"n": 2, "sequence_ids": [7, 7]}
    with pytest.raises(RequestError, match=r"sequence_ids must differ .*\[7, 7\]"):
        make_request(PAIR, PROMPT, drafter=drafter, **equal_ids)
    assert make_request(PAIR, PROMPT, drafter=drafter, n=2, sequence_ids=[7, 8]).sequence_ids == [7, 8]
    independent = Reader()
    independent.reads_others = False  # type: ignore[attr-defined]
    for harmless in ("model", "prompt_lookup", independent):
        assert make_request(PAIR, PROMPT, drafter=harmless, **equal_ids).sequence_ids == [7, 7]


def test_an_unknown_method_lane_or_scheduling_is_refused() -> None:
    with pytest.raises(RequestError, match="guess"):
        generate(PAIR, PROMPT, method="guess")
    with pytest.raises(RequestError, match="guess"):
        stream(PAIR, PROMPT, method="guess")
    for lanes in ((), ("bass", "bass"), "bass", ("bass", "guess")):
        with pytest.raises(RequestError):
            race(PAIR, PROMPT, lanes=lanes)
    with pytest.raises(RequestError, match="slowly"):
        race(PAIR, PROMPT, scheduling="slowly")


def test_the_model_drafter_needs_a_draft_model() -> None:
    with pytest.raises(RequestError, match="no draft model"):
        generate(TARGET_ONLY, PROMPT, drafter="model")
    assert make_request(TARGET_ONLY, PROMPT).drafter == "prompt_lookup"
    assert make_request(PAIR, PROMPT).drafter == "model"
