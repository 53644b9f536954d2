"""The emulated streams and events: unordered work is recorded, and times belong to one device."""

from __future__ import annotations

import threading

import pytest
import torch

from bass_core.sample.draw_triton import seed_on
from kernels.support import own_stream, runtime

from .emulation import emulated, ledger
from .emulation.models import numbers

EMUL = torch.device(emulated.TYPE, 0)


@pytest.mark.parametrize("order", ["nothing", "wait_stream", "wait_event", "device", "event", "read"])
def test_streams_race_unless_something_orders_them(order: str) -> None:
    module, x = runtime(EMUL), numbers()
    side, first = module.Stream(EMUL), module.current_stream(EMUL)
    if order == "wait_stream":
        side.wait_stream(first)
    elif order == "wait_event":
        side.wait_event(first.record_event())
    elif order == "device":
        module.synchronize(EMUL)
    elif order == "event":
        first.record_event().synchronize()
    elif order == "read":
        x[0].item()
    with module.stream(side):
        x.add_(1)
    assert bool(ledger.races) == (order == "nothing")


def test_the_seed_is_there_for_lanes_on_other_streams() -> None:
    """All streams share the cached seed, so none may rely on luck for another stream's queued copy to be done."""
    module = runtime(EMUL)
    seed = seed_on.__wrapped__
    with module.stream(module.Stream(EMUL)):
        made = seed(7, EMUL)
    with module.stream(module.Stream(EMUL)):
        assert (made + 1).item() == 8
    assert not ledger.races


def test_a_copy_between_two_devices_is_ordered() -> None:
    there = numbers().add_(1).to("emul:1")
    assert there.sum().item() == 21 and not ledger.races


def test_a_write_after_another_streams_read_is_a_race() -> None:
    module, x = runtime(EMUL), numbers()
    side = module.Stream(EMUL)
    side.wait_stream(module.current_stream(EMUL))
    with module.stream(side):
        x.sum()
    assert not ledger.races
    x.zero_()
    assert [race.kind for race in ledger.races] == ["a write after a read"]


def test_each_thread_has_its_own_stream_and_the_pool_comes_round() -> None:
    module = runtime(EMUL)
    seen = []
    with own_stream(EMUL):
        thread = threading.Thread(target=lambda: seen.append(module.current_stream(EMUL)))
        thread.start()
        thread.join()
        assert module.current_stream(EMUL) != module.default_stream(EMUL) == seen[0]
    handed_out = [module.Stream(EMUL) for _ in range(33)]
    assert handed_out[0] == handed_out[32] and len(set(handed_out)) == 32
    assert module.Stream(EMUL, priority=-1) not in handed_out


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


def test_events_on_the_wrong_device_see_no_time_pass() -> None:
    """Why a clock for emul:1 must not record its events while emul:0 is the current device."""
    module = runtime(EMUL)
    x = torch.zeros(2, device="emul:1")
    begin, end = (module.Event(enable_timing=True) for _ in range(2))
    begin.record()
    x.add_(1)
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) == 0
