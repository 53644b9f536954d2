"""The work of a layer besides its products, number by number.

These are compiled helpers over float32 rows. `pack` and `silu` write vectors in the order in which `multiply`
reads them: `width` vectors together, [steps][width] blocks of STEP numbers, in a form that kinds.py names.
`vectors_u16` and `vectors_f32` are two views of the same bytes. Positions in them are counted in numbers, in every
form. NaN stays NaN, and infinity stays infinite or becomes NaN, so that unsound numbers are found later.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .calls.jit import helper
from .calls.threads import claim, done, wait
from .kinds import AS_BYTES, AS_PAIRS, FLOAT, INT, LANES, SHORT, STEP, VECTOR_BYTES, loaded
from .vectors import dots, to_bytes


@intrinsic
def bits(_: Any, value: Any) -> Any:
    """Return the bits of a float32 number as an int32."""
    return types.int32(types.float32), lambda context, b, signature, args: b.bitcast(args[0], INT)


@intrinsic
def number(_: Any, value: Any) -> Any:
    """Return the float32 number with an int32's bits."""
    return types.float32(types.int32), lambda context, b, signature, args: b.bitcast(args[0], FLOAT)


@intrinsic
def float_at(_: Any, address: Any) -> Any:
    """Return the float32 number at an address."""
    return types.float32(types.uintp), lambda context, b, signature, args: loaded(b, args[0], FLOAT)


@intrinsic
def u16_at(_: Any, address: Any) -> Any:
    """Return the uint16 at an address."""
    return types.uint16(types.uintp), lambda context, b, signature, args: loaded(b, args[0], SHORT, 2)


@intrinsic
def copy_bytes(_: Any, to: Any, source: Any, number: Any) -> Any:
    """Copy `number` bytes between addresses that do not overlap."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        to, source = (b.inttoptr(address, ir.IntType(8).as_pointer()) for address in args[:2])
        cgutils.raw_memcpy(b, to, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp, types.intp), generate


@intrinsic
def zero_bytes(_: Any, to: Any, number: Any) -> Any:
    """Zero `number` bytes from an address on."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        cgutils.memset(b, b.inttoptr(args[0], ir.IntType(8).as_pointer()), args[1], 0)
        return context.get_dummy_value()

    return types.void(types.uintp, types.intp), generate


@intrinsic
def store_float(_: Any, address: Any, value: Any) -> Any:
    """Write a float32 number at an address."""
    return types.void(types.uintp, types.float32), _store


@intrinsic
def store_u16(_: Any, address: Any, value: Any) -> Any:
    """Write a uint16 at an address."""
    return types.void(types.uintp, types.uint16), _store


def _store(context: Any, b: Any, signature: Any, args: Any) -> Any:
    b.store(args[1], b.inttoptr(args[0], args[1].type.as_pointer()))
    return context.get_dummy_value()


