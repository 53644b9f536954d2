"""Ragged attention alone: fused, pad, split, sdpa and flash over the same caches, in GB/s of live keys and values.

Then `fused` over rows that share a prefix, beside the same rows with a copy each, once its result was compared;
and over trees of tokens, beside chains of as many.
Contract: times launches captured in a CUDA graph (no host overhead) over several KV caches in turn, so that no
hardware cache holds them. As in a step, each backend's masks are made once, outside the timed part.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch

from kernels.backends import BACKENDS, why_backend_unavailable
from kernels.plan import AttentionPlan, SharedPart

from ..context import Context
from ..timing import captured_ms
from .rules import compare
from .trees import grown

HEADS, KV_HEADS, DIM = 32, 8, 128


def run(ctx: Context) -> None:
    """The grid: batch x lengths x query tokens."""
    names = [name for name in BACKENDS if why_backend_unavailable(name, ctx.device) is None]
    for missing in sorted(set(BACKENDS) - set(names)):
        ctx.row(missing, "not run", why_backend_unavailable(missing, ctx.device) or "")
    for batch, label, lengths in grids(ctx):
        for width in (1,) if ctx.dry else (1, 5):
            if ctx.late:
                return
            measure(ctx, names, f"b{batch} {label} x {width}", lengths, width)
    batches, starts = ((2,), (16,)) if ctx.dry else ((8, 32), (4000, 8000))
    for batch, start, width in itertools.product(batches, starts, (1, 5)):
        if ctx.late or "fused" not in names:
            return
        measure_shared(ctx, batch, start, width)
    for batch, nodes in itertools.product((2,) if ctx.dry else (1, 8), (4,) if ctx.dry else (8, 16, 32, 63)):
        if ctx.late or "fused" not in names:
            return
        measure_tree(ctx, batch, 16 if ctx.dry else 2000, nodes)


def grids(ctx: Context) -> list[tuple[int, str, list[int]]]:
    """(batch size, label, lengths): equal and very different lengths."""
    if ctx.dry:
        return [(2, "kv8", [8, 8])]
    generator = torch.Generator().manual_seed(ctx.seed)
    batches = (8,) if ctx.quick else (1, 8, 32)
    found = [(batch, f"kv{kv}", [kv] * batch) for batch in batches for kv in (512, 4096)]
    for batch in (8,) if ctx.quick else (8, 32):
        ragged = (64 * 2 ** (7 * torch.rand(batch, generator=generator))).int().tolist()
        found.append((batch, "ragged64-8192", ragged))
    return found


@torch.inference_mode()
def measure(ctx: Context, names: list[str], case: str, lengths: list[int], width: int) -> None:
    """One case for all backends."""
    batch, extent = len(lengths), max(lengths) + width
    live = sum(length + width for length in lengths) * KV_HEADS * DIM * 2 * ctx.dtype.itemsize
    allocated = batch * extent * KV_HEADS * DIM * 2 * ctx.dtype.itemsize
    buffers = 1 if ctx.dry else max(2, min(16, (1 << 29) // allocated))
    caches = [
        torch.randn(2, batch, KV_HEADS, extent, DIM, dtype=ctx.dtype, device=ctx.device) for _ in range(buffers)
    ]
    query = torch.randn(batch, HEADS, width, DIM, dtype=ctx.dtype, device=ctx.device)
    step = AttentionPlan(torch.tensor(lengths, device=ctx.device), lengths, width)
    step.mask(None)
    times = {}
    for name in names:
        backend = BACKENDS[name]
        try:
            calls = [
                lambda key=key, value=value, backend=backend: backend(query, key, value, step, scaling=DIM**-0.5)
                for key, value in caches
            ]
            times[name] = captured_ms(calls, ctx.device)
        except Exception as error:
            ctx.row(case, f"{name} failed", f"{type(error).__name__}: {error}"[:200])
            continue
        ctx.row(case, name, 1000 * times[name], "us", f"{live / times[name] / 1e6:.0f} GB/s")
    if "fused" in times:
        ctx.row(case, "fused share of copy", live / (times["fused"] / 1000) / ctx.bandwidth)
        others = [ms for name, ms in times.items() if name in ("pad", "split", "sdpa")]
        if others:
            ctx.row(case, "fused / best other", times["fused"] / min(others))


@torch.inference_mode()
def measure_shared(ctx: Context, batch: int, start: int, width: int) -> None:
    """Rows of up to 64 tokens of their own behind `start` shared ones, and the same with own copies."""
    own, device = [16 + 48 * row // batch for row in range(batch)], ctx.device
    lengths, case = [start + length for length in own], f"b{batch} prefix{start} x {width}"
    zeros = torch.zeros(batch, dtype=torch.int64, device=device)
    part = SharedPart(zeros + start, zeros, [start] * batch, [0] * batch, start)
    steps = [
        AttentionPlan(torch.tensor(lengths, device=device), lengths, width, shared=one) for one in (part, None)
    ]
    sizes: Any = {"dtype": ctx.dtype, "device": device}
    tails = torch.randn(2, batch, KV_HEADS, max(own) + width, DIM, **sizes)
    stored = torch.randn(2, 1, KV_HEADS, start, DIM, **sizes)
    whole = torch.cat((stored.expand(-1, batch, -1, -1, -1), tails), 3)
    query = torch.randn(batch, HEADS, width, DIM, **sizes)
    prefix, fused, scaling = (stored[0], stored[1]), BACKENDS["fused"], DIM**-0.5
    out = fused(query, *tails, steps[0], scaling=scaling, prefix=prefix)
    copied = fused(query, *whole, steps[1], scaling=scaling)
    plain = BACKENDS["pad"](query, *tails, steps[0], scaling=scaling, prefix=prefix)
    wide = tuple(one.double() for one in prefix)
    exact = BACKENDS["pad"](query.double(), *tails.double(), steps[0], scaling=scaling, prefix=wide)
    compare(out, plain, exact)
    ctx.row(case, "the same bits as own copies", float(torch.equal(out, copied)))
    shared = captured_ms([lambda: fused(query, *tails, steps[0], scaling=scaling, prefix=prefix)], device)
    copies = captured_ms([lambda: fused(query, *whole, steps[1], scaling=scaling)], device)
    ctx.row(case, "shared", 1000 * shared, "us")
    ctx.row(case, "own copies", 1000 * copies, "us")
    ctx.row(case, "own copies / shared", copies / shared)


@torch.inference_mode()
def measure_tree(ctx: Context, batch: int, cached: int, nodes: int) -> None:
    """Random trees of `nodes` tokens behind `cached` ones: what the masks cost beside a chain's."""
    device, lengths = ctx.device, [cached - 7 * row for row in range(batch)]
    case = f"b{batch} kv{cached} tree{nodes}"
    sizes: dict[str, Any] = {"dtype": ctx.dtype, "device": device}
    chain = AttentionPlan(torch.tensor(lengths, device=device), lengths, nodes)
    trees = grown(ctx, lengths, [0] * batch, nodes)
    query = torch.randn(batch, HEADS, nodes, DIM, **sizes)
    keys, values = torch.randn(2, batch, KV_HEADS, cached + nodes, DIM, **sizes)
    fused, pad, scaling = BACKENDS["fused"], BACKENDS["pad"], DIM**-0.5
    wide = keys.double(), values.double()
    exact = pad(query.double(), *wide, trees, scaling=scaling)
    compare(
        fused(query, keys, values, trees, scaling=scaling), pad(query, keys, values, trees, scaling=scaling), exact
    )
    times = [
        captured_ms([partial(fused, query, keys, values, plan, scaling=scaling)], device)
        for plan in (trees, chain)
    ]
    ctx.row(case, "fused, trees", 1000 * times[0], "us")
    ctx.row(case, "fused, chains", 1000 * times[1], "us")
    ctx.row(case, "trees / chains", times[0] / times[1])
    padded = captured_ms([lambda: pad(query, keys, values, trees, scaling=scaling)], device)
    ctx.row(case, "pad, trees", 1000 * padded, "us")
