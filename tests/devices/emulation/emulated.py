"""The device "emul": a PrivateUse1 backend of torch, written in Python. The CPU computes its operators.

Importing this module registers the device for the rest of the process and changes nothing else. A tensor of the
device has the usual shape, strides and views, but its data is in a CPU storage (memory.py). As on a GPU, an
operator raises if its tensors are on two devices. Reads on the host are counted (ledger.py). Each operator belongs
to the current stream (order.py), or to the tape of a capture on that stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from . import capture, memory, order, runtime, streams
from .memory import is_emulated, memory_of, raw_of
from .order import TYPE
from .transfers import copy, host_reads

CPU = torch.device("cpu")
_SET = torch.ops.aten.set_.source_Storage_storage_offset
_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
# Operators that make the host wait, because their results are values or have sizes that depend on values.
_READS = {
    "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::masked_select",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
}  # fmt: skip
# Operators whose indices may be tensors on the host, and whose masks make the host wait for their number of ones.
_INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_RANDOM = ("rand", "normal", "uniform", "bernoulli", "multinomial", "exponential", "dropout")


class _Shell(torch.Tensor):
    """A tensor without data. `wrap` makes a shell only to get its plain tensor (`.data`)."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> None:
        raise AssertionError("a shell is never used")


def wrap(raw: Tensor, device: int) -> Tensor:
    """Return a tensor of the device that uses the memory of `raw`, a CPU tensor that fills its storage."""
    place, cpu_storage = torch.device(TYPE, device), raw.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(cpu_storage.data_ptr(), place, cpu_storage.nbytes())
    # Leave inference mode, because torch requires plain tensors for a view of a plain tensor.
    with torch._C._InferenceMode(False), torch._C._DisableTorchDispatch():
        tensor: Tensor = torch.Tensor._make_wrapper_subclass(_Shell, (0,), dtype=raw.dtype, device=place).data
        _SET.redispatch(_ON_CPU, tensor, storage, 0, raw.size(), raw.stride())
    tape = capture.of(streams.current_stream(device).key)
    allocated = memory.Memory(cpu_storage, device, None if tape is None else tape.pool)
    memory.attach(tensor, allocated)
    if tape is not None:
        tape.allocated.append(raw)
        tape.inside[id(allocated)] = allocated
    return tensor


def _run(op: Any, *args: Any, **named: Any) -> Any:
    with order.lock, torch._C._InferenceMode(False), torch.no_grad():
        return _Call(op, args, named).result()


