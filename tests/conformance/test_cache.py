"""The ragged cache writes each row's tokens at the end of that row and never reads stale entries."""

import pytest
import torch

from bass_core import ModelPair, generate
from bass_core.decode.batch import BatchDecoder
from bass_core.decode.request import make_request
from bass_core.lanes.lane import Lane
from bass_core.model.forward import ForwardBatch
from tests.support.models import prompts, slow_but, texts_of, tiny, tiny_pair


def test_a_step_past_the_end_is_refused():
    cache = ModelPair(tiny("llama")).target_step.new_cache(2, 8)
    with pytest.raises(ValueError, match="does not fit"):
        cache.plan([3, 7], 2)


@pytest.mark.parametrize(("architecture", "backend"), [("llama", "pad"), ("qwen3", "split"), ("gpt2", "sdpa")])
def test_skipping_padding_changes_no_other_result(architecture, backend):
    model = ModelPair(tiny(architecture)).target_step
    lengths, counts = [9, 3, 6, 6], [2, 5, 1, 3]
    fed = torch.randint(0, model.vocab, (4, 9)), torch.randint(0, model.vocab, (4, 5))
    results = []
    for real in (None, counts):
        cache = model.new_cache(4, 16)
        model.forward(ForwardBatch(fed[0], [0] * 4), cache, backend)
        output = model.forward(ForwardBatch(fed[1], lengths, counts=real, return_states=True), cache, backend)
        taken = model.forward(ForwardBatch(fed[1], lengths, real, [n - 1 for n in counts]), cache, backend).logits
        results.append((output.logits, output.states, taken))
    (logits, states, taken), (logits_, states_, taken_) = results
    torch.testing.assert_close(taken, taken_, atol=1e-5, rtol=1e-5)
    for row, count in enumerate(counts):
        torch.testing.assert_close(logits[row, :count], logits_[row, :count], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(states[row, :count], states_[row, :count], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "method", "drafter"),
    slow_but(
        [("gemma3", "bass", "model")],
        [
            *(("gemma3", "bass", drafter) for drafter in ("model", "window", "window_model")),
            ("llama", "amusd", "model"),
            ("opt", "bass", "model"),
        ],
    ),
)
def test_after_rollbacks_the_cache_equals_a_fresh_prefill(architecture, method, drafter):
    target = tiny(architecture)
    pair = tiny_pair(0.05, target=target)
    lane = Lane(pair, make_request(pair, prompts(3), max_new_tokens=40, draft_length=4, drafter=drafter), method)
    decoder = lane._decoder
    assert isinstance(decoder, BatchDecoder)
    while lane.metrics().acceptance_rate in (None, 1) or lane.metrics().rounds < 8:
        lane.step()
    runner = decoder.target
    for row, sequence in enumerate(decoder._rows):
        length = runner.lengths[row]
        assert length == len(sequence.tokens) - 1
        fresh = pair.target_step.new_cache(1, length)
        pair.target_step.forward(ForwardBatch(torch.tensor([sequence.tokens[:length]]), [0]), fresh)
        ours, theirs = runner.cache.buffer[:, :, row, :, :length], fresh.buffer[:, :, 0]
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    lane.end("stopped")


def test_long_prompts_are_prefilled_in_chunks_and_equal_prompts_once(monkeypatch):
    target = tiny("llama")
    pair = ModelPair(target)
    rows = [prompts(1, seed=4)[0] * 12, prompts(1, seed=5)[0], prompts(1, seed=4)[0] * 12]
    whole = generate(pair, rows, method="regular", max_new_tokens=8)
    monkeypatch.setattr("bass_core.model.runner.PREFILL_TOKENS", {"cpu": 14, "cuda": 14})
    chunked = generate(pair, rows, method="regular", max_new_tokens=8)
    assert texts_of(whole) == texts_of(chunked)
    assert chunked.sequences[0].token_ids == chunked.sequences[2].token_ids
    assert chunked.metrics.target_forwards == 8
