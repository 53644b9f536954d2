"""The library, the command and the page refuse a bad value in one sentence that names it.

BAD is the only table of bad values. Arguments that only one of the three has are tested in other files: prompts,
policies and drafters in bass_core/decode/test_request.py, models and ports in test_options.py, clocks and sweeps
in ui/test_request.py.
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
from tests.test_options import argument, no_model, refusal  # noqa: F401
from ui.page.limits import Limits
from ui.page.request import make_request

PAIR = tiny_pair("random")
HUGE = "9" * 5000
NUMBER = ("", "x", math.nan)
WHOLE = (*NUMBER, HUGE, 1.5, -1)


@dataclass(frozen=True)
class Setting:
    """A setting's bad values, and its name at each interface.

    Attributes:
        values: Values that all three interfaces refuse. The command gets them as text.
        option: The command's option, or None if it has none.
        field: The page's field.
        words: The setting's name in the page's sentences.
        sampled: Whether it is a field of SamplingParams.
        library: More values that the library and the command refuse.
        page: More values that the page refuses.
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
    """Fail the test if it runs a model or makes a cache."""
    for step in (PAIR.target_step, PAIR.draft_step):
        for name in ("forward", "new_cache"):
            monkeypatch.setattr(step, name, lambda *_, **__: pytest.fail("a model ran before the check"))


def by_library(name: str, setting: Setting, value: Any) -> Iterator[str]:
    """Check that generate, stream and race refuse the value at once, with the same message; yield it."""
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
        yield refusal(capsys, main, command, "Hello", argument(str(setting.option), str(value)))


def by_page(setting: Setting, value: Any) -> Iterator[str]:
    with pytest.raises(RequestError) as refused:
        make_request({"prompt": "Hello", setting.field: value}, Limits(max_batch=8))
    assert setting.words.lower() in str(refused.value).lower()
    yield str(refused.value)


INTERFACES: dict[str, Callable[[Setting], tuple[Any, ...]]] = {
    "library": lambda setting: setting.values + setting.library,
    "command": lambda setting: setting.values + setting.library if setting.option else (),
    "page": lambda setting: setting.values + setting.page,
}


@pytest.mark.parametrize(
    ("interface", "name"),
    [(interface, name) for interface, values in INTERFACES.items() for name in BAD if values(BAD[name])],
)
def test_bad_values_are_refused_in_one_sentence(
    interface: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = BAD[name]
    for value in INTERFACES[interface](setting):
        if interface == "library":
            messages = by_library(name, setting, value)
        elif interface == "command":
            messages = by_command(setting, value, capsys)
        else:
            messages = by_page(setting, value)
        for message in messages:
            assert message.endswith(".") and "\n" not in message, value
