"""On a CPU with compiled kernels, a row's text does not depend on the other rows, in 16 bits or fewer.

In bfloat16, float16, int8 and int4, greedy and coupled texts equal those of regular decoding of each row by
itself: for every method and drafter, fixed and automatic lengths, trees, batches of 1, 4 and 16, two threads, and
overlapping lanes. Some rows share a prefix. Methods outside our code are left out, because they round differently.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import chain, product
from typing import Any

import pytest
import torch

from bass_core import METHODS, ModelPair, SamplingParams, generate, race
from bass_core.machine import cpu_kernels
from bass_core.model.llama_cpu import LlamaCompiled
from bass_core.model.weights.quantized import quantise_model
from tests.support.models import perturbed, prompts, slow_but, texts_of, tiny

pytestmark = pytest.mark.skipif(not cpu_kernels.available(), reason="numba is not installed")

TOKENS = 16
# _LONG is longer than a segment of the CPU kernels' attention (256 tokens). Five rows are equal to it, and one row
# begins with its first 275 tokens.
_LONG = list(chain(*prompts(30, longest=24, seed=6)))[:302]
ROWS = [_LONG, prompts(1)[0], _LONG, _LONG[:275] + [5, 6, 7], *prompts(9, seed=2), *[_LONG] * 3]
TEXTS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": SamplingParams()},
    "coupled": {"sampling": SamplingParams(temperature=0.9), "verification": "coupled"},
}
OURS = [name for name, method in METHODS.items() if not method.outside]
WEIGHTS = ["bfloat16", "float16", "int8", "int4"]


@cache
def pair(weights: str) -> ModelPair:
    dtype = torch.float16 if weights == "float16" else torch.bfloat16
    target = tiny("llama").to(dtype)
    draft = perturbed(tiny("llama"), 0.05).to(dtype)
    if weights in ("int8", "int4"):
        quantise_model(target, weights)
        quantise_model(draft, weights)
    compiled = ModelPair(target, draft)
    assert isinstance(compiled.target_step, LlamaCompiled) and isinstance(compiled.draft_step, LlamaCompiled)
    return compiled


def written(weights: str, rows: list[int], text: str, **ways: Any) -> list[list[int]]:
    out = generate(
        pair(weights), [ROWS[row] for row in rows], sequence_ids=rows, max_new_tokens=TOKENS, eos_token_id=None,
        seed=3, **TEXTS[text], **ways,
    )  # fmt: skip
    return texts_of(out)


@cache
def expected_texts(weights: str, text: str) -> list[list[int]]:
    """Return the text of regular decoding for each row by itself."""
    return [written(weights, [row], text, method="regular")[0] for row in range(len(ROWS))]


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("weights", "text", "method"), slow_but([("bfloat16", "coupled", "bass")], product(WEIGHTS, TEXTS, OURS))
)
def test_rows_write_their_own_text_in_any_batch(weights: str, text: str, method: str) -> None:
    expected = expected_texts(weights, text)
    ways: list[dict[str, Any]] = [{}]
    if METHODS[method].drafts:
        drafters = ["model"] if METHODS[method].overlaps else ["model", "prompt_lookup"]
        ways = [{"drafter": drafter, "draft_length": length} for drafter in drafters for length in (4, "auto")]
        ways += [] if METHODS[method].overlaps else [{"drafter": "adaptive", "tree": (3, 2)}]
    for way in ways:
        for batch in (1, 4, 16):
            rows = list(range(batch))
            assert written(weights, rows, text, method=method, **way) == expected[:batch], (way, batch)


@pytest.mark.parametrize("text", slow_but(["greedy"], TEXTS))
def test_two_threads_write_the_same_text(text: str, two_threads: None) -> None:
    for method in OURS:
        assert written("bfloat16", list(range(4)), text, method=method) == expected_texts("bfloat16", text)[:4], (
            method
        )


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
def test_wide_trees_write_the_same_text(text: str, two_threads: None) -> None:
    """Trees have up to the maximum number of drafts per row, and some rows share a prefix."""
    for weights, shape in (("bfloat16", (6, 3, 2)), ("float16", (3, 2, 1)), ("int8", (2, 2))):
        for drafter in ("model", "adaptive"):
            rows = [0, 1, 2, 3]
            out = written(weights, rows, text, drafter=drafter, tree=shape)
            assert out == expected_texts(weights, text)[:4], (weights, shape, drafter)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["bfloat16", "int4"])
def test_overlapping_lanes_write_the_same_text(weights: str, two_threads: None) -> None:
    *_, last = race(
        pair(weights), ROWS[:4], lanes=OURS, scheduling="overlap",
        sequence_ids=list(range(4)), max_new_tokens=TOKENS, eos_token_id=None, seed=3,
    )  # fmt: skip
    for lane in last["lanes"].values():
        texts = [sequence["token_ids"] for sequence in lane["sequences"]]
        assert texts == expected_texts(weights, "greedy")[:4]
