"""Tensors and operators of the device "emul": torch's PrivateUse1, in Python, computed by the CPU.

Contract: importing this registers the device for the rest of the process; nothing else changes. A tensor of the
device has the usual shape, strides and views, but no data: it stands for a CPU storage (memory.py). An operator
given tensors of two devices raises, as on a GPU; reads on the host are counted (ledger.py); each operator belongs
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
# Operators that make the host wait: their results are values, or have sizes that depend on values.
_READS = {
    "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::masked_select",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
}  # fmt: skip
# Operators whose indices may be on the host and whose masks the host counts; torch handles both for "index".
_INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_RANDOM = ("rand", "normal", "uniform", "bernoulli", "multinomial", "exponential", "dropout")


class _Shell(torch.Tensor):
    """Used only to make tensors of a device without data; `wrap` keeps the plain tensor (`.data`)."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> None:
        raise AssertionError("a shell is never used")


def wrap(raw: Tensor, device: int) -> Tensor:
    """A tensor of the device that stands for a whole CPU tensor and shares its memory."""
    place, stands_for = torch.device(TYPE, device), raw.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(stands_for.data_ptr(), place, stands_for.nbytes())
    # Outside inference mode, because torch requires plain tensors for a view of a plain tensor.
    with torch._C._InferenceMode(False), torch._C._DisableTorchDispatch():
        tensor: Tensor = torch.Tensor._make_wrapper_subclass(_Shell, (0,), dtype=raw.dtype, device=place).data
        _SET.redispatch(_ON_CPU, tensor, storage, 0, raw.size(), raw.stride())
    at = capture.of(streams.current_stream(device).key)
    made = memory.Memory(stands_for, device, None if at is None else at.pool)
    memory.show(tensor, made)
    if at is not None:
        at.made.append(raw)
        at.inside[id(made)] = made
    return tensor


def _run(op: Any, *args: Any, **named: Any) -> Any:
    with order.lock, torch._C._InferenceMode(False), torch.no_grad():
        return _Call(op, args, named).result()


def _each(x: Any, change: Callable[[Any], Any]) -> Any:
    """Applies `change` in lists, tuples and dicts; torch's tree_map costs more than most operators here."""
    if isinstance(x, list | tuple):
        return type(x)(_each(one, change) for one in x)
    return {name: _each(one, change) for name, one in x.items()} if isinstance(x, dict) else change(x)


