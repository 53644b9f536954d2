"""The page refuses bad input in one sentence that names the field and its range."""

from __future__ import annotations

from typing import Any

import pytest

from bass_core import RequestError
from bass_core.length.options import make_policy
from ui.page.limits import Limits
from ui.page.request import make_request

GOOD: dict[str, Any] = {
    "prompt": "Hello", "batch_size": 4, "max_new_tokens": 64, "temperature": 0.7, "seed": 0,
}  # fmt: skip


def test_good_input_is_taken_as_it_is() -> None:
    taken = make_request(GOOD, Limits())
    assert {name: getattr(taken, name) for name in GOOD} == GOOD


@pytest.mark.parametrize("text", ["\u00b2", "\u2460", "five", ""])
def test_a_length_that_is_no_decimal_number_is_a_policy_s_name(text: str) -> None:
    """For Python a superscript two is a digit, but int() refuses it. The library refuses it as an unknown name."""
    assert make_request(GOOD | {"draft_length": text}, Limits()).draft_length == text
    with pytest.raises(RequestError, match="draft_length must be"):
        make_policy(text)


def test_whole_floats_from_the_browser_become_integers() -> None:
    request = make_request(GOOD | {"batch_size": 2.0, "seed": 7.0, "temperature": 0}, Limits())
    assert (request.batch_size, request.seed, request.temperature) == (2, 7, 0.0)
    assert isinstance(request.batch_size, int)


def test_the_later_settings_have_defaults_and_a_length_may_be_text() -> None:
    request = make_request(GOOD | {"draft_length": "5", "time_budget_ms": 1500, "lanes": ["bass"]}, Limits())
    assert (request.draft_length, request.time_budget_ms, request.lanes) == (5, 1500.0, ("bass",))
    assert (request.top_k, request.top_p, request.scheduling, request.verification) == (0, 1.0, "fair", "auto")
    assert request.settings()["lanes"] == ["bass"]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("prompt", "", "prompt is empty"),
        ("prompt", " \n", "prompt is empty"),
        ("prompt", None, "prompt is empty"),
        ("prompt", "x" * 20_001, "has 20001 characters and this server takes at most 20000"),
        ("pair", 7, "The pair must be a name"),
        ("pair", "x" * 201, "The pair must be a name"),
        ("batch_size", 0, "Batch size must be a whole number from 1 to 8"),
        ("batch_size", 9, "from 1 to 8"),
        ("batch_size", 2.5, "whole number"),
        ("batch_size", None, "whole number"),
        ("batch_size", True, "whole number"),
        ("batch_size", "4", "whole number"),
        ("batch_size", 10**400, "whole number"),
        ("max_new_tokens", 0, "Max new tokens must be a whole number from 1 to 1024"),
        ("max_new_tokens", 1025, "from 1 to 1024"),
        ("temperature", float("nan"), "Temperature must be"),
        ("temperature", float("inf"), "Temperature must be"),
        ("temperature", -0.1, "Temperature must be"),
        ("temperature", None, "Temperature must be"),
        ("seed", -1, "Seed must be"),
        ("seed", 0.5, "Seed must be"),
        ("top_k", -1, "Top-k must be a whole number"),
        ("top_p", 0, "Top-p must be"),
        ("top_p", float("nan"), "Top-p must be"),
        ("draft_length", 17, "from 1 to 16"),
        ("draft_length", "0", "from 1 to 16"),
        ("draft_length", "9" * 5000, "from 1 to 16"),
        ("time_budget_ms", 0, "The time budget must be"),
        ("time_budget_ms", float("inf"), "The time budget must be"),
        ("lanes", [], "at least one lane"),
        ("lanes", "bass", "at least one lane"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(field: str, value: object, says: str) -> None:
    with pytest.raises(RequestError, match=says) as refusal:
        make_request(GOOD | {field: value}, Limits(max_batch=8))
    assert str(refusal.value).endswith(".") and "\n" not in str(refusal.value)
