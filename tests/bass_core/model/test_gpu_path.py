"""The GPU's forward, captured steps and fused attention on a CPU: the same code, with Triton interpreted.

Contract: greedy float32 texts equal transformers' own; a replayed step's logits equal an eager step's to 1e-4, at
any length and batch that its shape serves.
"""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bass_core import ModelPair, RequestError, generate
from bass_core.model import graphs as graphs
from bass_core.model import llama_cuda as gpu_model
from bass_core.model.base import CausalModel, HiddenStateTap
from bass_core.model.forward import ForwardBatch
from bass_core.model.graphs import GraphRunner, record_calls
from bass_core.model.llama_cuda import LlamaCuda, Plan, fits
from bass_core.model.prefix import SharedPrompts
from bass_core.model.runner import ModelRunner
from tests.models import perturbed, prompts, reference, tiny

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def no_idle_caches() -> Iterator[None]:
    """Steps recorded as calls keep their model alive, unlike CUDA graphs; clearing the idle steps frees it."""
    yield
    graphs._idle.clear()


def tokens(pair: ModelPair, rows: list[list[int]], count: int, **arguments: object) -> list[list[int]]:
    out = generate(pair, rows, max_new_tokens=count, eos_token_id=None, **arguments)
    return [sequence.token_ids for sequence in out.sequences]


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_fused_attention_writes_the_text_of_sdpa(architecture: str) -> None:
    """Ragged prompts, a sliding window of 8 in Gemma, and a draft length of 3."""
    model = tiny(architecture)
    pair = ModelPair(model, perturbed(model, 0.03))
    rows = prompts(2, longest=12)
    wanted = tokens(pair, rows, 6, attention="sdpa", draft_length=3)
    assert tokens(pair, rows, 6, attention="fused", draft_length=3) == wanted
    assert wanted == [reference(model, row, 6) for row in rows]


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("kernels", [False, True])
def test_the_gpus_forward_is_the_models(architecture: str, kernels: bool) -> None:
    """Logits and states of ragged rows; with kernels, products, rotation, write and attention are interpreted."""
    model = tiny(architecture)
    assert fits(model)
    ours, theirs = LlamaCuda(model), CausalModel(model)
    ours.has_kernels = kernels
    ours.readout = theirs.readout = HiddenStateTap((0, 1))
    caches = ours.new_cache(2, 32), theirs.new_cache(2, 32)
    generator = torch.Generator().manual_seed(1)
    lengths = [0, 0]
    for width in (4, 1, 3):
        ids = torch.randint(1, 90, (2, width), generator=generator)
        one = ours.forward(
            ForwardBatch(ids, lengths, return_states=True), caches[0], "fused" if kernels else "pad"
        )
        other = theirs.forward(ForwardBatch(ids, lengths, return_states=True), caches[1], "pad")
        torch.testing.assert_close(one.logits, other.logits, atol=2e-3, rtol=1e-4)
        torch.testing.assert_close(one.states, other.states, atol=1e-3, rtol=1e-4)
        lengths = [lengths[0] + width, lengths[1] + max(1, width - 2)]


def test_weights_are_not_joined_where_a_layer_more_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer: q 64 x 64, k and v 32 x 64, gate and up 128 x 64, 4 bytes each: 96 KiB, plus a quarter."""
    model = tiny("llama", layers=3)
    needed = (64 + 2 * 32 + 2 * 128) * 64 * 4
    for free, room in ((1.26 * needed, True), (1.24 * needed, False)):
        monkeypatch.setattr(gpu_model, "available_bytes", lambda _, free=free: free)
        assert gpu_model.has_room(model) is room


def test_one_row_takes_the_kernel_for_one_row() -> None:
    model = tiny("llama")
    ours = LlamaCuda(model)
    ids = torch.tensor([[5]])
    plain = CausalModel(model).forward(ForwardBatch(ids, [0]), CausalModel(model).new_cache(1, 8)).logits
    for plan in (Plan(), Plan(gemv=False), Plan(most_rows=0)):
        ours.plan = plan
        mine = ours.forward(ForwardBatch(ids, [0]), ours.new_cache(1, 8)).logits
        torch.testing.assert_close(mine, plain, atol=2e-3, rtol=1e-4)


def test_the_products_in_parts_are_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split-K runs only where the plan asks for it, and the logits stay the same; one row is never split."""
    from kernels.triton import linear

    taken: list[dict[str, int]] = []
    split_tiles = linear.split_tiles

    def in_parts(*arguments: object) -> dict[str, int]:
        tile = split_tiles(*arguments)
        taken.append(tile | ({"SPLIT_K": 2} if "BLOCK_M" in tile else {}))
        return taken[-1]

    monkeypatch.setattr(linear, "split_tiles", in_parts)
    model = tiny("llama")
    ours, ids = LlamaCuda(model), torch.arange(1, 11)[None]
    plain = ours.forward(ForwardBatch(ids, [0]), ours.new_cache(1, 16)).logits
    assert not taken
    ours.plan = Plan(split_k=True)
    mine = ours.forward(ForwardBatch(ids, [0]), ours.new_cache(1, 16)).logits
    assert len(taken) == 4 * ours.layers + 1
    torch.testing.assert_close(mine, plain, atol=2e-3, rtol=1e-4)


