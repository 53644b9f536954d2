"""transformers' own `generate` as a lane: its text, noise, turns, end and refusals.

tests/conformance tests the properties that all methods share.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from bass_core import METHODS, ModelError, ModelPair, RequestError, SamplingParams, generate, race, stream
from bass_core.decode.admission import estimate_bytes
from bass_core.decode.request import make_request
from bass_core.decode.transformers_generate import call, decoder
from bass_core.decode.transformers_generate.turns import Turns
from bass_core.lanes.lane import Lane
from bass_core.machine import memory, openmp
from bass_core.model.weights.quantized import quantise_model
from tests.support.memory import peak_bytes
from tests.support.models import BUILDERS, VOCAB, byte_tokenizer, prompts, reference, texts_of, tiny, tiny_pair

PAIR = tiny_pair()
TARGET = PAIR.target
ROWS = prompts(4)
SAMPLED = SamplingParams(0.9, top_k=20, top_p=0.9)


def written(rows: Any = ROWS, pair: ModelPair = PAIR, **arguments: Any) -> list[list[int]]:
    return texts_of(generate(pair, rows, **{"method": "transformers", "max_new_tokens": 12} | arguments))


def lane_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "bass-transformers"]


@pytest.mark.parametrize("architecture", BUILDERS)
def test_in_float32_it_writes_the_text_of_regular_decoding(architecture: str) -> None:
    """Rows of different lengths are padded on the left; each must still get the text that it gets by itself."""
    pair = ModelPair(tiny(architecture))
    expected = [reference(pair.target, row, 16) for row in ROWS]
    *_, last = race(pair, ROWS, lanes=["regular", "transformers"], max_new_tokens=16)
    for lane in last["lanes"].values():
        assert [sequence["token_ids"] for sequence in lane["sequences"]] == expected and lane["error"] is None
    assert last["comparison"] == {"transformers": [None] * len(ROWS)}
    assert last["lanes"]["transformers"]["metrics"]["speedup"]


@pytest.mark.parametrize("scheduling", ["fair", "overlap", "in_turn"])
def test_its_clock_counts_its_own_turns(scheduling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step calls the model once, within the lane's turn; between turns the lane's thread waits."""
    inside_a_turn, turns = [], []
    forward = TARGET.__class__.forward

    def counted_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name == "bass-transformers":
            inside_a_turn.append(bool(turns))
        return forward(self, *args, **kwargs)

    step = decoder.TransformersDecoder.step

    def marked_step(self: Any) -> Any:
        turns.append(1)
        try:
            return step(self)
        finally:
            turns.pop()

    monkeypatch.setattr(TARGET.__class__, "forward", counted_forward)
    monkeypatch.setattr(decoder.TransformersDecoder, "step", marked_step)
    lanes = ["regular", "bass", "transformers"]
    *_, last = race(PAIR, ROWS, lanes=lanes, max_new_tokens=8, draft_length=2, scheduling=scheduling)
    metrics = last["lanes"]["transformers"]["metrics"]
    assert metrics["target_forwards"] == 8 and metrics["rounds"] == 7 and metrics["drafted"] == 0
    assert inside_a_turn == [True] * 8 and not lane_threads()


def test_sampled_text_depends_on_the_seed_and_leaves_torchs_generator_unchanged() -> None:
    torch.manual_seed(7)
    expected = torch.rand(5)
    torch.manual_seed(7)
    first = written(sampling=SAMPLED, seed=3)
    assert torch.equal(torch.rand(5), expected)
    torch.rand(11)
    assert written(sampling=SAMPLED, seed=3) == first != written(sampling=SAMPLED, seed=4)
    *_, last = race(PAIR, ROWS, lanes=["bass", "transformers"], max_new_tokens=12, sampling=SAMPLED, seed=3)
    assert [sequence["token_ids"] for sequence in last["lanes"]["transformers"]["sequences"]] == first
    assert "comparison" not in last


def test_the_models_generation_config_is_ignored_and_kept() -> None:
    model = copy.deepcopy(TARGET)
    config = {"repetition_penalty": 5.0, "num_beams": 3, "no_repeat_ngram_size": 1, "min_new_tokens": 9}
    model.generation_config = GenerationConfig(**config, eos_token_id=None, max_length=3)
    model.train()
    before = model.generation_config.to_dict()
    assert written(pair=ModelPair(model)) == written()
    assert model.generation_config.to_dict() == before and model.training
    options = call.generate_options(PAIR, make_request(PAIR, ROWS, sampling=SamplingParams(0.5)))
    assert (options["temperature"], options["top_k"], options["top_p"]) == (0.5, 0, 1.0)
    model.set_attn_implementation("eager")
    assert call.plain_model(ModelPair(model)).config._attn_implementation == "eager"


def test_ids_that_pad_the_vocabulary_are_never_written() -> None:
    """The target has more ids than the tokenizer, and would mostly choose the ids that have no token."""
    wide = copy.deepcopy(TARGET)
    wide.resize_token_embeddings(VOCAB + 8)
    with torch.no_grad():
        wide.lm_head.weight[VOCAB:] = 9 * wide.lm_head.weight[:8]
    tokenizer = byte_tokenizer()
    tokenizer.__class__ = type("Short", (type(tokenizer),), {"__len__": lambda self: VOCAB})
    pair = ModelPair(wide, TARGET, tokenizer)
    assert max(reference(wide, ROWS[0], 12)) >= VOCAB
    assert pair.vocab == VOCAB and written(pair=pair, eos_token_id=None) == written()


