"""Steps captured on the emulated device: a captured forward never waits, and a replay equals an eager step.

The logits differ by float32 rounding, because attention sees less padding in the eager step. A round, also one of
trees, waits only for the result of its verification.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch

from bass_core import generate
from bass_core.model.base import CausalModel, HiddenStateTap
from bass_core.model.forward import CapturedBatch, ForwardBatch, verified_tree
from bass_core.model.graphs import GraphRunner
from bass_core.model.llama_cuda import LlamaCuda
from bass_core.sample.noise import NoiseKeys
from bass_core.sample.params import SamplingParams
from bass_core.verify.rules import VERIFICATIONS
from bass_core.verify.tree import verify_tree
from bass_core.verify.tree_shape import JudgedTree
from kernels.backends import CAPTURABLE
from kernels.support import runtime
from tests.support.models import BUILDERS, STATEFUL, texts_of, tiny

from ..conformance import table
from .emulation import capture, emulated, ledger
from .emulation.models import TOKENS, pair

pytestmark = pytest.mark.slow

EMUL = torch.device(emulated.TYPE, 0)
CUDA = [(LlamaCuda, name) for name in ("llama", "qwen3")]
# Steps of models with states are not captured.
CAPTURED = [name for name in BUILDERS if name not in STATEFUL]
FORWARDS: list[tuple[type[CausalModel], str]] = [*((CausalModel, name) for name in CAPTURED), *CUDA]
BACKENDS = sorted(set(CAPTURABLE) & {"pad", "sdpa"})


def record(forward: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """Run `forward` once to warm up, then capture it.

    Return the outputs of the capture and a function that replays it.
    """
    module = runtime(EMUL)
    stream = module.Stream(EMUL)
    stream.wait_stream(module.current_stream(EMUL))
    with module.stream(stream):
        forward()
    stream.synchronize()
    graph = module.CUDAGraph()
    with module.graph(graph, stream=stream, capture_error_mode="thread_local"):
        outputs = forward()
    stream.synchronize()
    return outputs, graph.replay


@pytest.mark.parametrize(
    ("kind", "architecture", "backend"),
    [(*forward, backend) for forward, backend in zip(FORWARDS, cycle(BACKENDS), strict=False)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_captured_forward_never_waits(kind: type[CausalModel], architecture: str, backend: str) -> None:
    """In a capture, reads and blocking copies raise, and a queued copy would freeze the host's numbers."""
    model = kind(tiny(architecture).to(EMUL))
    model.readout = HiddenStateTap((0, 1))
    ids, lengths = torch.ones(2, 3, dtype=torch.long, device=EMUL), torch.zeros(2, dtype=torch.long, device=EMUL)
    cache, eager = model.new_cache(2, 32), model.new_cache(2, 32)
    ledger.clear()
    batch = CapturedBatch(ids, lengths, return_states=True)
    output, replay = record(lambda: model.forward_captured(batch, cache, backend))
    assert not ledger.reads and not ledger.uploads and not ledger.races
    generator = torch.Generator().manual_seed(1)
    for step in range(3):
        ids.copy_(torch.randint(1, 90, (2, 3), generator=generator))
        lengths.copy_(torch.tensor([step, 2 * step]))
        replay()
        expected = model.forward(ForwardBatch(ids, lengths.tolist(), return_states=True), eager, backend)
        for mine, theirs in ((output.logits, expected.logits), (output.states, expected.states)):
            torch.testing.assert_close(mine.cpu(), theirs.cpu(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_runner_of_captured_steps_reads_nothing(architecture: str) -> None:
    """The batches have fewer rows than the captured steps, want one column, and two have the same width."""
    model = pair(architecture, "none").target_step
    runner = GraphRunner(model, 4, 64, model.vocab, "pad", record=record)
    eager = model.new_cache(4, 64)
    lengths = [0, 0, 0]
    for width in (4, 2, 2, 1):
        ids = torch.arange(3 * width).view(3, width) % 90 + 1
        before = ledger.reads.total()
        batch = ForwardBatch(ids.to(EMUL), lengths, wanted_columns=[width - 1] * 3)
        mine = runner.forward(batch).logits
        assert ledger.reads.total() == before
        theirs = model.forward(batch, eager, "pad").logits
        torch.testing.assert_close(mine.cpu(), theirs.cpu(), atol=1e-4, rtol=1e-4)
        lengths = [length + 1 + row % width for row, length in enumerate(lengths)]
    assert sorted(key[:2] for key in runner.slot.steps) == [(4, 1), (4, 2), (4, 4)]


@pytest.mark.parametrize(
    ("method", "architecture"), [*(("bass", name) for name in CAPTURED), ("regular", "llama")]
)
def test_captured_steps_write_the_eager_text(method: str, architecture: str) -> None:
    draft = "perturbed"
    rows = table.PROMPTS["different"][:3]
    out = generate(
        pair(architecture, draft), rows, method=method, draft_length=3, attention="pad", max_new_tokens=TOKENS
    )
    assert texts_of(out) == [text[:TOKENS] for text in table.expected(architecture, "greedy")[:3]]
    assert capture.captured > 0 and pair(architecture, draft).target_step.capturable
    assert not ledger.races and not ledger.uploads["captured"]


@pytest.mark.parametrize(
    ("method", "name"),
    [("bass", "head"), ("bass", "adaptive_head"), ("bass", "adaptive"), ("speculative", "perturbed")],
)
def test_captured_steps_write_the_eager_sampled_text(
    method: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, rows = table.DRAFTS[name], table.PROMPTS["different"][:2]

    def run() -> list[list[int]]:
        return texts_of(
            generate(
                pair("llama", draft.kind), rows, method=method, drafter=draft.drafter, draft_length=3,
                attention="sdpa", max_new_tokens=TOKENS, sampling=table.SAMPLING["coupled, filtered"], seed=5,
            )
        )  # fmt: skip

    captured = run()
    assert capture.captured > 0
    monkeypatch.setenv("BASS_GRAPHS", "0")
    assert run() == captured


def random_parents(dice: random.Random, count: int) -> list[list[int]]:
    """Return trees for three rows; each draft follows an earlier one or the newest token."""
    return [[dice.randrange(-1, draft) for draft in range(count - row)] for row in range(3)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_captured_step_of_trees_reads_nothing(backend: str) -> None:
    """A chain and a tree of equal width are captured separately. Another tree replays the capture of the first."""
    model, dice = pair("llama", "none").target_step, random.Random(1)
    runner = GraphRunner(model, 4, 64, model.vocab, backend, record=record)
    eager, lengths = model.new_cache(4, 64), [0, 0, 0]
    for is_tree in (False, True, True, False, True):
        ids = torch.arange(15).view(3, 5) % 90 + 1
        tree = verified_tree(random_parents(dice, 4)) if is_tree else None
        batch = ForwardBatch(ids.to(EMUL), lengths, tree=tree)
        before, uploads = ledger.reads.total(), ledger.uploads["captured"]
        mine = runner.forward(batch).logits
        assert ledger.reads.total() == before and ledger.uploads["captured"] == uploads and not ledger.races
        theirs = model.forward(batch, eager, backend).logits
        torch.testing.assert_close(mine.cpu(), theirs.cpu(), atol=1e-4, rtol=1e-4)
        lengths = [length + 1 + row for row, length in enumerate(lengths)]
    assert sorted((*key[:2], key[-1]) for key in runner.slot.steps) == [(4, 5, False), (4, 5, True)]


def test_an_accepted_path_is_moved_without_a_wait() -> None:
    """The paths of all rows move together, in all layers. Slots after a path keep their contents."""
    model = pair("llama", "none").target_step
    cache = model.new_cache(2, 16)
    cache.buffer.copy_(torch.randn(cache.buffer.shape, generator=torch.Generator().manual_seed(0)))
    before = cache.buffer.cpu().clone()
    ledger.clear()
    cache.keep_all([(1, 5, [5, 7, 11]), (0, 2, [3])])
    assert not ledger.reads and not ledger.waits.total() and ledger.uploads == {"queued": 1}
    expected = before.clone()
    expected[:, :, 1, :, 5:8] = before[:, :, 1, :, [5, 7, 11]]
    expected[:, :, 0, :, 2] = before[:, :, 0, :, 3]
    assert torch.equal(cache.buffer.cpu(), expected)


@pytest.mark.parametrize(("temperature", "verification"), [(0.0, "rejection"), (0.8, "coupled")])
def test_verifying_a_tree_reads_the_device_at_most_once(temperature: float, verification: str) -> None:
    parents = random_parents(random.Random(2), 6)
    tokens = [[(7 * draft) % 30 for draft in range(len(row))] for row in parents]
    logits = torch.randn(3, 7, 30, generator=torch.Generator().manual_seed(1)).to(EMUL)
    keys = NoiseKeys(3, torch.arange(3), torch.arange(3) + 4)
    params = SamplingParams(temperature)
    here = NoiseKeys(3, keys.sequence_ids.to(EMUL), keys.positions.to(EMUL))
    ledger.clear()
    mine = verify_tree(logits, JudgedTree(tokens, parents), here, params, VERIFICATIONS[verification])
    assert ledger.reads.total() <= 1 and not ledger.uploads["blocking"]
    theirs = verify_tree(logits.cpu(), JudgedTree(tokens, parents), keys, params, VERIFICATIONS[verification])
    assert [(row.path, row.next_token) for row in mine] == [(row.path, row.next_token) for row in theirs]