def _each(x: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` in lists, tuples and dicts; torch's tree_map costs more than most operators here."""
    if isinstance(x, list | tuple):
        return type(x)(_each(item, change) for item in x)
    return {name: _each(item, change) for name, item in x.items()} if isinstance(x, dict) else change(x)


def _leaves(values: Iterable[Any]) -> list[Any]:
    leaves: list[Any] = []
    for x in values:
        leaves += _leaves(x) if isinstance(x, list | tuple) else [x]
    return leaves


@dataclass(frozen=True)
class _Schema:
    """An operator's name, its arguments, and which of them are tensors or are written."""

    name: str
    arguments: tuple[str, ...]
    tensors: frozenset[str]
    written: tuple[str, ...]


@cache
def _schema_of(op: Any) -> _Schema:
    specs = op._schema.arguments
    return _Schema(
        op._schema.name,
        tuple(spec.name for spec in specs),
        frozenset(spec.name for spec in specs if "Tensor" in str(spec.type)),
        tuple(spec.name for spec in specs if spec.alias_info is not None and spec.alias_info.is_write),
    )


class _Call:
    def __init__(self, op: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.op, self.args, self.named = op, args, named
        self.schema = _schema_of(op)
        self.name = self.schema.name
        self.leaves = _leaves((*args, *named.values()))
        self.tensors = [t for t in self.leaves if isinstance(t, Tensor)]
        self.emulated = [t for t in self.tensors if is_emulated(t)]
        self.device = self._device()
        self.key = streams.current_stream(self.device).key
        self.capture = capture.of(self.key)

    def _device(self) -> int:
        devices = {t.device.index for t in self.emulated}
        # As on a GPU, scalars and the indices of a tensor may be on the CPU.
        indices = _leaves(self.args[1]) if self.name in _INDEXED else []
        cpu_tensors = [t for t in self.tensors if not is_emulated(t) and t.dim() > 0]
        if len(devices) > 1 or (devices and any(all(t is not i for i in indices) for t in cpu_tensors)):
            shown = [f"{tuple(t.shape)} on {t.device}" for t in self.tensors]
            raise RuntimeError(f"devices mixed in {self.name}: {', '.join(shown)}")
        if devices:
            return int(devices.pop())
        named = [x for x in self.leaves if isinstance(x, torch.device)]
        return order.index_of(named[0] if named else None)

    def result(self) -> Any:
        reads = self._reads_on_host()
        if reads:
            host_reads(self.name, self.device)
        if order.captures and self.capture is None and any(word in self.name for word in _RANDOM):
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        raws = {id(t): raw_of(t) for t in self.emulated}
        args, named = _each((self.args, self.named), lambda x: self._to_cpu(x, raws))
        args = tuple(
            torch.tensor(value) if isinstance(value, bool | int | float) and name in self.schema.tensors else value
            for value, name in zip(args, self.schema.arguments, strict=False)
        )
        written = self._written()
        if self.capture is not None:
            for target in written:
                self.capture.will_write(memory_of(target))
        out = self.op(*args, **named)
        self._follow_resized(raws)
        shown = _each(out, lambda x: self._to_emulated(x, raws))
        self._record(args, named, written, shown)
        if reads:
            order.host_waits(order.queue(self.key).clock)
        return shown

    def _reads_on_host(self) -> bool:
        if self.name in _READS:
            return True
        if self.name not in _INDEXED or self.name == "aten::index":
            return False
        masks = [t for t in _leaves(self.args[1]) if is_emulated(t) and t.dtype in (torch.bool, torch.uint8)]
        # Writing one value under a single mask is a masked fill, which needs no count.
        fills = self.args[2].numel() == 1 and len(masks) == 1
        return bool(masks) and not fills

    def _to_cpu(self, x: Any, raws: dict[int, Tensor]) -> Any:
        if isinstance(x, torch.device) and x.type == TYPE:
            return CPU
        return raws.get(id(x), x) if isinstance(x, Tensor) else x

    def _written(self) -> list[Tensor]:
        if not self.schema.written:
            return []
        arguments = dict(zip(self.schema.arguments, self.args, strict=False)) | self.named
        return [t for t in _leaves([arguments.get(name) for name in self.schema.written]) if is_emulated(t)]

    def _follow_resized(self, raws: dict[int, Tensor]) -> None:
        """If the operator resized an `out` argument, give the device tensor the new size too."""
        for x in self._written():
            raw = raws[id(x)]
            if raw.size() != x.size() or raw.stride() != x.stride():
                raws[id(x)] = raw = raw.clone(memory_format=torch.preserve_format)
                x.data = wrap(raw, self.device)

    def _to_emulated(self, out: Any, raws: dict[int, Tensor]) -> Any:
        """Return a result as a tensor of the device: an argument, a view of one, or a new tensor."""
        if not isinstance(out, Tensor):
            return out
        address = out.untyped_storage()._cdata
        for x in self.emulated:
            raw = raws[id(x)]
            if raw is out:
                return x
            if raw.untyped_storage()._cdata == address and raw.dtype == out.dtype:
                return _as_strided(x, out.size(), out.stride(), out.storage_offset())
        whole = out.storage_offset() == 0 and out.untyped_storage().nbytes() == out.numel() * out.itemsize
        return wrap(out if whole else out.clone(), self.device)

    def _record(self, args: tuple[Any, ...], named: dict[str, Any], written: list[Tensor], shown: Any) -> None:
        """Record that the operator ran on its stream, or add it to the tape of a capture."""
        results = [t for t in _leaves((shown,)) if is_emulated(t)]
        reads = {id(m): m for m in map(memory_of, self.emulated)}
        writes = {id(m): m for m in map(memory_of, written)}
        # Making empty memory is not a write: a replay that reads such memory before it is written gets NaN.
        empty = self.name.startswith("aten::empty")
        if not empty:
            writes |= {id(m): m for m in map(memory_of, results) if id(m) not in reads}
        if self.capture is None:
            order.touch(self.key, reads.values(), writes.values(), self.name)
            return
        for source in reads.values():
            self.capture.will_read(source)
        if not empty:
            self.capture.tape.append(capture.Recorded(self.op, args, named, [raw_of(t) for t in results]))


def _as_strided(x: Tensor, size: Any, stride: Any, offset: Any = None) -> Tensor:
    """Return a view of the same memory. The CPU's operator can make the view, because it reads no data."""
    view: Tensor = torch.ops.aten.as_strided.default.redispatch(_ON_CPU, x, size, stride, offset)
    return view


def _cpu_view(name: str) -> Callable[..., Any]:
    """Return the CPU's version of a view operator.

    Torch needs such an operator for each device, although a view reads no data.
    """
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return lambda *args, **named: op.redispatch(_ON_CPU, *args, **named)


def _without_pinning(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return lambda *args, **named: _run(op, *args, **{**named, "pin_memory": None})


_setup_privateuseone_for_python_backend(TYPE, backend_module=runtime)
_any, _aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
_any.fallback(_run, "PrivateUse1")
_aten.impl("_copy_from", copy, "PrivateUse1")
for _name in ["as_strided", "view", "_reshape_alias", "unfold", "view_as_real", "view_as_complex"]:
    _aten.impl(_name, _cpu_view(_name), "PrivateUse1")
# Without these versions, torch would make an empty tensor and fill it through `out`.
for _name in ["arange", "arange.start", "arange.start_step", "linspace", "eye", "scalar_tensor"]:
    _aten.impl(_name, _without_pinning(_name), "PrivateUse1")