def _leaves(values: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for x in values:
        found += _leaves(x) if isinstance(x, list | tuple) else [x]
    return found


@dataclass(frozen=True)
class _Facts:
    """An operator's schema: its name, its arguments, which of them are tensors, and which are written."""

    name: str
    arguments: tuple[str, ...]
    tensors: frozenset[str]
    written: tuple[str, ...]


@cache
def _facts(op: Any) -> _Facts:
    specs = op._schema.arguments
    return _Facts(
        op._schema.name,
        tuple(spec.name for spec in specs),
        frozenset(spec.name for spec in specs if "Tensor" in str(spec.type)),
        tuple(spec.name for spec in specs if spec.alias_info is not None and spec.alias_info.is_write),
    )


class _Call:
    """One operator call on the device."""

    def __init__(self, op: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.op, self.args, self.named = op, args, named
        self.facts = _facts(op)
        self.name = self.facts.name
        self.leaves = _leaves((*args, *named.values()))
        self.tensors = [t for t in self.leaves if isinstance(t, Tensor)]
        self.own = [t for t in self.tensors if is_emulated(t)]
        self.device = self._device()
        self.key = streams.current_stream(self.device).key
        self.capture = capture.of(self.key)

    def _device(self) -> int:
        devices = {t.device.index for t in self.own}
        # As on a GPU, a CPU scalar is allowed anywhere, and CPU indices where a tensor is indexed.
        indices = _leaves(self.args[1]) if self.name in _INDEXED else []
        strangers = [t for t in self.tensors if not is_emulated(t) and t.dim() > 0]
        if len(devices) > 1 or (devices and any(all(t is not i for i in indices) for t in strangers)):
            shown = [f"{tuple(t.shape)} on {t.device}" for t in self.tensors]
            raise RuntimeError(f"devices mixed in {self.name}: {', '.join(shown)}")
        if devices:
            return int(devices.pop())
        asked = [x for x in self.leaves if isinstance(x, torch.device)]
        return order.index_of(asked[0] if asked else None)

    def result(self) -> Any:
        reads = self._reads_on_host()
        if reads:
            host_reads(self.name, self.device)
        if order.captures and self.capture is None and any(word in self.name for word in _RANDOM):
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        raws = {id(t): raw_of(t) for t in self.own}
        args, named = _each((self.args, self.named), lambda x: self._inside(x, raws))
        args = tuple(
            torch.tensor(value) if isinstance(value, bool | int | float) and name in self.facts.tensors else value
            for value, name in zip(args, self.facts.arguments, strict=False)
        )
        written = self._written()
        if self.capture is not None:
            for target in written:
                self.capture.will_write(memory_of(target))
        out = self.op(*args, **named)
        self._follow_resized(raws)
        shown = _each(out, lambda x: self._show(x, raws))
        self._note(args, named, written, shown)
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

    def _inside(self, x: Any, raws: dict[int, Tensor]) -> Any:
        if isinstance(x, torch.device) and x.type == TYPE:
            return CPU
        return raws.get(id(x), x) if isinstance(x, Tensor) else x

    def _written(self) -> list[Tensor]:
        """The arguments that the operator writes to."""
        if not self.facts.written:
            return []
        given = dict(zip(self.facts.arguments, self.args, strict=False)) | self.named
        return [t for t in _leaves([given.get(name) for name in self.facts.written]) if is_emulated(t)]

    def _follow_resized(self, raws: dict[int, Tensor]) -> None:
        """If the operator resized an `out` argument, give the device tensor the new size too."""
        for x in self._written():
            raw = raws[id(x)]
            if raw.size() != x.size() or raw.stride() != x.stride():
                raws[id(x)] = raw = raw.clone(memory_format=torch.preserve_format)
                x.data = wrap(raw, self.device)

    def _show(self, out: Any, raws: dict[int, Tensor]) -> Any:
        """A result as a tensor of the device: an argument, a view of one, or a new tensor."""
        if not isinstance(out, Tensor):
            return out
        address = out.untyped_storage()._cdata
        for x in self.own:
            raw = raws[id(x)]
            if raw is out:
                return x
            if raw.untyped_storage()._cdata == address and raw.dtype == out.dtype:
                return _as_strided(x, out.size(), out.stride(), out.storage_offset())
        whole = out.storage_offset() == 0 and out.untyped_storage().nbytes() == out.numel() * out.itemsize
        return wrap(out if whole else out.clone(), self.device)

    def _note(self, args: tuple[Any, ...], named: dict[str, Any], written: list[Tensor], shown: Any) -> None:
        """Record the operator on the stream or on the capture's tape."""
        results = [t for t in _leaves((shown,)) if is_emulated(t)]
        reads = {id(m): m for m in map(memory_of, self.own)}
        writes = {id(m): m for m in map(memory_of, written)}
        # Empty memory does not count as written: a replay that reads it before writing it gets NaN.
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
    """A view of the same memory, made by the CPU's operator, which touches no data."""
    view: Tensor = torch.ops.aten.as_strided.default.redispatch(_ON_CPU, x, size, stride, offset)
    return view


def _of_cpu(name: str) -> Callable[..., Any]:
    """A view operator that torch implements per device although it touches no data."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return lambda *args, **named: op.redispatch(_ON_CPU, *args, **named)


def _made_by(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return lambda *args, **named: _run(op, *args, **{**named, "pin_memory": None})


_setup_privateuseone_for_python_backend(TYPE, backend_module=runtime)
_any, _aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
_any.fallback(_run, "PrivateUse1")
_aten.impl("_copy_from", copy, "PrivateUse1")
for _name in ["as_strided", "view", "_reshape_alias", "unfold", "view_as_real", "view_as_complex"]:
    _aten.impl(_name, _of_cpu(_name), "PrivateUse1")
# By default torch would make these tensors empty and fill them through `out`.
for _name in ["arange", "arange.start", "arange.start_step", "linspace", "eye", "scalar_tensor"]:
    _aten.impl(_name, _made_by(_name), "PrivateUse1")
