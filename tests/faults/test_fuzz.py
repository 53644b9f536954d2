"""Random arguments to the page's API and the library give a race or one documented sentence.

The arguments are of all types, ranges, sizes and alphabets. No input may leave a cache or thread behind.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import gradio as gr
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from bass_core import BassError, ModelPair, RequestError, race
from bass_core.decode.request import make_request
from tests.support import ROOT
from tests.support.memory import left_behind
from tests.support.page import load_saved, save_tiny_pair
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

# Lone surrogates (JSON can carry them), direction marks, zero-width and combining characters, and 1 MB.
TEXTS = st.one_of(
    st.text(max_size=40),
    st.text(st.characters(codec=None), max_size=20),
    st.sampled_from(["", " ", "\0", "\ud800", "\u202e\u200b\u0301", "a" * 2**20, "{{value}}", "../../etc/passwd"]),
)
JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), TEXTS, st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


# Nearly valid values for each parameter, because pure junk would never pass the first check.
NEAR: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.one_of(st.just("Hello"), TEXTS),
    "batch_size": st.integers(-1, 5),
    "max_new_tokens": st.integers(-1, 8),
    "temperature": st.one_of(st.floats(-1, 5), st.sampled_from([0, 1e-30, 1e30])),
    "seed": st.integers(-1, 2**33),
    "pair": st.sampled_from(["", "", "", "/etc/passwd", "..", "owner/model", "smollm2-1.7b"]),
    "top_k": st.integers(-1, 300),
    "top_p": st.floats(-0.5, 1.5),
    "min_p": st.floats(-0.5, 1.5),
    "repetition_penalty": st.one_of(st.floats(-1, 3), st.sampled_from([1e-40, 1e39])),
    "stop": st.one_of(st.just(["\n\n"]), st.just("a"), st.lists(TEXTS, max_size=3)),
    "system": st.one_of(st.just("Answer briefly."), TEXTS),
    "chat_template_kwargs": st.sampled_from(
        [{}, {"enable_thinking": False}, {"chat_template": "{{ 1 }}"}, {"a": []}]
    ),
    "clock": st.sampled_from(["measured", "a100", "h100", "laptop", "own", "h1000"]),
    "clock_models": st.sampled_from(["7.8b", "1.7b", "70b", "own", "8b"]),
    "clock_bandwidth": st.sampled_from([1000.0, 0, -1, None, 1e300]),
    "clock_tflops": st.sampled_from([100.0, 0, -1, None, 1e300]),
    "clock_target": st.sampled_from([7.8, 0, -1, None, 1e300]),
    "clock_draft": st.sampled_from([0.31, 0, -1, None, 1e300]),
    "clock_bytes": st.sampled_from([2.0, 0.5, 0, None, 1e300]),
    "acceptance": st.sampled_from([None, 0, 0.8, 1, 1.1, -0.1]),
    "draft_length": st.sampled_from(["auto", "bass", 1, "3", 16, 17, "long"]),
    "drafter": st.sampled_from(["auto", "model", "prompt_lookup", "adaptive", "oracle"]),
    "attention": st.sampled_from(["auto", "pad", "split", "sdpa", "flash", "no"]),
    "scheduling": st.sampled_from(["fair", "in_turn", "overlap", "slowly"]),
    "verification": st.sampled_from(["auto", "block", "rejection", "chen", "coupled", "hope"]),
    "time_budget_ms": st.sampled_from([None, 1, 50, -1, 0]),
    "lanes": st.lists(st.sampled_from(["regular", "speculative", "bass", "guess"]), max_size=3),
    "prompts": st.sampled_from(["one", "lines", "many"]),
    "json_schema": st.sampled_from([None, {"type": "integer"}, '{"enum": [1]}', {"type": "colour"}, "{"]),
    "regex": st.sampled_from([None, "[0-9]+", "(", "a{1,99999}"]),
    "grammar": st.sampled_from([None, 'start: "a"', "start:"]),
}


VALID = {"prompt": "Hello", "batch_size": 2, "max_new_tokens": 5}


@st.composite
def arguments_of(draw: st.DrawFn, defaults: dict[str, Any]) -> tuple[Any, ...]:
    """Draw values for the parameters of /race, in order: up to three of them strange, the others valid."""
    strange = draw(st.sets(st.sampled_from(list(defaults)), max_size=3))
    valid = defaults | VALID
    return tuple(
        draw(st.one_of(NEAR.get(name, JUNK), JUNK)) if name in strange else valid[name] for name in defaults
    )


def verdict(outcome: Any) -> str:
    """Classify the outcome of a request, which is its last snapshot or the text of its error.

    Returns:
        "done", "refused", or a description of the fault.
    """
    if isinstance(outcome, dict):
        failed = [lane["error"] for lane in outcome["lanes"].values() if lane["error"]]
        return "done" if outcome["done"] and not failed else f"unfinished: {failed}"
    text = str(outcome)
    if "internal error" in text or re.search(r"Traceback|File \"", text):
        return f"undocumented: {text}"
    if "\n" in text.strip() or len(text) > 2000 or str(ROOT) in text or "site-packages" in text:
        return f"no clear sentence: {text[:200]}"
    return "refused"


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
