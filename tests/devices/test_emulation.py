"""The emulated device is as strict as a GPU, and counts reads and waits, which on a GPU would only cost time.

The emulated device records unordered work of two streams. Its graphs are as strict as CUDA's, and a failed capture
does the same damage.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bass_core.sample.draw_triton import _copied_seed
from kernels.support import is_accelerator, new_stream, on, runtime

from .emulation import capture, emulated, ledger, memory
from .emulation.models import numbers

pytestmark = pytest.mark.slow

EMUL = torch.device(emulated.TYPE, 0)


def test_devices_tensors_and_views_work_as_in_torch_cuda() -> None:
    module = runtime(EMUL)
    assert is_accelerator(EMUL) and module.device_count() == 2
    assert module.get_device_name(EMUL) and module.get_device_capability() == (9, 0)
    with on(torch.device("emul", 1)):
        assert module.current_device() == 1 and torch.zeros(1, device="emul").device.index in (0, 1)
    assert module.current_device() == 0
    x = numbers().view(2, 3)
    assert x.t().stride() == (1, 3) and not x.t().is_contiguous() and type(x.data) is Tensor
    assert x[1].data_ptr() - x.data_ptr() == 12 and x[1].untyped_storage().data_ptr() == x.data_ptr()
    x[1, 1:] = 9.0
    x.t()[0].add_(1)
    assert x.cpu().tolist() == [[1, 1, 2], [4, 9, 9]]
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        x.t().view(6)
    with torch.inference_mode():
        assert (x.t()[1:] * 2).sum(0).cpu().tolist() == [6, 36]


def test_only_scalars_and_indices_may_be_on_the_host() -> None:
    x = numbers()
    mixes: list[Callable[[], object]] = [
        lambda: x + torch.ones(6),
        lambda: torch.cat((x, torch.ones(1))),
        lambda: torch.where(torch.ones(6) > 0, x, x),
        lambda: x @ torch.ones(6),
        lambda: x.gather(0, torch.tensor([1])),
        lambda: x + x.to("emul:1"),
        lambda: x.index_copy_(0, torch.tensor([1]), x[:1].clone()),
        lambda: torch.ones(6).add_(x),
    ]
    for mix in mixes:
        with pytest.raises(RuntimeError, match="device"):
            mix()
    ledger.clear()
    assert (x + torch.tensor(1.0))[torch.tensor([1, 2])].cpu().tolist() == [2, 3]
    # Only the indices were copied to the device, because a scalar is passed in the operator's call.
    assert ledger.uploads == {"blocking": 1}


def test_reads_waits_and_uploads_are_counted_and_can_be_refused() -> None:
    x, module = numbers(), runtime(EMUL)
    host: list[Callable[[], object]] = [
        lambda: x.sum().item(), x.tolist, lambda: bool(x[0] > 3), x.nonzero, lambda: x[x > 2],
        lambda: torch.equal(x, x), x.cpu,
    ]  # fmt: skip
    none: list[Callable[[], object]] = [
        lambda: x.masked_fill_(x > 2, 0.0), lambda: x.__setitem__(x > 2, 0.0), lambda: x.softmax(0).argmax(),
        lambda: x.to("emul:1"),
    ]  # fmt: skip
    for reads in (host, none):
        for read in reads:
            ledger.clear()
            read()
            assert ledger.reads.total() == (reads is host)
    ledger.clear()
    module.synchronize(), module.current_stream().synchronize()
    module.current_stream().record_event().synchronize()
    assert ledger.waits == {"device": 1, "stream": 1, "event": 1}
    torch.tensor([1], device=EMUL), torch.tensor([1]).to(EMUL, non_blocking=True)
    assert ledger.uploads == {"blocking": 1, "queued": 1}
    torch.zeros(2, 3)[:, :2].to(EMUL, non_blocking=True)
    assert ledger.uploads == {"blocking": 2, "queued": 1}
    module.set_sync_debug_mode("error")
    for read in (x.tolist, lambda: torch.tensor([1], device=EMUL)):
        with pytest.raises(RuntimeError, match="synchronizing"):
            read()


def test_a_non_blocking_copy_arrives_when_the_host_waits() -> None:
    x, host = numbers(2), torch.full((2,), -1.0)
    host.copy_(x, non_blocking=True)
    assert host.tolist() == [-1, -1]
    x.add_(1)
    runtime(EMUL).current_stream(EMUL).synchronize()
    assert host.tolist() == [0, 1]


def test_memory_is_counted_cached_freed_and_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    module = runtime(EMUL)
    gc.collect()
    module.empty_cache()
    before, free = module.memory_allocated(EMUL), module.mem_get_info(EMUL)[0]
    x = torch.zeros(1 << 18, device=EMUL)
    view = x[1:]
    assert module.memory_allocated(EMUL) - before == 1 << 20
    del x
    assert module.memory_allocated(EMUL) - before == 1 << 20
    del view
    assert module.memory_allocated(EMUL) == before and module.mem_get_info(EMUL)[0] == free - (1 << 20)
    module.empty_cache()
    assert module.mem_get_info(EMUL)[0] == free
    monkeypatch.setattr(memory, "total_bytes", module.memory_reserved(EMUL) + 100)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.zeros(1000, device=EMUL)


@pytest.mark.parametrize("order", ["nothing", "wait_stream", "wait_event", "device", "event", "read"])
def test_streams_race_unless_something_orders_them(order: str) -> None:
    module, x = runtime(EMUL), numbers()
    side, first = module.Stream(EMUL), module.current_stream(EMUL)
    orders: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "wait_stream": lambda: side.wait_stream(first),
        "wait_event": lambda: side.wait_event(first.record_event()),
        "device": lambda: module.synchronize(EMUL),
        "event": lambda: first.record_event().synchronize(),
        "read": lambda: x[0].item(),
    }
    orders[order]()
    with module.stream(side):
        x.add_(1)
    assert bool(ledger.races) == (order == "nothing")


def test_a_write_after_another_streams_read_is_a_race() -> None:
    module, x = runtime(EMUL), numbers()
    side = module.Stream(EMUL)
    side.wait_stream(module.current_stream(EMUL))
    with module.stream(side):
        x.sum()
    there = numbers().add_(1).to("emul:1")  # torch orders a copy between two devices
    assert there.sum().item() == 21 and not ledger.races
    x.zero_()
    assert [race.kind for race in ledger.races] == ["a write after a read"]


def test_every_stream_can_use_the_cached_seed() -> None:
    """The seed is copied to the device once. A stream that uses it must wait for the stream that copied it."""
    module = runtime(EMUL)
    seed = _copied_seed.__wrapped__
    with module.stream(module.Stream(EMUL)):
        cached = seed(7, EMUL)
    with module.stream(module.Stream(EMUL)):
        assert (cached + 1).item() == 8
    assert not ledger.races


def test_each_thread_has_its_own_stream_and_pooled_streams_repeat() -> None:
    module = runtime(EMUL)
    seen = []
    with new_stream(EMUL):
        thread = threading.Thread(target=lambda: seen.append(module.current_stream(EMUL)))
        thread.start()
        thread.join()
        assert module.current_stream(EMUL) != module.default_stream(EMUL) == seen[0]
    pooled = [module.Stream(EMUL) for _ in range(33)]
    assert pooled[0] == pooled[32] and len(set(pooled)) == 32


def test_events_measure_the_device_they_are_recorded_on() -> None:
    module = runtime(EMUL)
    x = numbers()
    begin, end = (module.Event(enable_timing=True) for _ in range(2))
    begin.record()
    x.add_(1).mul_(2)
    end.record()
    with pytest.raises(RuntimeError, match="not ready"):
        begin.elapsed_time(end)
    end.synchronize()
    assert begin.elapsed_time(end) == pytest.approx(0.02)
    elsewhere = module.Event(enable_timing=True)
    with module.device(1):
        elsewhere.record()
    elsewhere.synchronize()
    with pytest.raises(RuntimeError, match="two devices"):
        begin.elapsed_time(elsewhere)


def test_events_on_another_device_measure_no_time() -> None:
    """An event is recorded on the current device.

    A clock for emul:1 must therefore make emul:1 the current device.
    """
    module = runtime(EMUL)
    x = torch.zeros(2, device="emul:1")
    begin, end = (module.Event(enable_timing=True) for _ in range(2))
    begin.record()
    x.add_(1)
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) == 0


def recorded(body: Callable[[], Tensor]) -> tuple[Any, Tensor]:
    graph = runtime(EMUL).CUDAGraph()
    with runtime(EMUL).graph(graph):
        out = body()
    return graph, out


def test_only_a_replay_computes() -> None:
    """A replay reads the tensors' current contents, but keeps the host's numbers from the capture."""
    x, state, step = numbers(2), numbers(2), [2]

    def body() -> Tensor:
        state.add_(x)
        return state * step[0]

    graph, out = recorded(body)
    assert out.cpu().isnan().all() and state.cpu().tolist() == [0, 1]
    x.fill_(10)
    step[0] = 100
    graph.replay()
    assert state.cpu().tolist() == [10, 11] and out.cpu().tolist() == [20, 22]
    graph.replay()
    assert out.cpu().tolist() == [40, 42] and graph.replays == 2


def test_a_replay_reads_nan_from_unwritten_memory_and_refuses_freed_memory() -> None:
    scratch = []

    def body() -> Tensor:
        scratch.append(torch.empty(2, device=EMUL))
        return scratch[0] * 1

    graph, out = recorded(body)
    scratch[0].fill_(1)
    graph.replay()
    assert out.cpu().isnan().all()
    inputs = [numbers()]
    graph, _ = recorded(lambda: inputs[0] * 2)
    inputs.clear()
    gc.collect()
    with pytest.raises(RuntimeError, match="freed"):
        graph.replay()


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.cpu(),
        lambda x: x[x > 0],
        lambda x: torch.tensor([1], device=EMUL),
        lambda x: runtime(EMUL).synchronize(),
        lambda x: runtime(EMUL).current_stream().synchronize(),
    ],
)
def test_waiting_in_a_capture_raises_and_breaks_it(wait: Callable[[Tensor], object]) -> None:
    """As in torch, capture_end raises, the thread stays on its stream, and no memory can be freed."""
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


def test_random_numbers_on_another_stream_raise_during_a_capture() -> None:
    module = runtime(EMUL)
    graph, x = module.CUDAGraph(), numbers()
    with module.graph(graph, capture_error_mode="relaxed"):
        with module.stream(module.Stream(EMUL)), pytest.raises(RuntimeError, match="Offset increment"):
            torch.empty(2, device=EMUL).random_()
        with module.stream(module.Stream(EMUL)):
            assert (x * 1).cpu().tolist() == [0, 1, 2, 3, 4, 5]


def test_a_graph_holds_its_memory_until_it_is_deleted() -> None:
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
