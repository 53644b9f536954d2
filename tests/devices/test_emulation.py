"""The emulated device itself: it is as strict as a GPU, and counts what on a GPU would only cost time."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.support import is_accelerator, on, runtime

from .emulation import emulated, ledger, memory
from .emulation.models import numbers

EMUL = torch.device(emulated.TYPE, 0)


def test_the_module_is_found_like_torch_cuda() -> None:
    module = runtime(EMUL)
    assert is_accelerator(EMUL) and module.device_count() == 2
    assert module.get_device_name(EMUL) and module.get_device_capability() == (9, 0)
    with on(torch.device("emul", 1)):
        assert module.current_device() == 1 and torch.zeros(1, device="emul").device.index in (0, 1)
    assert module.current_device() == 0


def test_tensors_have_shapes_strides_and_views() -> None:
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


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + torch.ones(6),
        lambda x: torch.cat((x, torch.ones(1))),
        lambda x: torch.where(torch.ones(6) > 0, x, x),
        lambda x: x @ torch.ones(6),
        lambda x: x.gather(0, torch.tensor([1])),
        lambda x: x + x.to("emul:1"),
        lambda x: x.index_copy_(0, torch.tensor([1]), x[:1].clone()),
        lambda x: torch.ones(6).add_(x),
    ],
)
def test_devices_are_not_mixed(mix: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(RuntimeError, match="device"):
        mix(numbers())


def test_a_host_scalar_and_host_indices_are_welcome() -> None:
    x = numbers()
    assert (x + torch.tensor(1.0))[torch.tensor([1, 2])].cpu().tolist() == [2, 3]
    # The indices were copied to the device; the scalar is part of the call.
    assert ledger.uploads == {"blocking": 1}


@pytest.mark.parametrize(
    ("read", "count"),
    [
        (lambda x: x.sum().item(), 1),
        (lambda x: x.tolist(), 1),
        (lambda x: bool(x[0] > 3), 1),
        (lambda x: x.nonzero(), 1),
        (lambda x: x[x > 2], 1),
        (lambda x: torch.equal(x, x), 1),
        (lambda x: x.cpu(), 1),
        (lambda x: x.masked_fill_(x > 2, 0.0), 0),
        (lambda x: x.__setitem__(x > 2, 0.0), 0),
        (lambda x: x.softmax(0).argmax(), 0),
        (lambda x: x.to("emul:1"), 0),
    ],
)
def test_every_read_on_the_host_is_counted(read: Callable[[Tensor], object], count: int) -> None:
    x = numbers()
    read(x)
    assert ledger.reads.total() == count


def test_a_copy_that_does_not_block_arrives_when_the_host_waits() -> None:
    x, host = numbers(2), torch.full((2,), -1.0)
    host.copy_(x, non_blocking=True)
    assert host.tolist() == [-1, -1]
    x.add_(1)
    runtime(EMUL).current_stream(EMUL).synchronize()
    assert host.tolist() == [0, 1]


def test_waits_and_uploads_are_counted() -> None:
    module = runtime(EMUL)
    (
        module.synchronize(),
        module.current_stream().synchronize(),
        module.current_stream().record_event().synchronize(),
    )
    assert ledger.waits == {"device": 1, "stream": 1, "event": 1}
    torch.tensor([1], device=EMUL), torch.tensor([1]).to(EMUL, non_blocking=True)
    assert ledger.uploads == {"blocking": 1, "queued": 1}


def test_waits_can_be_refused() -> None:
    runtime(EMUL).set_sync_debug_mode("error")
    x = numbers()
    for read in (x.tolist, lambda: torch.tensor([1], device=EMUL)):
        with pytest.raises(RuntimeError, match="synchronizing"):
            read()


def test_memory_is_counted_kept_and_given_back() -> None:
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


def test_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "total_bytes", runtime(EMUL).memory_reserved(EMUL) + 100)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.zeros(1000, device=EMUL)
