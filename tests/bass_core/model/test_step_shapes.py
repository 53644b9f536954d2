"""Which cache columns a captured step reads, and that a forward copies host numbers without waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bass_core.model import graphs as graphs
from bass_core.model.base import CausalModel
from bass_core.model.forward import CapturedBatch, ForwardBatch
from bass_core.model.graphs import GraphRunner, record_calls
from bass_core.model.llama_cuda import LlamaCuda
from bass_core.model.runner import ModelRunner
from kernels.backends import BACKENDS, captured_extent
from tests.models import tiny


@pytest.mark.parametrize("kind", [CausalModel, LlamaCuda])
@pytest.mark.parametrize("backend", ["pad", "sdpa"])
def test_a_captured_step_looks_no_further_than_its_extent(
    kind: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same logits as an eager step over ragged rows; the columns past the extent are NaN."""
    model = kind(tiny("llama"))
    caches = [model.new_cache(2, 64) for _ in range(2)]
    torch.manual_seed(0)
    ids = torch.randint(1, 90, (2, 9))
    for cache in caches:
        model.forward(ForwardBatch(ids, [0, 0]), cache)
        cache.buffer[..., 16:, :] = torch.nan
    more, lengths = torch.randint(1, 90, (2, 3)), [9, 4]
    eager = model.forward(ForwardBatch(more, lengths), caches[0], backend).logits
    seen: list[int] = []
    attend = BACKENDS[backend]

    def watched(query: torch.Tensor, key: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        seen.append(key.shape[2])
        return attend(query, key, *rest, **options)

    monkeypatch.setitem(BACKENDS, backend, watched)
    captured = model.forward_captured(CapturedBatch(more, torch.tensor(lengths), 16), caches[1], backend)
    torch.testing.assert_close(captured.logits, eager, atol=1e-4, rtol=1e-4)
    assert set(seen) == {16}
    model.forward_captured(CapturedBatch(more, torch.tensor(lengths)), caches[1], backend)
    assert set(seen) == {16, 64}


def test_extents_grow_by_powers_of_two() -> None:
    """Few captures, at most twice the needed columns; backends that stop at each row's end need one extent."""
    extents = {columns: captured_extent("pad", columns, 3000) for columns in range(1, 3001)}
    assert sorted(set(extents.values())) == [256, 512, 1024, 2048, 3000]
    assert all(columns <= extent <= max(256, 2 * columns) for columns, extent in extents.items())
    assert captured_extent("sdpa", 10, 64) == 64
    assert {captured_extent(backend, 10, 3000) for backend in ("fused", "flash")} == {3000}


@pytest.mark.parametrize("backend", ["pad", "sdpa"])
def test_a_replay_computes_no_columns_that_no_row_has_reached(backend: str) -> None:
    """A cache of 512 columns: a step is captured over 256, and again over 512 once a row outgrows them."""
    model = CausalModel(tiny("llama"))
    runner = GraphRunner(model, 2, 512, model.vocab, backend, record=record_calls)
    eager = ModelRunner(model, 2, 512, model.vocab, backend)
    ids = torch.tensor([[5, 6], [7, 8]])
    for lengths, captured in (([0, 0], [256]), ([254, 9], [256]), ([255, 9], [256, 512]), ([300, 9], [256, 512])):
        mine, expected = (
            runner.forward(ForwardBatch(ids, lengths)).logits,
            eager.forward(ForwardBatch(ids, lengths)).logits,
        )
        torch.testing.assert_close(mine, expected, atol=1e-4, rtol=1e-4)
        assert [step.batch.extent for step in runner.slot.steps.values()] == captured
    graphs._idle.clear()


@pytest.mark.parametrize("kind", [CausalModel, LlamaCuda])
def test_numbers_reach_the_device_without_a_wait(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.tensor(list, device=...) copies from memory that is not pinned, and so waits for the stream."""
    model = kind(tiny("llama"))
    real = torch.tensor

    def checked(*values: Any, **options: Any) -> torch.Tensor:
        assert "device" not in options, "to_device is for that"
        return real(*values, **options)

    ids, lengths, take = torch.ones(2, 4, dtype=torch.long), [0, 0], [3, 1]
    whole = model.forward(ForwardBatch(ids, lengths), model.new_cache(2, 8)).logits
    monkeypatch.setattr(torch, "tensor", checked)
    taken = model.forward(ForwardBatch(ids, lengths, take=take), model.new_cache(2, 8)).logits
    torch.testing.assert_close(taken, whole[torch.arange(2), take], atol=1e-4, rtol=1e-4)
