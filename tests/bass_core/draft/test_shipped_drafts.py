"""The shipped pair in float32: with every drafter, the text equals the target's own."""

import pytest
import torch

from bass_core import SamplingParams, generate, load_pair
from bass_core.decode.request import make_request
from bass_core.draft.registry import DRAFTERS
from bass_core.model.draft_head import DraftHead
from tests.support.models import texts_of

pytestmark = pytest.mark.slow

PROMPTS = [
    "Write a Python function that adds two numbers.",
    "Repeat this text: The cat slept on a coil of rope, and the cat slept on a coil of wire.",
    "Name three rivers in Europe and say one thing about each.",
]


@pytest.fixture(scope="module")
def pair(smollm2_folder):
    return load_pair("smollm2", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def references(pair):
    rows = [make_request(pair, prompt).prompts[0] for prompt in PROMPTS]
    written = []
    for row in rows:
        ids = torch.tensor([row])
        out = pair.target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=32)
        written.append(out[0, len(row) :].tolist())
    return written


def test_the_default_pair_has_a_trained_head(pair):
    assert isinstance(pair.draft, DraftHead)
    assert pair.default_drafter in DRAFTERS


@pytest.mark.parametrize(
    ("drafter", "method"), [*((drafter, "bass") for drafter in DRAFTERS), ("adaptive", "speculative")]
)
def test_greedy_text_equals_that_of_transformers(pair, references, drafter, method):
    out = generate(pair, PROMPTS, method=method, drafter=drafter, max_new_tokens=32)
    assert texts_of(out) == references
    # The window covers these short prompts completely, so window drafters propose nothing.
    assert out.metrics.accepted > 0 or DRAFTERS[drafter].windows


@pytest.mark.parametrize("drafter", ["adaptive", "window_model"])
def test_coupled_text_equals_regular_decoding(pair, drafter):
    request = dict(
        max_new_tokens=24, sampling=SamplingParams(temperature=0.8, top_p=0.95), verification="coupled", seed=4
    )
    plain = generate(pair, PROMPTS, method="regular", **request)
    drafted = generate(pair, PROMPTS, drafter=drafter, **request)
    assert texts_of(drafted) == texts_of(plain)
