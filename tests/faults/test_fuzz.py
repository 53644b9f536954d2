"""Random arguments to the page's API and the library give a race or one documented sentence.

This is the short form of `python -m bench fuzz`, in this process. No input may leave a cache or thread behind.
"""

from __future__ import annotations

import inspect
from typing import Any

import gradio as gr
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from bass_core import BassError, ModelPair, RequestError, race
from bass_core.decode.request import make_request
from bench.robustness.fuzz import JUNK, NEAR, arguments_of, verdict
from bench.robustness.serving import save_tiny_pair
from tests.support.memory import left_behind
from tests.support.page import load_saved
from ui.page.events import Events
from ui.page.limits import Limits
from ui.page.request import defaults
from ui.sources.local import race_source

FUZZ = settings(
    max_examples=150, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
DEFAULTS = defaults()
LIBRARY = [name for name in inspect.signature(make_request).parameters if name not in ("pair", "prompt")]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> ModelPair:
    return load_saved(save_tiny_pair(tmp_path_factory.mktemp("pair")))


def test_the_fuzzer_knows_every_argument_of_the_api() -> None:
    assert set(DEFAULTS) <= set(NEAR)


@pytest.mark.slow
def test_the_api_answers_or_refuses(pair: ModelPair) -> None:
    events = Events(race_source(pair), Limits(max_batch=3, max_new_tokens=6, max_prompt=300))
    before, seen = left_behind(), set()

    @FUZZ
    @given(arguments_of(DEFAULTS))
    def call(values: tuple[Any, ...]) -> None:
        try:
            outcome: Any = list(events.api(*values))[-1]
        except gr.Error as error:
            outcome = str(error)
        seen.add(verdict(outcome))

    call()
    assert seen == {"done", "refused"}
    assert left_behind() == before


def test_the_library_raises_only_request_errors(pair: ModelPair) -> None:
    """One argument is random and the others are valid. If the request is accepted, it is closed without a run."""

    @FUZZ
    @given(
        st.sampled_from(["prompt", *LIBRARY, "lanes", "scheduling"]), st.one_of(JUNK, st.lists(JUNK, max_size=3))
    )
    def call(name: str, value: Any) -> None:
        arguments: dict[str, Any] = {"prompt": "Hello", "max_new_tokens": 4} | {name: value}
        try:
            race(pair, **arguments).close()
        except RequestError as error:
            assert "\n" not in str(error)

    call()


def test_odd_unicode_runs_or_is_refused(pair: ModelPair) -> None:
    for text in ("\ud800", "a\udfff b", "\0", "\u202e\u200b", "\U0010ffff" * 50, "e\u0301"):
        try:
            *_, last = race(pair, text, max_new_tokens=4)
            assert last["done"]
        except BassError as error:
            assert "\n" not in str(error) and str(error).isprintable()