@helper
def rounded(value):
    """Round a float32 number to bfloat16 bits, to nearest even; NaN stays NaN."""
    whole = np.uint32(bits(value))
    nearest = (whole + np.uint32(0x7FFF) + ((whole >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(nearest if value == value else np.uint32(0x7FC0))


@helper
def exp(x):
    """Return e^x in float32 within 2 ulp; 0 below -87.3, infinity above 88.4.

    Cephes' expf: a polynomial of degree 5.
    """
    low, high = np.float32(-87.3), np.float32(88.7)
    at = low if x < low else high if x > high else x
    power = np.floor(at * np.float32(1.4426950408889634) + np.float32(0.5))
    rest = at - power * np.float32(0.693359375)
    rest = rest - power * np.float32(-2.12194440e-4)
    value = np.float32(1.9875691500e-4)
    value = value * rest + np.float32(1.3981999507e-3)
    value = value * rest + np.float32(8.3334519073e-3)
    value = value * rest + np.float32(4.1665795894e-2)
    value = value * rest + np.float32(1.6666665459e-1)
    value = value * rest + np.float32(5.0000001201e-1)
    value = value * rest * rest + rest + np.float32(1.0)
    scaled = value * number((np.int32(power) + np.int32(127)) << np.int32(23))
    return np.float32(0.0) if x < low else scaled


@helper
def exp2(x):
    """Return 2^x in float32 within 2 ulp for x <= 0, exactly 1 for 0; 0 below -126."""
    low = np.float32(-126.0)
    at = low if x < low else x
    power = np.floor(at + np.float32(0.5))
    rest = at - power
    value = np.float32(0.00132546026725322)
    value = value * rest + np.float32(0.009671999141573906)
    value = value * rest + np.float32(0.05550779402256012)
    value = value * rest + np.float32(0.24022231996059418)
    value = value * rest + np.float32(0.6931469440460205)
    value = value * rest + np.float32(1.0)
    scaled = value * number((np.int32(power) + np.int32(127)) << np.int32(23))
    return np.float32(0.0) if x < low else scaled


@helper
def vector_position(vector, starts, steps):
    """Return the position of a vector's first step, counted in numbers, and how many vectors its block has."""
    block = 0
    while starts[block + 1] <= vector:
        block += 1
    return (starts[block] * steps + vector - starts[block]) * STEP, starts[block + 1] - starts[block]


@helper
def bytes_of(form):
    """Return how many bytes a block of STEP numbers takes in a form."""
    return VECTOR_BYTES[form]


@helper
def pack(source, start, size, vectors_u16, vectors_f32, form, base, width):
    """Write source[start : start + size] as a vector whose first step is at `base`; pad its last step with zeros.

    Indices are unsigned: numba's bounds checks on signed ones prevent vectorisation.
    """
    step_size = np.uintp(STEP)
    for step in range(np.uintp((size + STEP - 1) // STEP)):
        at, to = np.uintp(start) + step * step_size, np.uintp(base) + step * step_size * np.uintp(width)
        filled = min(step_size, np.uintp(size) - step * step_size)
        if form == AS_PAIRS:
            for i in range(filled):
                vectors_u16[to + i] = rounded(source[at + i])
            for i in range(filled, step_size):
                vectors_u16[to + i] = np.uint16(0)
        elif form == AS_BYTES and filled == step_size:
            to_bytes(source.ctypes.data + np.uintp(4) * at, _block(vectors_f32, to))
        elif form == AS_BYTES:
            whole = np.zeros(STEP, np.float32)
            for i in range(filled):
                whole[i] = source[at + i]
            to_bytes(whole.ctypes.data, _block(vectors_f32, to))
            whole[0] = 0
        else:
            for i in range(filled):
                vectors_f32[to + i] = source[at + i]
            for i in range(filled, step_size):
                vectors_f32[to + i] = np.float32(0.0)


@helper
def pack_all(state, phase, x, size, starts, vectors_u16, vectors_f32, form):
    """Pack all vectors of x [N, size]: one phase (calls/threads.py)."""
    steps, vectors = (size + STEP - 1) // STEP, starts[-1]
    while True:
        vector = claim(state, phase)
        if vector >= vectors:
            break
        to, width = vector_position(vector, starts, steps)
        pack(x, vector * size, size, vectors_u16, vectors_f32, form, to, width)
        done(state, phase)
    wait(state, phase, vectors)


@helper
def _block(vectors_f32, to):
    """Return the address of a block of bytes; `to` is its position, counted in numbers."""
    return vectors_f32.ctypes.data + to // np.uintp(STEP) * np.uintp(VECTOR_BYTES[AS_BYTES])


@helper
def norm(x, start, size, weight, first, eps, out, to):
    """Write out[to : to + size] = RMSNorm of x[start : start + size], with weights from weight[first] on.

    out may be x.
    """
    row, first_number = x.ctypes.data + np.uintp(4 * start), x[start]
    dots(row, row, out.ctypes.data + np.uintp(4 * to), 1, size)
    total = out[to]
    x[start] = first_number
    for i in range(size - size % LANES, size):
        total += x[start + i] * x[start + i]
    factor = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
    a, b, c = np.uintp(start), np.uintp(first), np.uintp(to)
    for i in range(np.uintp(size)):
        out[c + i] = x[a + i] * factor * weight[b + i]


@helper
def silu(y, start, steps):
    """Replace gates by SiLU(gate) * up: y[start:] has STEP gates, then their STEP ups, `steps` times."""
    step_size = np.uintp(STEP)
    for step in range(np.uintp(steps)):
        at = np.uintp(start) + np.uintp(2) * step * step_size
        for i in range(step_size):
            gate = y[at + i]
            y[at + i] = gate / (np.float32(1.0) + exp(-gate)) * y[at + step_size + i]


@helper
def copy(source, at, target, to, size):
    """Copy source[at : at + size] to target[to : to + size].

    A slice assignment would take numba a second to compile.
    """
    a, b = np.uintp(at), np.uintp(to)
    for i in range(np.uintp(size)):
        target[b + i] = source[a + i]


@helper
def add(source, at, target, to, size):
    """Add source[at : at + size] to target[to : to + size]."""
    a, b = np.uintp(at), np.uintp(to)
    for i in range(np.uintp(size)):
        target[b + i] += source[a + i]


@helper
def rotate(x, start, rotated, dim, rope, first, factor):
    """Apply rotary embedding to x[start : start + rotated], and a factor to x[start : start + dim], in place.

    From rope[first] on there are `rotated` / 2 cosines, then as many sines.
    """
    at, rope_at, size = np.uintp(start), np.uintp(first), np.uintp(rotated // 2)
    for i in range(size):
        a, b = x[at + i], x[at + size + i]
        c, s = rope[rope_at + i], rope[rope_at + size + i]
        x[at + i] = (a * c - b * s) * factor
        x[at + size + i] = (b * c + a * s) * factor
    for i in range(np.uintp(rotated), np.uintp(dim)):
        x[at + i] *= factor
