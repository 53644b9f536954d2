"""Captured steps on the emulated accelerator: their conditions, memory and failures.

Texts equal transformers' own, whatever fails.
"""

from __future__ import annotations

import copy
import gc
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bass_core import ModelPair, race
from bass_core.machine import capture
from bass_core.machine.memory import available_bytes, private_pools
from bass_core.model import graphs as graphs
from bass_core.model.base import CausalModel
from bass_core.model.capturable import mark_capturable
from bass_core.model.forward import ForwardBatch
from bass_core.model.llama_cuda import LlamaCuda
from bass_core.model.static_step import RoundInputs
from bass_core.model.weights.shape import rope_depends_on_length
from kernels.support import runtime
from tests.bass_core.accelerated import (  # noqa: F401
    DEVICE,
    ROWS,
    TEXT,
    accelerator,
    on_device,
    small,
    texts,
    while_capturing,
)
from tests.devices.emulation import capture as emulated_capture
from tests.support.models import reference, tiny
from tests.support.threads import together

pytestmark = pytest.mark.usefixtures("small")


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [reference(tiny("llama"), row, TEXT["max_new_tokens"]) for row in ROWS]


def slots(pair: ModelPair) -> list[Any]:
    gc.collect()
    return [slot for model in (pair.target_step, pair.draft_step) for slot in graphs._idle.get(model, [])]


