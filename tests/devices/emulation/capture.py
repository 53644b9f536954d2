"""Graphs of the emulated device: a capture records a tape of operators, and a replay runs the tape again.

As with CUDA, a capture computes nothing: memory keeps its contents, and the outputs are NaN until a replay. The
capture freezes numbers of the host. Memory allocated in it is NaN before each replay. Reading or waiting during a
capture raises, and the capture fails at its end. A test may set `at_end`, which is called when a capture ends and
may raise or take time.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from . import memory, order, streams
from .memory import Memory

at_end: Callable[[], None] | None = None
# Number of started captures, including failed ones.
captured = 0
_handles = itertools.count(1)


@dataclass
class Pool:
    """Memory that graphs share, so that they must not run at the same time."""

    writer: tuple[order.Key, int] | None = None
    readers: dict[order.Key, int] = field(default_factory=dict)


_pools: dict[Any, Pool] = {}


@dataclass
class Recorded:
    """A call of an operator, with CPU tensors in place of the device's, and the tensors for its results."""

    operator: Callable[..., Any]
    args: Sequence[Any]
    named: dict[str, Any]
    results: list[Tensor]

    def run(self) -> None:
        out = self.operator(*self.args, **self.named)
        fresh = [out] if isinstance(out, Tensor) else [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        for old, new in zip(self.results, fresh, strict=True):
            # Views and in-place results already share the recorded memory.
            if old.untyped_storage()._cdata != new.untyped_storage()._cdata:
                old.copy_(new)


@dataclass
class Capture:
    """A tape that is being recorded, and the memory that it uses."""

    key: order.Key
    mode: str
    pool: Any
    thread: int = field(default_factory=threading.get_ident)
    broken: str | None = None
    tape: list[Recorded] = field(default_factory=list)
    allocated: list[Tensor] = field(default_factory=list)
    reads: dict[int, Memory] = field(default_factory=dict)
    writes: dict[int, Memory] = field(default_factory=dict)
    inside: dict[int, Memory] = field(default_factory=dict)
    before: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def will_write(self, target: Memory) -> None:
        """Save the current contents, so that `undo` can restore them when the capture ends."""
        if id(target) not in self.writes and id(target) not in self.inside:
            now = _bytes(target)
            self.before.append((now, now.clone()))
            self.writes[id(target)] = target

    def will_read(self, source: Memory) -> None:
        if id(source) not in self.inside:
            self.reads[id(source)] = source

    def undo(self) -> None:
        for target, content in self.before:
            target.copy_(content)
        poison(self.allocated)


def _bytes(target: Memory) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(target.storage, 0, (target.storage.nbytes(),), (1,))


def poison(tensors: list[Tensor]) -> None:
    """Fill tensors with values that a test notices: NaN, True, or the largest integer, which is no valid index."""
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(torch.nan)
        elif tensor.dtype == torch.bool:
            tensor.fill_(True)
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).max)


def of(key: order.Key) -> Capture | None:
    for capture in order.captures:
        if capture.key == key:
            return capture
    return None


def is_current_stream_capturing() -> bool:
    return of(streams.current_stream().key) is not None


def graph_pool_handle() -> tuple[int, int]:
    return (0, next(_handles))


class CUDAGraph:
    """A tape that can be replayed."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._capture: Capture | None = None
        self._pool: Any = None
        self._outside: list[weakref.ref[Memory]] = []
        self.nbytes = self.device = self.replays = 0

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
        global captured
        captured += 1
        stream = streams.current_stream()
        if stream.stream_id == 0:
            raise RuntimeError("a graph can't be captured on the default stream")
        if order.captures:
            raise RuntimeError("another capture is under way")
        self._pool = graph_pool_handle() if pool is None else pool
        self._capture = Capture(stream.key, capture_error_mode, self._pool)
        self.device = stream.key[0]
        order.captures.append(self._capture)

    def capture_end(self) -> None:
        """End the capture; if it is broken, raise and leave the allocator and the current stream as they are."""
        capture = self._capture
        assert capture is not None, "capture_end without capture_begin"
        order.captures.remove(capture)
        capture.undo()
        self.nbytes = sum(tensor.nbytes for tensor in capture.allocated)
        if capture.allocated:
            weakref.finalize(self, memory.give_back, self.device, self._pool, self.nbytes).atexit = False
        try:
            if at_end is not None:
                at_end()
            if capture.broken:
                raise torch.AcceleratorError(
                    f"operation failed due to a previous error during capture: {capture.broken}"
                )
        except BaseException:
            memory.stuck = True
            self._capture = None
            raise
        self._outside = [weakref.ref(m) for m in {**capture.reads, **capture.writes}.values()]
        self._reads = [weakref.ref(m) for m in capture.reads.values()]
        self._writes = [weakref.ref(m) for m in capture.writes.values()]
        capture.reads, capture.writes, capture.before = {}, {}, []

    def replay(self) -> None:
        """Run the tape on the current contents of its inputs, as work of the current stream."""
        if self._capture is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        if any(ref() is None for ref in self._outside):
            raise RuntimeError("a replay reads or writes memory that was freed after its capture")
        with order.lock:
            key = streams.current_stream(self.device).key
            reads = [m for ref in self._reads if (m := ref()) is not None]
            writes = [m for ref in self._writes if (m := ref()) is not None]
            inside = list(self._capture.inside.values())
            order.touch(key, reads, [*writes, *inside, _pools.setdefault(self._pool, Pool())], "replay")
            order.queue(key).ms += order.OP_MS * len(self._capture.tape)
            poison(self._capture.allocated)
            for recorded in self._capture.tape:
                recorded.run()
            self.replays += 1

    def reset(self) -> None:
        self._capture = None

    def pool(self) -> Any:
        return self._pool


class graph:
    """A capture of the block's work, with torch.cuda.graph's signature and order of steps."""

    def __init__(
        self,
        cuda_graph: CUDAGraph,
        pool: Any = None,
        stream: streams.Stream | None = None,
        capture_error_mode: str = "global",
        enable_annotations: bool = False,
        check_input_liveness: bool = False,
    ) -> None:
        self.capture_stream = streams.Stream() if stream is None else stream
        self.stream_ctx = streams.stream(self.capture_stream)
        self.cuda_graph, self.pool, self.mode = cuda_graph, pool, capture_error_mode

    def __enter__(self) -> None:
        order.synchronize()
        memory.empty_cache()
        self.stream_ctx.__enter__()
        self.cuda_graph.capture_begin(pool=self.pool, capture_error_mode=self.mode)

    def __exit__(self, *error: object) -> None:
        # As in torch: if this raises, the thread stays on the capture's stream.
        self.cuda_graph.capture_end()
        self.stream_ctx.__exit__(*error)
