"""The emulated graphs are as strict as CUDA's, and a failed capture leaves the same damage behind."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.support import runtime

from .emulation import capture, emulated
from .emulation.models import numbers

EMUL = torch.device(emulated.TYPE, 0)


def recorded(body: Callable[[], Tensor]) -> tuple[object, Tensor]:
    """A graph of `body`, and its output."""
    graph = runtime(EMUL).CUDAGraph()
    with runtime(EMUL).graph(graph):
        out = body()
    return graph, out


def test_a_capture_computes_nothing_and_a_replay_what_was_asked() -> None:
    x, state = numbers(2), numbers(2)

    def body() -> Tensor:
        state.add_(x)
        return state * 2

    graph, out = recorded(body)
    assert out.cpu().isnan().all() and state.cpu().tolist() == [0, 1]
    x.fill_(10)
    graph.replay()
    assert state.cpu().tolist() == [10, 11] and out.cpu().tolist() == [20, 22]
    graph.replay()
    assert out.cpu().tolist() == [40, 42] and graph.replays == 2


def test_a_graph_freezes_what_the_host_knew() -> None:
    x, step = numbers(2), [1]
    graph, out = recorded(lambda: x + step[0])
    step[0] = 100
    graph.replay()
    assert out.cpu().tolist() == [1, 2]


def test_a_replay_that_reads_what_was_not_written_gives_nan() -> None:
    scratch = []

    def body() -> Tensor:
        scratch.append(torch.empty(2, device=EMUL))
        return scratch[0] * 1

    graph, out = recorded(body)
    scratch[0].fill_(1)
    graph.replay()
    assert out.cpu().isnan().all()


def test_a_replay_over_freed_memory_raises() -> None:
    held = [numbers()]
    graph, _ = recorded(lambda: held[0] * 2)
    held.clear()
    gc.collect()
    with pytest.raises(RuntimeError, match="freed"):
        graph.replay()


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x[x > 0],
        lambda x: torch.tensor([1], device=EMUL),
        lambda x: runtime(EMUL).synchronize(),
        lambda x: runtime(EMUL).current_stream().synchronize(),
    ],
)
def test_waiting_in_a_capture_raises_and_breaks_it(wait: Callable[[Tensor], object]) -> None:
    """As in torch: capture_end raises, the thread stays on its stream, and no memory can be given back."""
    x, module = numbers(), runtime(EMUL)
    graph = module.CUDAGraph()
    block = module.graph(graph)
    block.__enter__()
    with pytest.raises(torch.AcceleratorError, match="capturing"):
        wait(x)
    with pytest.raises(torch.AcceleratorError, match="previous error"):
        block.__exit__(None, None, None)
    assert module.current_stream(EMUL) != module.default_stream(EMUL)
    with pytest.raises(RuntimeError, match="captures_underway"):
        module.empty_cache()
    assert not module.is_current_stream_capturing()


def test_a_capture_can_be_made_to_fail_at_its_end() -> None:
    def fail() -> None:
        raise RuntimeError("no")

    capture.at_end = fail
    x, module = numbers(), runtime(EMUL)
    with pytest.raises(RuntimeError, match="no"):
        recorded(lambda: x * 2)
    assert module.current_stream(EMUL) != module.default_stream(EMUL)
    assert (x + 1).cpu().tolist() == [1, 2, 3, 4, 5, 6]


def test_random_numbers_of_another_stream_break_into_no_capture() -> None:
    module = runtime(EMUL)
    graph, x = module.CUDAGraph(), numbers()
    with module.graph(graph, capture_error_mode="relaxed"):
        with module.stream(module.Stream(EMUL)), pytest.raises(RuntimeError, match="Offset increment"):
            torch.empty(2, device=EMUL).random_()
        with module.stream(module.Stream(EMUL)):
            assert (x * 1).cpu().tolist() == [0, 1, 2, 3, 4, 5]


def test_a_graph_holds_its_memory_until_it_is_gone() -> None:
    module, x = runtime(EMUL), numbers()
    gc.collect()
    module.empty_cache()
    before = module.memory_reserved(EMUL)
    handle = module.graph_pool_handle()
    graph = module.CUDAGraph()
    with module.graph(graph, pool=handle):
        out = (x * 2) + 1
    pools = {s["segment_pool_id"]: (s["total_size"], s["allocated_size"]) for s in module.memory_snapshot()}
    assert pools[handle] == (48, 24)
    del out, graph
    gc.collect()
    assert module.memory_reserved(EMUL) == before
