"""The GPU's forward, captured steps and fused attention, on a CPU with Triton interpreted."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

from bass_core import ModelPair, generate
from bass_core.model import graphs as graphs
from bass_core.model import llama_cuda as gpu_model
from bass_core.model.base import CausalModel, HiddenStateTap
from bass_core.model.forward import CapturedBatch, ForwardBatch
from bass_core.model.graphs import GraphRunner, record_calls
from bass_core.model.llama_cuda import LlamaCuda, ProductPlan, fits
from bass_core.model.prefix import SharedPrompts
from bass_core.model.runner import ModelRunner
from bass_core.predict.shapes import MODELS, llama, shape
from kernels.backends import BACKENDS, captured_extent
from kernels.shapes import Card
from kernels.support import set_meta_card
from kernels.triton.launch import collected
from tests.support import ROOT
from tests.support.models import prompts, reference, texts_of, tiny, tiny_pair


@pytest.fixture(autouse=True)
def no_idle_caches() -> Iterator[None]:
    """Free the models after each test. Unlike CUDA graphs, steps recorded as calls keep their models alive."""
    yield
    graphs._idle.clear()


def tokens(pair: ModelPair, rows: list[list[int]], count: int, **arguments: object) -> list[list[int]]:
    output = generate(pair, rows, max_new_tokens=count, eos_token_id=None, **arguments)
    return texts_of(output)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_fused_attention_writes_the_text_of_sdpa(architecture: str) -> None:
    """Prompts differ in length, the draft length is 3, and Gemma has a sliding window of 8."""
    model = tiny(architecture)
    pair = tiny_pair(0.03, target=model)
    rows = prompts(2, longest=12)
    expected = tokens(pair, rows, 6, attention="sdpa", draft_length=3)
    assert tokens(pair, rows, 6, attention="fused", draft_length=3) == expected
    assert expected == [reference(model, row, 6) for row in rows]


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "kernels", ["", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ours", "torch"))]
)
def test_the_gpus_forward_equals_the_models(architecture: str, kernels: str) -> None:
    """Compare logits and states of ragged rows.

    kernels: run rotation, cache writes and attention in Triton, and matrix products too ("ours") or in torch.
    """
    model = tiny(architecture)
    assert fits(model)
    ours, theirs = LlamaCuda(model), CausalModel(model)
    ours.has_kernels = bool(kernels)
    if kernels == "torch":
        ours.plan = ProductPlan(most_rows=0)
    ours.readout = theirs.readout = HiddenStateTap((0, 1))
    caches = ours.new_cache(2, 32), theirs.new_cache(2, 32)
    generator = torch.Generator().manual_seed(1)
    lengths = [0, 0]
    for width in (4, 1, 3):
        ids = torch.randint(1, 90, (2, width), generator=generator)
        ours_out = ours.forward(
            ForwardBatch(ids, lengths, return_states=True), caches[0], "fused" if kernels else "pad"
        )
        theirs_out = theirs.forward(ForwardBatch(ids, lengths, return_states=True), caches[1], "pad")
        torch.testing.assert_close(ours_out.logits, theirs_out.logits, atol=2e-3, rtol=1e-4)
        torch.testing.assert_close(ours_out.states, theirs_out.states, atol=1e-3, rtol=1e-4)
        lengths = [lengths[0] + width, lengths[1] + max(1, width - 2)]


class Operators(TorchDispatchMode):
    """Counts torch's operators that run a kernel: not views, and not memory that nobody fills."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if not function.is_view and "empty" not in function.name():
            self.seen[function.name()] += 1
        return function(*arguments, **(options or {}))


def kernels_of(name: str, layers: int, rows: int, width: int) -> Counter[str]:
    """Count the kernels of a captured step on an H100 or H200, from tensors without data."""
    vocab, hidden, mlp, _, heads, kv_heads, tied = MODELS[name]
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(llama(vocab, hidden, mlp, layers, heads, kv_heads, tied))
        tokens, lengths = (torch.zeros(sizes, dtype=torch.long) for sizes in ((rows, width), (rows,)))
    set_meta_card(Card.of_capability(90))
    try:
        step = LlamaCuda(model.to(torch.bfloat16).eval())
        cache = step.new_cache(rows, 2048)
        plan = cache.plan_captured(lengths, width)
        with torch.inference_mode(), collected() as launches, Operators() as operators:
            step._compute(CapturedBatch(tokens, lengths), plan, cache, "fused")
    finally:
        set_meta_card(None)
    return Counter(launch.kernel.__name__ for launch in launches) + operators.seen


