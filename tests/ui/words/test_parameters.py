"""`/race` describes its parameters: label, meaning, values and bounds."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from ui.page.choices import Choices
from ui.page.events import Snapshot
from ui.page.limits import Limits
from ui.page.page import build
from ui.page.request import RaceRequest, about
from ui.page.setting import SETTINGS, Setting


def none(request: RaceRequest) -> Generator[Snapshot, None, None]:
    yield from ()


@pytest.fixture(scope="module")
def parameters() -> dict[str, dict[str, Any]]:
    """The parameters of /race, as /gradio_api/info and "Use via API" show them."""
    info = build(none, limits=Limits(max_batch=5, max_prompt=1234), about="nothing").get_api_info()
    return {one["parameter_name"]: one for one in info["named_endpoints"]["/race"]["parameters"]}


def test_each_has_a_label_and_a_description(parameters: dict[str, dict[str, Any]]) -> None:
    assert list(parameters) == list(SETTINGS)
    for name, one in parameters.items():
        words = one["python_type"]["description"]
        assert words == one["type"]["description"] and len(words) > 15 and words.endswith(".")
        assert words[0].isupper() or words[0].isdigit()
        assert one["label"] and one["label"] != "1st", name
        assert one["parameter_has_default"] and one["parameter_default"] == SETTINGS[name].default


def test_a_description_has_the_operator_s_bounds_and_the_values(parameters: dict[str, dict[str, Any]]) -> None:
    said = {name: one["python_type"]["description"] for name, one in parameters.items()}
    assert "1 to 5" in said["batch_size"] and "1,234 characters" in said["prompt"]
    assert "from 0 to 4294967295" in said["seed"]
    for setting in SETTINGS.values():
        for _, value in setting.choices(Choices()) if setting.choices else ():
            assert value.isdecimal() or repr(value) in said[setting.name], (setting.name, value)
    assert "or a whole number from 1 to 16" in said["draft_length"] and "'7'" not in said["draft_length"]


def test_a_new_setting_is_described_by_its_own_line() -> None:
    setting = Setting(
        "toy", "a", str, SETTINGS["drafter"].check, "", "Toy", "list", "what it plays",
        lambda known: (("a: the first", "a"), ("the second", "b")), script="For scripts",
    )  # fmt: skip
    words = about(setting, Limits(), Choices())
    assert words == "What it plays. For scripts. Values: 'a' (the first); 'b' (the second)."
