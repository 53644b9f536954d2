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
from .memory import is_emulated, memory_of
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
# Types of arguments that have no tensors.
_PLAIN = {type(None), bool, int, float, str, torch.dtype, torch.layout, torch.memory_format}
_RANDOM = ("rand", "normal", "uniform", "bernoulli", "multinomial", "exponential", "dropout")


class _Shell(torch.Tensor):
    """A tensor without data. `wrap` makes a shell only to get its plain tensor (`.data`)."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> None:
        raise AssertionError("a shell is never used")


@cache
def _blank(dtype: torch.dtype, device: int) -> Tensor:
    """Return an empty plain tensor of the device, whose `.data` are new ones."""
    with torch._C._DisableTorchDispatch():
        place = torch.device(TYPE, device)
        return torch.Tensor._make_wrapper_subclass(_Shell, (0,), dtype=dtype, device=place).data


def wrap(raw: Tensor, device: int) -> Tensor:
    """Return a tensor of the device that uses the memory of `raw`, a CPU tensor that fills its storage.

    Call it outside inference mode, because torch requires plain tensors for a view of a plain tensor.
    """
    blank, cpu_storage = _blank(raw.dtype, device), raw.untyped_storage()
    address, nbytes = cpu_storage.data_ptr(), cpu_storage.nbytes()
    storage = torch._C._construct_storage_from_data_pointer(address, blank.device, nbytes)
    tensor = blank.data
    _SET.redispatch(_ON_CPU, tensor, storage, 0, raw.size(), raw.stride())
    tape = capture.of(streams.current_key(device))
    allocated = memory.Memory(cpu_storage, device, None if tape is None else tape.pool)
    memory.attach(tensor, allocated)
    if tape is not None:
        tape.allocated.append(raw)
        tape.inside[id(allocated)] = allocated
    return tensor


def _run(op: Any, *args: Any, **named: Any) -> Any:
    with order.lock, torch._C._InferenceMode(False):
        torch._C._set_grad_enabled(False)  # until the guard above restores the mode
        return _Call(op, args, named).result()


def _leaves(values: Iterable[Any]) -> list[Any]:
    leaves: list[Any] = []
    for x in values:
        leaves += _leaves(x) if isinstance(x, list | tuple) else [x]
    return leaves


@dataclass(frozen=True)
class _Schema:
    """Facts about an operator.

    Attributes:
        name: For example "aten::add".
        tensors: Positions of the tensors, for which a caller may pass a number.
        written: (position, name) of each argument that is written.
        empty: Whether it makes memory that nothing has written.
        random: Whether it draws random numbers.
    """

    name: str
    tensors: tuple[int, ...]
    written: tuple[tuple[int, str], ...]
    empty: bool
    random: bool


@cache
def _schema_of(op: Any) -> _Schema:
    name, specs = op._schema.name, op._schema.arguments
    return _Schema(
        name,
        tuple(i for i, spec in enumerate(specs) if "Tensor" in str(spec.type)),
        tuple(
            (i, spec.name)
            for i, spec in enumerate(specs)
            if spec.alias_info is not None and spec.alias_info.is_write
        ),
        name.startswith("aten::empty"),
        any(word in name for word in _RANDOM),
    )


class _Call:
    """One call of an operator. Every operator of every test passes here, so each argument is looked at once."""

    def __init__(self, op: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.op, self.args, self.named = op, args, named
        self.schema = _schema_of(op)
        # The call's tensors of the device, their CPU tensors by id, and their memories by id.
        self.emulated: list[Tensor] = []
        self.raws: dict[int, Tensor] = {}
        self.reads: dict[int, memory.Memory] = {}
        self.cpu_tensors: list[Tensor] = []
        self.place: torch.device | None = None
        self.raw_args = [self._to_cpu(x) for x in args]
        self.raw_named = {name: self._to_cpu(x) for name, x in named.items()}
        self.device = self._device()
        self.key = streams.current_key(self.device)
        self.capture = capture.of(self.key)
        # The results' memories by id, and CPU tensors of the same memory.
        self.result_memories: dict[int, memory.Memory] = {}
        self.results: list[Tensor] = []

    def _to_cpu(self, x: Any) -> Any:
        """Return an argument for the CPU's operator, and note its tensors and its device."""
        if type(x) in _PLAIN:
            return x
        if isinstance(x, Tensor):
            if not is_emulated(x):
                self.cpu_tensors.append(x)
                return x
            raw = self.raws.get(id(x))
            if raw is None:
                used = memory_of(x)
                self.raws[id(x)] = raw = used.view(x)
                self.reads[id(used)] = used
                self.emulated.append(x)
            return raw
        if isinstance(x, (list, tuple)):
            return type(x)([self._to_cpu(item) for item in x])
        if isinstance(x, torch.device):
            self.place = x if self.place is None else self.place
            return CPU if x.type == TYPE else x
        return x

    def _device(self) -> int:
        devices = {t.get_device() for t in self.emulated}
        if len(devices) > 1 or (devices and self.cpu_tensors):
            self._refuse_mixed(devices)
        return devices.pop() if devices else order.index_of(self.place)

    def _refuse_mixed(self, devices: set[int]) -> None:
        # As on a GPU, scalars and the indices of a tensor may be on the CPU.
        indices = _leaves(self.args[1]) if self.schema.name in _INDEXED else []
        mixed = [t for t in self.cpu_tensors if t.dim() > 0 and all(t is not i for i in indices)]
        if len(devices) > 1 or mixed:
            tensors = [t for t in _leaves((*self.args, *self.named.values())) if isinstance(t, Tensor)]
            shown = [f"{tuple(t.shape)} on {t.device}" for t in tensors]
            raise RuntimeError(f"devices mixed in {self.schema.name}: {', '.join(shown)}")

    def result(self) -> Any:
        reads = self._reads_on_host()
        if reads:
            host_reads(self.schema.name, self.device)
        if self.schema.random and order.captures and self.capture is None:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        args = self.raw_args
        for i in self.schema.tensors:
            if i < len(args) and isinstance(args[i], (bool, int, float)):
                args[i] = torch.tensor(args[i])
        written = self._written()
        if self.capture is not None:
            for target in written:
                self.capture.will_write(memory_of(target))
        out = self.op(*args, **self.raw_named)
        self._follow_resized(written)
        shown = self._to_emulated(out)
        self._record(written)
        if reads:
            order.host_waits(order.queue(self.key).clock)
        return shown

    def _reads_on_host(self) -> bool:
        if self.schema.name in _READS:
            return True
        if self.schema.name not in _INDEXED or self.schema.name == "aten::index":
            return False
        masks = [t for t in _leaves(self.args[1]) if is_emulated(t) and t.dtype in (torch.bool, torch.uint8)]
        # Writing one value under a single mask is a masked fill, which needs no count.
        fills = self.args[2].numel() == 1 and len(masks) == 1
        return bool(masks) and not fills

    def _written(self) -> list[Tensor]:
        places = self.schema.written
        values = [self.args[i] if i < len(self.args) else self.named.get(name) for i, name in places]
        return [t for t in _leaves(values) if is_emulated(t)]

    def _follow_resized(self, written: list[Tensor]) -> None:
        """If the operator resized an `out` argument, give the device tensor the new size too."""
        for x in written:
            raw = self.raws[id(x)]
            if raw.size() != x.size() or raw.stride() != x.stride():
                self.raws[id(x)] = raw = raw.clone(memory_format=torch.preserve_format)
                x.data = wrap(raw, self.device)

    def _to_emulated(self, out: Any) -> Any:
        """Return a result as a tensor of the device: an argument, a view of one, or a new tensor."""
        if isinstance(out, (list, tuple)):
            return type(out)([self._to_emulated(item) for item in out])
        if not isinstance(out, Tensor):
            return out
        shown, out = self._shown(out)
        self.results.append(out)
        used = memory_of(shown)
        self.result_memories[id(used)] = used
        return shown

    def _shown(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """Return a result as a tensor of the device, and as a CPU tensor of the same memory."""
        address = out.untyped_storage()._cdata
        for x in self.emulated:
            raw = self.raws[id(x)]
            if raw is out:
                return x, raw
            if raw.untyped_storage()._cdata == address and raw.dtype == out.dtype:
                return _as_strided(x, out.size(), out.stride(), out.storage_offset()), out
        whole = out.storage_offset() == 0 and out.untyped_storage().nbytes() == out.numel() * out.itemsize
        fresh = out if whole else out.clone()
        return wrap(fresh, self.device), fresh

    def _record(self, written: list[Tensor]) -> None:
        """Record that the operator ran on its stream, or add it to the tape of a capture."""
        writes = {id(m): m for m in map(memory_of, written)}
        # Making empty memory is not a write: a replay that reads such memory before it is written gets NaN.
        if not self.schema.empty:
            writes |= {number: m for number, m in self.result_memories.items() if number not in self.reads}
        if self.capture is None:
            order.touch(self.key, self.reads.values(), writes.values(), self.schema.name)
            return
        for source in self.reads.values():
            self.capture.will_read(source)
        if not self.schema.empty:
            self.capture.tape.append(capture.Recorded(self.op, self.raw_args, self.raw_named, self.results))


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