@pytest.mark.parametrize(
    ("name", "rows", "width", "most"),
    [
        ("135M", 1, 1, 5),
        ("135M", 8, 5, 5),
        ("1.7B", 1, 4, 8),
        ("7.8B", 1, 1, 5),
        ("7.8B", 8, 5, 8),
        ("7.8B", 32, 9, 8),
    ],
)
def test_kernels_per_layer(name: str, rows: int, width: int, most: int) -> None:
    """With torch's products, there are separate kernels for two norms (one adds the residual too) and the gate."""
    layer = kernels_of(name, 3, rows, width) - kernels_of(name, 2, rows, width)
    assert layer.total() == most and layer["attend"] == 1, layer
    if width > 1:
        assert most == 5 + shape(name).torch_kernels


def test_weights_are_joined_only_if_one_more_layer_fits_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer has q 64 x 64, k and v 32 x 64, gate and up 128 x 64, so 96 KiB.

    Free memory must exceed this size by a quarter.
    """
    model = tiny("llama", layers=3)
    needed = (64 + 2 * 32 + 2 * 128) * 64 * 4
    for free, room in ((1.26 * needed, True), (1.24 * needed, False)):
        monkeypatch.setattr(gpu_model, "available_bytes", lambda _, free=free: free)
        assert gpu_model.has_room(model) is room


def static_runner(model: CausalModel, batch: int, length: int, backend: str = "pad") -> GraphRunner:
    return GraphRunner(model, batch, length, model.vocab, backend, record=record_calls)


@pytest.mark.parametrize(
    ("kind", "backend"),
    [(CausalModel, "pad"), (LlamaCuda, "pad"), pytest.param(LlamaCuda, "fused", marks=pytest.mark.slow)],
)
def test_a_replay_over_prefixes_equals_the_eager_step(kind: type[CausalModel], backend: str) -> None:
    """One captured step serves rows with any prefix, or with none, and any window."""
    model = kind(tiny("llama"))
    if kind is LlamaCuda:
        model.has_kernels = backend == "fused"
    shared = SharedPrompts((tuple(range(1, 33)), tuple(range(40, 56))))
    runner = GraphRunner(model, 4, 32, model.vocab, backend, record=record_calls, shared=shared)
    eager = ModelRunner(model, 4, 32, model.vocab, backend, shared=shared)
    fill = ForwardBatch(torch.arange(1, 65).view(2, 32), [0, 0])
    for each in (runner, eager):
        model.forward(fill, each.cache.prefix, backend)
    steps = [
        ([(32, 0), (16, 1), (0, 0)], None),
        ([(0, 0), (32, 1), (32, 0)], None),
        ([(32, 1), (0, 1), (16, 0)], 0),
    ]
    for width, (rows, window) in enumerate(steps, start=1):
        lengths = [start + 3 * row for row, (start, _) in enumerate(rows)]
        batch = ForwardBatch(torch.arange(3 * width).view(3, width) + 5, lengths, window=window)
        for reverse in range(2):
            outputs = []
            for each in (runner, eager):
                for row, (start, group) in enumerate(rows[::-1] if reverse else rows):
                    each.cache.attach(row, group, start)
                batch.lengths = lengths[::-1] if reverse else lengths
                outputs.append(each.forward(batch).logits.clone())
            torch.testing.assert_close(outputs[0], outputs[1], atol=1e-4, rtol=1e-4)
    assert len(runner.slot.steps) == 3


def test_the_next_runner_with_the_same_prefix_shape_reuses_cache_and_steps() -> None:
    model = CausalModel(tiny("llama"))

    def make_runner(batch: int = 2, length: int = 40, prefix: int = 32) -> GraphRunner:
        shared = SharedPrompts((tuple(range(prefix)),) if prefix else ())
        return GraphRunner(model, batch, length, model.vocab, "pad", record=record_calls, shared=shared)

    first = make_runner()
    first.forward(ForwardBatch(torch.ones(2, 1, dtype=torch.long), [0, 0]))
    first.cache.attach(0, 0, 32)
    slot = first.slot
    assert make_runner().slot is not slot, "the slot is in use"
    del first
    gc.collect()
    assert all(make_runner(*other).slot is not slot for other in ((9, 40, 32), (2, 40, 64), (2, 40, 0)))
    reused = make_runner(length=50)
    assert reused.slot is slot and len(slot.steps) == 1 and reused.cache.starts == [0, 0]


def test_a_batch_that_fits_no_shape_runs_eagerly() -> None:
    model = CausalModel(tiny("llama"))
    runner = static_runner(model, 1, 64)
    runner.forward(ForwardBatch(torch.ones(1, 40, dtype=torch.long), [0]))
    with pytest.raises(ValueError, match="does not fit"):
        runner.forward(ForwardBatch(torch.ones(1, 6, dtype=torch.long), [251]))
    assert not runner.slot.steps
    # A step padded to the next wider shape would not fit the cache; an unpadded step does.
    runner.forward(ForwardBatch(torch.ones(1, 10, dtype=torch.long), [246]))
    assert [key[:2] for key in runner.slot.steps] == [(1, 10)]


def test_graphs_are_enabled_on_cuda_except_zero_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    monkeypatch.delenv("SPACES_ZERO_GPU", raising=False)
    assert graphs.enabled(cuda) and not graphs.enabled(torch.device("cpu"))
    monkeypatch.setenv("SPACES_ZERO_GPU", "true")
    assert not graphs.enabled(cuda)


@pytest.mark.slow
def test_without_triton_all_modules_import_and_fused_attention_is_refused() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, bass_core.model.graphs, bass_core.verify.rejection\n"
        "import kernels.reference.cache, kernels.reference.linear\n"
        "from bass_core.model.attention import choose_backend\n"
        "assert choose_backend('auto', torch.device('cuda')) == 'sdpa'\n"
        "try: choose_backend('fused', torch.device('cpu'))\n"
        "except bass_core.RequestError as error: print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "Triton is not installed" in result.stdout, result.stderr


@pytest.mark.parametrize(("kind", "backend"), [(CausalModel, "pad"), (LlamaCuda, "sdpa")])
def test_a_captured_step_reads_no_columns_past_its_extent(
    kind: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the columns past the extent are NaN, the logits of ragged rows equal those of an eager step."""
    model = kind(tiny("llama"))
    if kind is LlamaCuda:
        model.has_kernels = False  # Captured and eager steps call the same kernels.
    caches = [model.new_cache(2, 64) for _ in range(2)]
    torch.manual_seed(0)
    ids = torch.randint(1, 90, (2, 9))
    for cache in caches:
        model.forward(ForwardBatch(ids, [0, 0]), cache)
        cache.buffer[..., 16:, :] = torch.nan
    new_ids, lengths = torch.randint(1, 90, (2, 3)), [9, 4]
    eager = model.forward(ForwardBatch(new_ids, lengths), caches[0], backend).logits
    seen: list[int] = []
    attend = BACKENDS[backend]

    def recorded_attend(query: torch.Tensor, key: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        seen.append(key.shape[2])
        return attend(query, key, *rest, **options)

    monkeypatch.setitem(BACKENDS, backend, recorded_attend)
    captured = model.forward_captured(CapturedBatch(new_ids, torch.tensor(lengths), 16), caches[1], backend)
    torch.testing.assert_close(captured.logits, eager, atol=1e-4, rtol=1e-4)
    assert set(seen) == {16}
    model.forward_captured(CapturedBatch(new_ids, torch.tensor(lengths)), caches[1], backend)
    assert set(seen) == {16, 64}


def test_extents_grow_by_powers_of_two() -> None:
    """Growth by powers of two means few captures, and at most twice the columns needed (or 256).

    Backends that stop at each row's end need only one extent.
    """
    extents = {columns: captured_extent("pad", columns, 3000) for columns in range(1, 3001)}
    assert sorted(set(extents.values())) == [256, 512, 1024, 2048, 3000]
    assert all(columns <= extent <= max(256, 2 * columns) for columns, extent in extents.items())
    assert captured_extent("sdpa", 10, 64) == 64
    assert {captured_extent(backend, 10, 3000) for backend in ("fused", "flash")} == {3000}


def test_a_step_is_captured_again_once_a_row_outgrows_its_extent() -> None:
    """In a cache of 512 columns, a step is captured over 256, and again over 512 once a row is longer."""
    model = CausalModel(tiny("llama"))
    runner = GraphRunner(model, 2, 512, model.vocab, "pad", record=record_calls)
    eager = ModelRunner(model, 2, 512, model.vocab, "pad")
    ids = torch.tensor([[5, 6], [7, 8]])
    for lengths, captured in (([0, 0], [256]), ([254, 9], [256]), ([255, 9], [256, 512]), ([300, 9], [256, 512])):
        replayed, expected = (
            runner.forward(ForwardBatch(ids, lengths)).logits,
            eager.forward(ForwardBatch(ids, lengths)).logits,
        )
        torch.testing.assert_close(replayed, expected, atol=1e-4, rtol=1e-4)
        assert [key[-2] for key in runner.slot.steps] == captured
