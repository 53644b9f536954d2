"""Copies between the host and the emulated device, and the waits they cause.

`copy` is copy_ between any two devices. A non-blocking copy to the host arrives when the host waits for it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from . import capture, ledger, order, streams
from .memory import is_emulated, memory_of, raw_of


def host_reads(what: str, device: int) -> None:
    """Count a read: the host needs a value of the device, so it waits for the current stream."""
    key = streams.current_stream(device).key
    order.forbid(what, key)
    order.check_synchronising(what)
    ledger.reads[what] += 1


def upload(what: str, blocking: bool, device: int) -> None:
    """Count a copy from the host to the device. A blocking copy makes the host wait for the stream."""
    key = streams.current_stream(device).key
    if blocking:
        order.forbid(f"a blocking copy from the host ({what})", key)
        order.check_synchronising(f"a blocking copy from the host ({what})")
        ledger.uploads["blocking"] += 1
        order.host_waits(order.queue(key).clock)
    else:
        ledger.uploads["queued" if capture.of(key) is None else "captured"] += 1


def copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    with order.lock, torch._C._InferenceMode(False), torch.no_grad():
        if is_emulated(source) and not is_emulated(target):
            _to_host(source, target, non_blocking)
        else:
            device = target.device.index
            if not is_emulated(source):
                # A view with gaps is copied through pageable memory, so the host waits.
                gaps = not source.is_contiguous() and source.stride() != target.stride()
                upload("copy", gaps or not non_blocking, device)
                # Copy the source, because the caller may change it right after the call.
                source = source.clone()
            _on_device(source, target, device)
    return target


def _on_device(source: Tensor, target: Tensor, device: int) -> None:
    key = streams.current_stream(device).key
    tape = capture.of(key)
    reads = [memory_of(source)] if is_emulated(source) else []
    if reads and source.device != target.device:
        # Torch makes the streams of both devices wait for each other. The emulation makes only the target's stream
        # wait.
        order.follows(order.queue(key).clock, order.queue(streams.current_stream(source.device).key).clock)
    args = (raw_of(target), raw_of(source))
    if tape is None:
        torch.ops.aten.copy_.default(*args)
        order.touch(key, reads, [memory_of(target)], "aten::copy_")
        return
    tape.will_write(memory_of(target))
    for memory_read in reads:
        tape.will_read(memory_read)
    torch.ops.aten.copy_.default(*args)
    tape.tape.append(capture.Recorded(torch.ops.aten.copy_.default, args, {}, [args[0]]))


def _to_host(source: Tensor, target: Tensor, non_blocking: bool) -> None:
    """Copy to the host. A non-blocking copy changes the target only when the host waits."""
    device = source.device.index
    key = streams.current_stream(device).key
    order.forbid("a copy to the host", key)
    tick = order.touch(key, [memory_of(source)], [], "copy to the host")
    if not non_blocking:
        host_reads("copy to the host", device)
        order.host_waits(order.queue(key).clock)
        _arrive(target, raw_of(source))
        return
    ledger.reads["copy to the host"] += 1
    content = raw_of(source).clone()
    order.queue(key).arriving.append((tick, partial(_arrive, target, content)))


def _arrive(target: Tensor, content: Tensor) -> None:
    """Write `content` into the target, which may be an inference tensor although inference mode is off."""
    plain = torch.empty(0, dtype=target.dtype)
    plain.set_(target.untyped_storage(), target.storage_offset(), target.size(), target.stride()).copy_(content)
