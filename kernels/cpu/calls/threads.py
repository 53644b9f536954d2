"""How the threads of one call share its work, phase by phase.

A call is a sequence of phases, each with a number of chunks. Every thread runs the same code: it claims chunks of
a phase until none is left, and waits until all of them are done. No chunk belongs to a thread. So a single thread
can finish the call, a thread that comes late finds nothing to do, and results never depend on who computed them.
`state` holds two int64 counters per phase, zero before the call; each pair has a separate cache line.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .jit import helper, kernel

# int64 numbers in a cache line.
LINE = 8
# How many times a waiting thread checks the counter before it yields its core, which the thread that it waits for
# may need.
_LOOKS = 512


def state_of(phases: int) -> Any:
    """Return the counters of a call with `phases` phases."""
    return np.zeros(LINE * phases, np.int64)


@intrinsic
def _fetch_add(_: Any, address: Any, amount: Any) -> Any:
    """Add to the int64 at an address; return the value that was there before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return types.int64(types.uintp, types.int64), generate


@intrinsic
def _load(_: Any, address: Any) -> Any:
    """Return the int64 at an address, as other threads left it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.uintp), generate


@intrinsic
def _give_way(_: Any) -> Any:
    """Let another thread run on this core."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        name = "SwitchToThread" if sys.platform == "win32" else "sched_yield"
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.IntType(32), []), name)
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate


@helper
def claim(state, phase):
    """Claim the next free chunk of a phase; a number beyond the last chunk means that none is left."""
    return _fetch_add(state.ctypes.data + np.uintp(8 * LINE * phase), 1)


@helper
def done(state, phase):
    """Count a claimed chunk as finished."""
    _fetch_add(state.ctypes.data + np.uintp(8 * LINE * phase + 8), 1)


@helper
def wait(state, phase, chunks):
    """Wait until all chunks of a phase are finished."""
    address = state.ctypes.data + np.uintp(8 * LINE * phase + 8)
    looks = 0
    while _load(address) < chunks:
        looks += 1
        if looks % _LOOKS == 0:
            _give_way()


@kernel
def watch(state, seen):
    """Wait a short while for state[0] to change from `seen`."""
    for looks in range(100 * _LOOKS):
        if _load(state.ctypes.data) != seen:
            return
        if looks % 64 == 63:
            _give_way()