def static_runner(model: CausalModel, batch: int, length: int, backend: str = "pad") -> GraphRunner:
    return GraphRunner(model, batch, length, model.vocab, backend, record=record_calls)


def test_a_replay_is_the_eager_step() -> None:
    """Different lengths, batches smaller than their bucket, bucketed widths, and `take`."""
    model = CausalModel(tiny("llama"))
    model.readout = HiddenStateTap((0, 1), torch.nn.Linear(3 * 64, 64).requires_grad_(False))
    runner, eager = static_runner(model, 5, 64), ModelRunner(model, 5, 64, model.vocab, "pad")
    generator = torch.Generator().manual_seed(2)
    lengths = [0, 0, 0, 0, 0]
    for batch, width in ((5, 3), (5, 3), (4, 1), (3, 1), (3, 11), (1, 2)):
        ids = torch.randint(1, 90, (batch, width), generator=generator)
        take = [width - 1] * batch if width == 11 else None
        fed = ForwardBatch(ids, lengths[:batch], take=take, return_states=True)
        mine, expected = runner.forward(fed), eager.forward(fed)
        torch.testing.assert_close(mine.logits, expected.logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(mine.states, expected.states, atol=1e-4, rtol=1e-4)
        lengths = [length + 1 + row % width for row, length in enumerate(lengths[:batch])]
    # (rows, width) of the captured shapes: three rows ran in the shape of four, width 11 in that of 13.
    assert sorted(key[:2] for key in runner.slot.steps) == [(1, 2), (4, 1), (4, 13), (5, 3)]


@pytest.mark.parametrize(("kind", "backend"), [(CausalModel, "pad"), (LlamaCuda, "pad"), (LlamaCuda, "fused")])
def test_a_replay_over_prefixes_is_the_eager_step(kind: type[CausalModel], backend: str) -> None:
    """One captured step serves any starts and groups, with a window too, and a row that has left its prefix."""
    model = kind(tiny("llama"))
    if kind is LlamaCuda:
        model.has_kernels = backend == "fused"
    shared = SharedPrompts((tuple(range(1, 33)), tuple(range(40, 56))))
    runner = GraphRunner(model, 4, 32, model.vocab, backend, record=record_calls, shared=shared)
    eager = ModelRunner(model, 4, 32, model.vocab, backend, shared=shared)
    fill = ForwardBatch(torch.arange(1, 65).view(2, 32), [0, 0])
    for one in (runner, eager):
        model.forward(fill, one.cache.prefix, backend)
    steps = [
        ([(32, 0), (16, 1), (0, 0)], None),
        ([(0, 0), (32, 1), (32, 0)], None),
        ([(32, 1), (0, 1), (16, 0)], 0),
    ]
    for width, (rows, window) in enumerate(steps, start=1):
        lengths = [start + 3 * row for row, (start, _) in enumerate(rows)]
        batch = ForwardBatch(torch.arange(3 * width).view(3, width) + 5, lengths, window=window)
        for again in range(2):
            outputs = []
            for one in (runner, eager):
                for row, (start, group) in enumerate(rows[::-1] if again else rows):
                    one.cache.attach(row, group, start)
                batch.lengths = lengths[::-1] if again else lengths
                outputs.append(one.forward(batch).logits.clone())
            torch.testing.assert_close(outputs[0], outputs[1], atol=1e-4, rtol=1e-4)
    assert len(runner.slot.steps) == 3


def test_a_slot_with_prefixes_serves_those_who_need_as_many() -> None:
    model = CausalModel(tiny("llama"))
    shared = SharedPrompts((tuple(range(32)),))
    first = GraphRunner(model, 2, 40, model.vocab, "pad", record=record_calls, shared=shared)
    first.cache.attach(0, 0, 32)
    slot = first.slot
    del first
    gc.collect()
    assert static_runner(model, 2, 40).slot is not slot
    longer = SharedPrompts((tuple(range(64)),))
    assert GraphRunner(model, 2, 40, model.vocab, "pad", record=record_calls, shared=longer).slot is not slot
    again = GraphRunner(model, 2, 40, model.vocab, "pad", record=record_calls, shared=shared)
    assert again.slot is slot and again.cache.starts == [0, 0]


def test_what_fits_no_shape_runs_eagerly() -> None:
    model = CausalModel(tiny("llama"))
    runner = static_runner(model, 1, 64)
    runner.forward(ForwardBatch(torch.ones(1, 40, dtype=torch.long), [0]))
    with pytest.raises(ValueError, match="does not fit"):
        runner.forward(ForwardBatch(torch.ones(1, 6, dtype=torch.long), [251]))
    assert not runner.slot.steps
    # The next wider shape would not fit the cache; the exact one does.
    runner.forward(ForwardBatch(torch.ones(1, 10, dtype=torch.long), [246]))
    assert [key[:2] for key in runner.slot.steps] == [(1, 10)]


def test_a_cache_and_its_steps_serve_the_next_runner() -> None:
    model = CausalModel(tiny("llama"))
    first = static_runner(model, 2, 40)
    first.forward(ForwardBatch(torch.ones(2, 1, dtype=torch.long), [0, 0]))
    slot = first.slot
    beside = static_runner(model, 2, 40)
    assert beside.slot is not slot
    del first
    gc.collect()
    assert static_runner(model, 2, 50).slot is slot and len(slot.steps) == 1
    assert static_runner(model, 9, 40).slot is not slot


def test_the_least_used_step_goes_when_outputs_take_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    model = CausalModel(tiny("llama"))
    runner = static_runner(model, 1, 64)
    one = torch.ones(1, 1, dtype=torch.long)
    runner.forward(ForwardBatch(one, [0]))
    monkeypatch.setattr(graphs, "STEP_BYTES", 3 * next(iter(runner.slot.steps.values())).nbytes)
    runner.forward(ForwardBatch(one.expand(1, 2), [0]))
    runner.forward(ForwardBatch(one, [0]))
    runner.forward(ForwardBatch(one.expand(1, 3), [0]))
    assert [key[1] for key in runner.slot.steps] == [3]


def test_what_cannot_be_captured_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model = CausalModel(tiny("llama"))

    def refuse(forward: object) -> object:
        raise RuntimeError("operation not permitted when stream is capturing")

    runner = GraphRunner(model, 1, 32, model.vocab, "pad", record=refuse)
    eager = ModelRunner(model, 1, 32, model.vocab, "pad")
    ids = torch.tensor([[7, 8]])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert torch.equal(
                runner.forward(ForwardBatch(ids, [0])).logits, eager.forward(ForwardBatch(ids, [0])).logits
            )
    assert len(caplog.records) == 1 and "runs eagerly" in caplog.text


def test_texts_are_the_same_with_captured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole lanes, target and draft, as on a GPU; a stale length would lower the acceptance."""
    model = tiny("llama")
    pair = ModelPair(model, model)
    pair.target_step, pair.draft_step = CausalModel(model), CausalModel(model)
    rows = prompts(3)
    expected = [reference(model, row, 12) for row in rows]
    made: list[GraphRunner] = []

    def make(model_: CausalModel, batch: int, length: int, vocab: int, backend: str, **rest: Any) -> object:
        made.append(GraphRunner(model_, batch, length, vocab, backend, record=record_calls, **rest))
        return made[-1]

    monkeypatch.setattr("bass_core.model.graphs.make_runner", make)
    for method in ("regular", "speculative", "bass"):
        out = generate(pair, rows, method=method, max_new_tokens=12, draft_length=3, eos_token_id=None)
        assert [sequence.token_ids for sequence in out.sequences] == expected
        assert out.metrics.acceptance_rate in (None, 1.0)
    assert all(runner.slot.steps for runner in made)


def test_graphs_are_for_cuda_and_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    monkeypatch.delenv("SPACES_ZERO_GPU", raising=False)
    assert graphs.enabled(cuda) and not graphs.enabled(torch.device("cpu"))
    monkeypatch.setenv("SPACES_ZERO_GPU", "true")
    assert not graphs.enabled(cuda)


def test_a_backend_that_is_not_here_is_refused() -> None:
    with pytest.raises(RequestError, match="flash"):
        generate(ModelPair(tiny("llama")), [1, 2], attention="flash")


def test_all_imports_without_triton_and_the_kernels_are_refused() -> None:
    """In a process where triton cannot be imported."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, bass_core.model.graphs, bass_core.verify.rejection\n"
        "import kernels.reference.cache, kernels.reference.linear\n"
        "from bass_core.model.attention import choose_backend\n"
        "assert choose_backend('auto', torch.device('cuda')) == 'sdpa'\n"
        "try: choose_backend('fused', torch.device('cpu'))\n"
        "except bass_core.RequestError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "Triton is not installed" in done.stdout, done.stderr