def test_after_a_capture_fails_at_its_end_none_is_tried_again(
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a capture has failed at its end, torch's `empty_cache` would raise, so it must not be called.

    The thread must also leave the capture's stream.
    """
    pair = on_device()

    def fail() -> None:
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(emulated_capture, "at_end", fail)
    with caplog.at_level(logging.WARNING):
        assert texts(pair) == expected
        assert runtime(DEVICE).current_stream().stream_id == 0
        monkeypatch.setattr(emulated_capture, "at_end", None)
        *_, last = race(pair, ROWS, **TEXT)
    assert [lane["error"] for lane in last["lanes"].values()] == [None] * 3
    assert [row["token_ids"] for row in last["lanes"]["bass"]["sequences"]] == expected
    graphs.release_idle(pair.target_step)
    assert emulated_capture.captured == 1 and not capture.enabled(DEVICE)
    assert len(caplog.records) == 1 and "until the next start" in caplog.text


def test_a_failure_inside_a_capture_disables_captures_of_one_model(
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair = on_device()

    def fail() -> None:
        raise ValueError("not in a capture")

    while_capturing(monkeypatch, pair.target_step, fail)
    with caplog.at_level(logging.WARNING):
        assert texts(pair) == expected
    assert not pair.target_step.capturable and pair.draft_step is not None and pair.draft_step.capturable
    assert capture.enabled(DEVICE) and emulated_capture.captured > 1
    assert len(caplog.records) == 1 and "not in a capture" in caplog.text and "All else" not in caplog.text


@pytest.mark.parametrize("reads", [False, True])
def test_a_forward_that_synchronises_is_detected_before_it_is_captured(
    reads: bool, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compute = CausalModel._compute

    def compute_and_read(self: CausalModel, batch: Any, plan: Any, *rest: Any) -> Any:
        if reads and int(plan.positions.max()) < 0:
            raise AssertionError
        return compute(self, batch, plan, *rest)

    monkeypatch.setattr(CausalModel, "_compute", compute_and_read)
    pair = on_device(plain=True)
    with caplog.at_level(logging.WARNING):
        mark_capturable(pair.target_step)
        assert texts(pair, method="regular") == expected
    assert pair.target_step.capturable is not reads
    assert (emulated_capture.captured == 0) is reads and capture.enabled(DEVICE)
    assert len(caplog.records) == reads and runtime(DEVICE).get_sync_debug_mode() == 0


def test_joining_weights_does_not_count_as_a_change_of_the_model() -> None:
    # Joining moves the weights to another place in memory.
    pair = on_device()
    steps = pair.target_step, pair.draft_step
    assert isinstance(pair.target_step, LlamaCuda)
    pair.refresh()
    assert (pair.target_step, pair.draft_step) == steps
    pair.target.load_state_dict(tiny("llama", seed=7).state_dict())
    assert texts(pair) == [reference(tiny("llama", seed=7), row, TEXT["max_new_tokens"]) for row in ROWS]


def test_models_whose_rotation_depends_on_the_length_are_not_captured() -> None:
    by_layer = {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {"rope_type": "default"}}
    for rope, turns in (
        ({"rope_type": "dynamic", "factor": 2.0}, True),
        ({"rope_type": "longrope", "factor": 2.0}, True),
        (by_layer, True),
        ({"rope_type": "yarn", "factor": 2.0}, False),
        ({"type": "linear", "factor": 2.0}, False),
        (None, False),
    ):
        assert rope_depends_on_length(SimpleNamespace(rope_parameters=rope)) is turns
        assert rope_depends_on_length(SimpleNamespace(rope_scaling=rope)) is turns
    model = copy.deepcopy(tiny("llama"))
    model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert not CausalModel(model).capturable and CausalModel(tiny("llama")).capturable


def test_workspaces_are_dropped_on_either_side_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    graph = runtime(DEVICE).CUDAGraph
    begin, end = graph.capture_begin, graph.capture_end
    clear = lambda: seen.append("clear")  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)
    monkeypatch.setattr(graph, "capture_begin", lambda *a, **k: (seen.append("begin"), begin(*a, **k))[1])
    monkeypatch.setattr(graph, "capture_end", lambda *a: (seen.append("end"), end(*a))[1])
    texts(on_device(), method="regular")
    assert seen and seen == ["clear", "begin", "end", "clear"] * (len(seen) // 4)


def test_captures_of_one_cache_share_a_pool_and_a_separate_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: list[tuple[Any, Any]] = []
    begin = runtime(DEVICE).CUDAGraph.capture_begin

    def recorded_begin(self: Any, pool: Any, **rest: Any) -> None:
        used.append((pool, runtime(DEVICE).current_stream().key))
        begin(self, pool=pool, **rest)

    monkeypatch.setattr(runtime(DEVICE).CUDAGraph, "capture_begin", recorded_begin)
    model = on_device().target_step
    runner = graphs.make_runner(model, 1, 64, model.vocab, "pad")
    for width in (1, 2, 3):
        runner.forward(ForwardBatch(torch.ones(1, width, dtype=torch.long, device=DEVICE), [0]))
    assert len(used) == 3 and len(set(used)) == 1
    # torch hands out 32 streams in turn, so these 40 include all of them.
    lane_streams = {runtime(DEVICE).Stream(DEVICE).key for _ in range(40)}
    assert used[0][1] not in lane_streams


def test_the_memory_of_graphs_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = on_device()
    texts(pair)
    gc.collect()
    runtime(DEVICE).empty_cache()
    pools = private_pools(DEVICE)
    unused = sum(reserved - used for reserved, used in pools.values())
    assert unused > 0 and available_bytes(DEVICE) == runtime(DEVICE).mem_get_info(DEVICE)[0]
    # Other tests' captures may have left pools on the other device, but only empty ones.
    assert not any(map(any, private_pools(torch.device("emul", 1)).values()))
    assert private_pools(torch.device("cpu")) == {}
    for slot in slots(pair):
        assert slot.pool.reserved() == pools.get(slot.pool.handle, (0, 0))[0]
        assert slot.pool.reserved() == sum(step.taken for step in slot.steps.values())
        assert all(step.nbytes >= step.taken > 0 for step in slot.steps.values())


def test_the_least_used_step_is_dropped_when_a_caches_captures_are_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limit applies to all memory that captures take, not only to their outputs."""
    model = on_device().target_step
    runner = graphs.make_runner(model, 1, 64, model.vocab, "pad")
    assert isinstance(runner, graphs.GraphRunner)
    token = torch.ones(1, 1, dtype=torch.long, device=DEVICE)
    runner.forward(ForwardBatch(token, [0]))
    (first,) = runner.slot.steps.values()
    assert first.taken > 4 * first.output.logits.nbytes
    monkeypatch.setattr(graphs, "STEP_BYTES", int(1.5 * first.taken))
    runner.forward(ForwardBatch(torch.ones(1, 2, dtype=torch.long, device=DEVICE), [0]))
    assert [key[1] for key in runner.slot.steps] == [2]


def test_the_number_of_captures_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used one is dropped. It is captured again when it is needed."""
    monkeypatch.setattr(graphs, "MAX_STEPS", 2)
    model = on_device().target_step
    runner = graphs.make_runner(model, 1, 64, model.vocab, "pad")
    assert isinstance(runner, graphs.GraphRunner)
    kept = []
    for width in (1, 2, 1, 3, 2):
        runner.forward(ForwardBatch(torch.ones(1, width, dtype=torch.long, device=DEVICE), [0]))
        kept.append([key[1] for key in runner.slot.steps])
    assert kept == [[1], [1, 2], [2, 1], [1, 3], [3, 2]]


def test_a_call_captured_again_is_the_most_recently_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger buffer replaced the one that it used. The captures together are too large."""
    model = on_device().target_step
    runner = graphs.make_runner(model, 1, 64, model.vocab, "pad")
    assert isinstance(runner, graphs.GraphRunner)

    def call(drafts: int) -> None:
        buffer = runner.draft_probs(1, drafts, model.vocab)
        assert buffer is not None
        inputs = RoundInputs([1])
        runner.call(("call",), inputs, 1, lambda static: buffer[:, :1] + static.lengths, shared=["probs"])

    call(1)
    runner.forward(ForwardBatch(torch.ones(1, 1, dtype=torch.long, device=DEVICE), [0]))
    monkeypatch.setattr(graphs, "STEP_BYTES", 1)
    call(2)
    assert [key[0] for key in runner.slot.steps] == ["call"]


def test_a_capture_frees_memory_only_if_little_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    module = runtime(DEVICE)
    for least, emptied in ((0, 0), (1 << 62, 1)):
        calls: list[int] = []
        with monkeypatch.context() as patch:
            patch.setattr(capture, "LEAST_FREE", least)
            patch.setattr(module, "empty_cache", lambda calls=calls: calls.append(1))
            pair = on_device()
            model = pair.target_step
            runner = graphs.make_runner(model, 1, 64, model.vocab, "pad")
            runner.forward(ForwardBatch(torch.ones(1, 1, dtype=torch.long, device=DEVICE), [0]))
        assert len(calls) == emptied


@pytest.mark.parametrize("elsewhere", [False, True])
def test_memory_is_not_given_back_during_a_capture(elsewhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`empty_cache` does nothing during a capture, whether the capturing thread calls it or another one.

    The other thread does not wait for the capture's end.
    """
    calls: list[bool] = []
    module = runtime(DEVICE)
    monkeypatch.setattr(module, "empty_cache", lambda: calls.append(True))

    def give_back() -> None:
        capture.empty_cache(DEVICE)

    model = on_device().target_step
    while_capturing(monkeypatch, model, (lambda: together(give_back)) if elsewhere else give_back)
    runner = graphs.make_runner(model, 1, 64, model.vocab, "pad")
    runner.forward(ForwardBatch(torch.ones(1, 1, dtype=torch.long, device=DEVICE), [0]))
    assert emulated_capture.captured == 1 and not calls
    capture.empty_cache(DEVICE)
    assert calls


def test_a_runner_may_be_dropped_while_a_slot_is_taken() -> None:
    """The lock is re-entrant: the garbage collector may drop a runner in the thread that holds the lock."""
    with graphs._lock:
        assert graphs._lock.acquire(blocking=False)
        graphs._lock.release()


def test_a_capture_without_memory_is_tried_once_more_in_another_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first try drops the cache's other captures and the cached memory. The second one can use them."""
    model = on_device().target_step
    runner = graphs.make_runner(model, 1, 64, model.vocab, "pad")
    assert isinstance(runner, graphs.GraphRunner)
    runner.forward(ForwardBatch(torch.ones(1, 1, dtype=torch.long, device=DEVICE), [0]))
    first, tries, emptied = runner.slot.pool.handle, list[int](), list[int]()

    def run_out_once() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(graphs, "empty_cache", lambda device: emptied.append(1))
    while_capturing(monkeypatch, model, run_out_once)
    runner.forward(ForwardBatch(torch.ones(1, 2, dtype=torch.long, device=DEVICE), [0]))
    assert len(tries) == 2 and len(emptied) == 1 and model.capturable and capture.enabled(DEVICE)
    assert [key[1] for key in runner.slot.steps] == [2] and runner.slot.pool.handle not in (None, first)


def test_a_step_that_memory_cannot_hold_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try would drop the other captures. Steps of other shapes, and the next runner, still capture."""
    model = on_device().target_step
    runner = graphs.make_runner(model, 1, 64, model.vocab, "pad")
    assert isinstance(runner, graphs.GraphRunner)
    pair_of_tokens = torch.ones(1, 2, dtype=torch.long, device=DEVICE)
    tries = list[int]()

    def run_out() -> None:
        tries.append(1)
        raise torch.OutOfMemoryError("out of memory")

    def run_out_in_a_call(static: RoundInputs) -> torch.Tensor:
        run_out()
        return static.lengths

    with monkeypatch.context() as patch:
        while_capturing(patch, model, run_out)
        for _ in range(3):
            runner.forward(ForwardBatch(pair_of_tokens, [0]))
            assert runner.call(("call",), RoundInputs([1]), 1, run_out_in_a_call) is None
    assert len(tries) == 4 and not runner.slot.steps
    runner.forward(ForwardBatch(torch.ones(1, 1, dtype=torch.long, device=DEVICE), [0]))
    assert [key[1] for key in runner.slot.steps] == [1]
    del runner
    later = graphs.make_runner(model, 1, 64, model.vocab, "pad")
    assert isinstance(later, graphs.GraphRunner)
    later.forward(ForwardBatch(pair_of_tokens, [0]))
    assert [key[1] for key in later.slot.steps] == [1, 2]


def test_without_memory_for_their_distributions_drafts_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_device().target_step
    runner = graphs.make_runner(model, 1, 64, model.vocab, "pad")
    assert isinstance(runner, graphs.GraphRunner)
    kept = runner.draft_probs(1, 1, model.vocab)

    def run_out(*sizes: int, **options: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", run_out)
        assert runner.draft_probs(1, 2, model.vocab) is None
        same = runner.draft_probs(1, 1, model.vocab)
    assert kept is not None and same is not None and same.data_ptr() == kept.data_ptr()
