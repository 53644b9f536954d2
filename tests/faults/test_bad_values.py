"""A bad value is refused in one sentence that names it, at every door: the library, the command and the page.

BAD is the one table of bad values. What only one door takes is tested there: prompts, policies and drafters in
bass_core/decode/test_request.py, models and ports in test_options.py, clocks and sweeps in ui/test_request.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from bass_core import BassError, RequestError, SamplingParams, generate, race, stream
from bass_core.__main__ import main
from tests.support.models import tiny_pair
from tests.test_options import given, no_model, refusal  # noqa: F401
from ui.page.limits import Limits
from ui.page.request import make_request

PAIR = tiny_pair("random")
HUGE = "9" * 5000
NUMBER = ("", "x", math.nan)
WHOLE = (*NUMBER, HUGE, 1.5, -1)


@dataclass(frozen=True)
class Setting:
    """A setting's bad values, and what each door calls it.

    Attributes:
        values: Refused at every door; at the command as text.
        option: The command's option, or None if it has none.
        field: The page's field.
        words: How the page's sentences name it.
        sampled: Whether it is a field of SamplingParams.
        library: Values that are bad for the library and for the command, not for the page.
        page: Values that are bad for the page only.
    """

    values: tuple[Any, ...]
    option: str | None
    field: str
    words: str
    sampled: bool = False
    library: tuple[Any, ...] = ()
    page: tuple[Any, ...] = ()


BAD = {
    "n": Setting((*WHOLE, 0, 2**20 + 1, 10**400, True), "-n", "batch_size", "Batch size", library=(2.0,),
                 page=(None, "4", 9)),
    "max_new_tokens": Setting((*WHOLE, 0), "--max-new-tokens", "max_new_tokens", "Max new tokens", page=(1025,)),
    "temperature": Setting((*NUMBER, HUGE, -0.1, math.inf, None, True), "--temperature", "temperature",
                           "Temperature", sampled=True),
    "top_k": Setting(WHOLE, "--top-k", "top_k", "Top-k", sampled=True, library=(2.0,)),
    "top_p": Setting((*NUMBER, 0, -1, 1.1, math.inf), "--top-p", "top_p", "Top-p", sampled=True),
    "min_p": Setting((*NUMBER, 2, -0.1), None, "min_p", "Min-p", sampled=True),
    "repetition_penalty": Setting((*NUMBER, 0, 1001), None, "repetition_penalty", "Repetition penalty",
                                  sampled=True),
    "seed": Setting((*WHOLE, 2**63), "--seed", "seed", "Seed"),
    "draft_length": Setting((1.5, -1, 1025, HUGE), "--draft-length", "draft_length", "draft length",
                            library=("", "long", "\u00b2", math.nan), page=(17, "0")),
    "time_budget_ms": Setting((0, math.inf, math.nan, True), None, "time_budget_ms", "time budget"),
    "synthetic_acceptance": Setting((1.5, math.nan, 10**400, True), None, "acceptance", "Acceptance",
                                    page=("often",)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model or a cache that is reached fails the test."""
    for step in (PAIR.target_step, PAIR.draft_step):
        for name in ("forward", "new_cache"):
            monkeypatch.setattr(step, name, lambda *_, **__: pytest.fail("a model ran before the check"))


def by_library(name: str, setting: Setting, value: Any) -> Iterator[str]:
    """Three calls refuse alike, when they are called."""
    messages = set()
    for call in (generate, stream, race):
        with pytest.raises(RequestError) as refused:
            call(
                PAIR,
                [5, 6, 7],
                **({"sampling": SamplingParams(**{name: value})} if setting.sampled else {name: value}),
            )
        assert isinstance(refused.value, BassError) and isinstance(refused.value, ValueError)
        messages.add(str(refused.value))
    (message,) = messages
    assert name in message
    yield message


def by_command(setting: Setting, value: Any, capsys: pytest.CaptureFixture[str]) -> Iterator[str]:
    for command in ("generate", "race"):
        yield refusal(capsys, main, command, "Hello", given(str(setting.option), str(value)))


def by_page(setting: Setting, value: Any) -> Iterator[str]:
    with pytest.raises(RequestError) as refused:
        make_request({"prompt": "Hello", setting.field: value}, Limits(max_batch=8))
    assert setting.words.lower() in str(refused.value).lower()
    yield str(refused.value)


DOORS: dict[str, Callable[[Setting], tuple[Any, ...]]] = {
    "library": lambda setting: setting.values + setting.library,
    "command": lambda setting: setting.values + setting.library if setting.option else (),
    "page": lambda setting: setting.values + setting.page,
}


@pytest.mark.parametrize(
    ("door", "name"), [(door, name) for door, some in DOORS.items() for name in BAD if some(BAD[name])]
)
def test_a_bad_value_is_one_sentence(door: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    setting = BAD[name]
    for value in DOORS[door](setting):
        if door == "library":
            messages = by_library(name, setting, value)
        elif door == "command":
            messages = by_command(setting, value, capsys)
        else:
            messages = by_page(setting, value)
        for message in messages:
            assert message.endswith(".") and "\n" not in message, value