def test_a_stopped_lane_frees_its_thread_and_memory() -> None:
    rounds: Any = stream(PAIR, ROWS, method="transformers", max_new_tokens=50)
    for _ in range(3):
        next(rounds)
    assert len(lane_threads()) == 1
    rounds.close()
    assert not lane_threads()
    running = race(PAIR, ROWS, lanes=["transformers", "bass"], max_new_tokens=200)
    next(running)
    running.close()
    assert not lane_threads()
    lane = Lane(PAIR, make_request(PAIR, ROWS, max_new_tokens=9), "transformers")
    lane.step()
    decoder_ref = weakref.ref(lane._decoder)
    lane.end("stopped")
    assert decoder_ref() is None and {sequence.finish_reason for sequence in lane.sequences} == {"stopped"}


@pytest.mark.parametrize("step", [0, 2])
def test_an_error_inside_fails_this_lane_with_its_message(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taker = decoder._TurnTaker.__call__

    def failing(self: Any, ids: Any, scores: Any, **kwargs: Any) -> Any:
        if ids.shape[1] == max(map(len, ROWS)) + 1 + step:
            raise ValueError("no such kernel\nmore of it")
        return taker(self, ids, scores, **kwargs)

    monkeypatch.setattr(decoder._TurnTaker, "__call__", failing)
    *_, last = race(PAIR, ROWS, lanes=["regular", "transformers"], max_new_tokens=8)
    failed, other = last["lanes"]["transformers"], last["lanes"]["regular"]
    assert failed["error"] == "transformers' generate failed: no such kernel"
    assert [len(sequence["token_ids"]) for sequence in failed["sequences"]] == [step] * len(ROWS)
    assert other["error"] is None and not lane_threads()
    with pytest.raises(ModelError, match="generate failed"):
        written()


def test_a_generate_that_ends_too_early_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real_options = call.generate_options
    monkeypatch.setattr(
        decoder, "generate_options", lambda pair, request: real_options(pair, request) | {"max_new_tokens": 3}
    )
    with pytest.raises(ModelError, match="ended before all texts did"):
        written()
    assert not lane_threads()


def test_running_out_of_memory_is_a_memory_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(self: Any, ids: Any, scores: Any, **kwargs: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(decoder._TurnTaker, "__call__", short)
    with pytest.raises(memory.MemoryShortage, match="ask for a smaller batch"):
        list(race(PAIR, ROWS, lanes=["transformers", "regular"], max_new_tokens=8))
    assert not lane_threads()


def assert_refused(match: str, pair: ModelPair = PAIR, prompt: Any = ROWS, **arguments: Any) -> None:
    for ask in (
        lambda: generate(pair, prompt, method="transformers", **arguments),
        lambda: race(pair, prompt, lanes=["regular", "transformers"], **arguments),
    ):
        with pytest.raises(RequestError, match=match):
            ask()


def test_quantised_weights_and_coupled_sampling_are_refused() -> None:
    for kind in ("int8", "int4"):
        model = tiny("llama").to(torch.bfloat16)
        quantise_model(model, kind)
        assert_refused(
            f"this pair holds {kind} weights: leave it out, or load the pair with dtype=", ModelPair(model)
        )
    assert_refused("draws its own random numbers", sampling=SAMPLED, verification="coupled")
    assert written(verification="coupled") == written()


def test_a_row_that_would_outgrow_the_context_is_refused() -> None:
    """The shorter row could continue, but `generate` pads it to the length of the longest."""
    long = (ROWS[0] * 200)[:506]
    assert_refused("room for 6: ask for at most that many", prompt=[long, ROWS[1]], max_new_tokens=30)
    assert [len(text) for text in written([long, ROWS[1]], max_new_tokens=6)] == [6, 6]
    assert [len(text) for text in written([long] * 2, max_new_tokens=30)] == [6, 6]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_estimate_covers_the_memory_of_generate(implementation: str, tmp_path: Path) -> None:
    """Compare the estimate with the peak allocation that torch's profiler records. It records only this thread."""
    model = copy.deepcopy(TARGET)
    model.set_attn_implementation(implementation)
    pair = ModelPair(model)
    rows = [(ROWS[i % 4] * 100)[: 280 + i] for i in range(24)]
    request = make_request(pair, rows, max_new_tokens=24, sampling=SamplingParams(1.0, top_p=0.9))
    plain, options = call.plain_model(pair), call.generate_options(pair, request)
    peak = peak_bytes(lambda: call.call_generate(plain, rows, **options), tmp_path)
    estimate = estimate_bytes(pair, request, (METHODS["transformers"],), len(rows))
    assert estimate / 4 < peak <= estimate


CPU = torch.device("cpu")
HandOver = Callable[[int], bool]


def test_the_work_has_its_callers_number_of_threads() -> None:
    before, seen = torch.get_num_threads(), []

    def work(hand_over: HandOver) -> None:
        torch.ones(4, 4) @ torch.ones(4, 4)
        seen.append(torch.get_num_threads())

    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            turns: Turns[int] = Turns(work, CPU, "turns")
            turns.take()
            turns.stop()
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 2]


def test_the_lane_reports_how_idle_threads_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a user's process, OMP_WAIT_POLICY may not be set as on the page, and idle threads may spin longer."""
    for policy, shortened, expected in (
        ("PASSIVE", False, "torch's idle threads sleep at once here"),
        ("passive", True, "torch's idle threads sleep at once here"),
        ("ACTIVE", False, None),
        ("", True, "torch's idle threads sleep sooner here"),
        ("", False, None),
    ):
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
        monkeypatch.setattr(openmp, "_shortened", shortened)
        assert openmp.idle_threads() == expected
    assert METHODS["transformers"].about.startswith("transformers' own generate, on the same weights")
