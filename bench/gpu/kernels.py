"""The kernels of a forward, and top-p's, compared with their torch references; outputs are poisoned beforehand.

Our error against float64 may be at most three times that of plain torch in the same precision (the rule of
flash-attention's tests), or a few rounding steps. On a CPU the kernels run under Triton's interpreter. The kernels
of verification are not tested here; checks.py compares their texts with the CPU's.
"""

from __future__ import annotations

import random
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from bass_core.model.forward import token_tree, verified_tree
from bass_core.sample.distribution import _threshold
from kernels.backends import BACKENDS, why_backend_unavailable
from kernels.plan import AttentionPlan, Rotation, SharedPart
from kernels.reference import cache as cache_reference
from kernels.reference import linear as linear_reference
from kernels.reference.attention import pad
from kernels.support import why_unavailable

from .context import Cases, Context

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def kernels(ctx: Context) -> None:
    """Test attention over ragged rows, prefixes and trees, cache writes, products of a few rows, and top-p."""
    reason = why_unavailable(ctx.device)
    if reason:
        raise RuntimeError(reason)
    torch.manual_seed(ctx.seed)
    before = torch.are_deterministic_algorithms_enabled()
    # This makes torch.empty return NaN or the largest integer, which exposes outputs that were not written.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        ctx.cases(_cases(ctx))
    finally:
        torch.use_deterministic_algorithms(before)


def _cases(ctx: Context) -> Cases:
    dims = (64,) if ctx.tiny else (64, 128) if ctx.quick else (64, 80, 128, 256)
    rows = (1, 8, 40) if ctx.short else (1, 2, 8, 16, 40, 64)
    sizes = [(40, 96)] if ctx.tiny else [(1024, 4096), (300, 1000)]
    for dtype in DTYPES[: 1 if ctx.tiny else 3]:
        for dim, width in product(dims, (1, 5) if ctx.short else (1, 5, 33)):
            for kind in ("plain", "masked", "shared", "tree"):
                yield (
                    f"attention: {kind} D={dim} S={width} {dtype}",
                    partial(_attention, ctx, kind, dim, width, dtype),
                )
            if why_backend_unavailable("flash", ctx.device, dtype) is None:
                yield f"flash-attn: D={dim} S={width} {dtype}", partial(_flash, ctx, dim, width, dtype)
            for norm in (False, True):
                yield (
                    f"write: D={dim} S={width} {dtype} norm={norm}",
                    partial(_write, ctx, dim, width, dtype, norm),
                )
                yield (
                    f"attention that rotates: D={dim} S={width} {dtype} norm={norm}",
                    partial(_rotating_attention, ctx, dim, width, dtype, norm),
                )
        for m, (n, k), gate in product(rows, sizes, (False, True)):
            if m <= (64 if dtype.itemsize == 2 else 16):
                yield (
                    f"product: M={m} N={n} K={k} {dtype} gate={gate}",
                    partial(_product, ctx, m, n, k, dtype, gate),
                )
    for vocab in (3000,) if ctx.tiny else (8192, 49152, 128256):
        yield f"top-p: V={vocab}", partial(_top_p, ctx, vocab)


def compare(ours: Tensor, plain: Tensor, exact: Tensor, steps: float = 2.0) -> None:
    """Raise AssertionError if the error of `ours` breaks the rule in the module's docstring.

    Args:
        ours: the kernel's result.
        plain: plain torch's result in the same precision.
        exact: the float64 result.
        steps: rounding steps that are always allowed; at least 32 in float32.
    """
    if not torch.isfinite(ours).all():
        raise AssertionError("not every output was written, or it is not finite")
    error, allowed = ((result.double() - exact.double()).abs().max().item() for result in (ours, plain))
    steps = max(steps, 32.0 if ours.dtype == torch.float32 else 0.0)
    if error > max(3 * allowed, steps * torch.finfo(ours.dtype).eps * max(1.0, exact.abs().max().item())):
        raise AssertionError(f"error {error:.2e}, plain torch {allowed:.2e}")


def _attention(ctx: Context, kind: str, dim: int, width: int, dtype: torch.dtype) -> None:
    from kernels.triton.attention import fused

    # A shared prefix longer than one segment of the kernel, because rows that share a segment compute it together.
    device, start = ctx.device, (528 if ctx.tiny else 2000) if kind == "shared" else 0
    lengths = [start + extra for extra in torch.randint(0, 30 if ctx.tiny else 1500, (4,)).tolist()]
    placed = torch.tensor(lengths).to(device)
    group = torch.zeros_like(placed)
    dice = random.Random(ctx.seed)
    parents = [[dice.randrange(-1, draft) for draft in range(width - 1)] for _ in lengths]
    step = AttentionPlan(
        placed, lengths, width,
        shared=SharedPart(group + start, group, [start] * 4, [0] * 4, start) if start else None,
        tree=token_tree(verified_tree(parents), device) if kind == "tree" else None,
    )  # fmt: skip
    query = torch.randn(4, 8, width, dim).to(device, dtype)
    keys, values = torch.randn(2, 4, 2, step.extent + 3, dim).to(device, dtype)
    stored = torch.randn(2, 1, 2, start, dim).to(device, dtype)
    masks: Any = {"window": 37, "softcap": 20.0} if kind in ("masked", "tree") else {}
    options: dict[str, Any] = {"scaling": 0.1, **masks}

    def reference(to: torch.dtype) -> Tensor:
        prefix = (stored[0].to(to), stored[1].to(to)) if start else None
        key, value = (cached[:, :, : step.extent].to(to) for cached in (keys, values))
        return pad(query.to(to), key, value, step, prefix=prefix, **options)

    for parts in (False, True):
        prefix = (stored[0], stored[1]) if start else None
        ours = fused(query, keys, values, step, prefix=prefix, parts=parts, **options)
        compare(ours, reference(dtype), reference(torch.float64))
        if start:
            key, value = (
                torch.cat((shared.expand(4, -1, -1, -1), cached), 2)
                for shared, cached in zip(stored, (keys, values), strict=True)
            )
            unshared = fused(query, key, value, AttentionPlan(placed, lengths, width), parts=parts, **options)
            # Triton's interpreter multiplies with NumPy, whose sums of a row depend on other rows on some CPUs.
            rounding = 0.0 if device.type == "cuda" else 1e-5
            if not torch.allclose(ours, unshared, rtol=rounding, atol=rounding):
                raise AssertionError("rows that share a prefix differ from rows with a copy each")


def _flash(ctx: Context, dim: int, width: int, dtype: torch.dtype) -> None:
    """Compare flash-attn with plain torch, and a row's last token with the same token in a step by itself."""
    lengths = torch.randint(1, 1500, (4,)).tolist()
    query = torch.randn(4, 8, width, dim).to(ctx.device, dtype)
    keys, values = torch.randn(2, 4, 2, max(lengths) + width, dim).to(ctx.device, dtype)
    variants: list[dict[str, Any]] = [{}, {"window": 37}, {"softcap": 20.0}]
    for options in variants:
        step = AttentionPlan(torch.tensor(lengths).to(ctx.device), lengths, width)
        ours = BACKENDS["flash"](query, keys, values, step, scaling=0.1, **options)
        plain, exact = (
            pad(query.to(to), keys.to(to), values.to(to), step, scaling=0.1, **options)
            for to in (dtype, torch.float64)
        )
        compare(ours, plain, exact)
    ends = [length + width - 1 for length in lengths]
    alone = AttentionPlan(torch.tensor(ends).to(ctx.device), ends, 1)
    step = AttentionPlan(torch.tensor(lengths).to(ctx.device), lengths, width)
    last = BACKENDS["flash"](query[:, :, -1:], keys, values, alone, scaling=0.1)
    same = torch.equal(BACKENDS["flash"](query, keys, values, step, scaling=0.1)[:, -1:], last)
    ctx.row(f"flash-attn: D={dim} S={width} {dtype}", "same bits as a step of one token", float(same))


def _top_p(ctx: Context, vocab: int) -> None:
    """Compare top-p's threshold with that of a sort, unless rounding may decide."""
    from kernels.triton.nucleus import threshold

    for spread, top_p in product((0.0, 1.0, 3.0, 10.0), (0.3, 0.9, 0.99)):
        probs = (torch.randn(3, vocab) * spread).softmax(-1)
        ours, expected = threshold(probs.to(ctx.device), top_p).cpu(), _threshold(probs, top_p)
        likelier = torch.where(probs > expected, probs, 0).double().sum(-1, keepdim=True)
        equal = torch.where(probs == expected, probs, 0).double().sum(-1, keepdim=True)
        clear = ((likelier - top_p).abs() > 2e-6) & ((likelier + equal - top_p).abs() > 2e-6)
        if not torch.equal(ours[clear], expected[clear]):
            raise AssertionError(f"top_p {top_p} of logits x {spread}: {ours.tolist()}, not {expected.tolist()}")


def _write(ctx: Context, dim: int, width: int, dtype: torch.dtype, norm: bool) -> None:
    from kernels.triton.cache_write import rotate_write, write

    device, lengths = ctx.device, torch.tensor([3, 0, 17]).to(ctx.device)
    qkv, cache = torch.randn(3, width, 12, dim).to(device, dtype), torch.randn(2, 4, 2, 64, dim).to(device, dtype)
    angles = torch.outer(torch.arange(64.0), 1.0 / torch.arange(1, dim // 2 + 1)).to(device)
    weights = torch.rand(2, dim).to(device, dtype)
    tolerance: Any = dict.fromkeys(("atol", "rtol"), 1e-4 if dtype == torch.float32 else 2e-2)
    norms = (weights[0], weights[1]) if norm else None
    for positions in (None, lengths[:, None] + torch.randint(0, width, (3, width)).to(device)):
        ours, theirs = ((qkv.clone(), cache.clone()) for _ in range(2))
        arguments: Any = (lengths, angles.cos(), angles.sin(), norms, 1e-6, None, positions)
        rotate_write(*ours, *arguments)
        cache_reference.rotate_write(*theirs, *arguments)
        torch.testing.assert_close(ours, theirs, **tolerance)
    keys, values = torch.randn(2, 3, 2, width, dim).to(device, dtype)
    mine, plain = cache.clone(), cache.clone()
    write(keys, values, mine, lengths)
    cache_reference.write(keys, values, plain, lengths)
    torch.testing.assert_close(mine, plain, **tolerance)


def _rotating_attention(ctx: Context, dim: int, width: int, dtype: torch.dtype, norm: bool) -> None:
    """Compare attention that rotates and writes with a rotation before it: equal bits, except after a norm."""
    from kernels.triton.attention import fused
    from kernels.triton.cache_write import rotate_write

    device = ctx.device
    longest = 600 if ctx.tiny else 1600
    lengths = torch.tensor([3, 0, 17, longest]).to(device)
    qkv = torch.randn(4, width, 8 + 2 * 2, dim).to(device, dtype)
    cache = torch.randn(2, 4, 2, longest + width, dim).to(device, dtype)
    angles = torch.outer(torch.arange(float(longest)), 1.0 / torch.arange(1, dim // 2 + 1)).to(device)
    weights = torch.rand(2, dim).to(device, dtype)
    norms = (weights[0], weights[1]) if norm else None
    for parts in (False, True):
        results = []
        for inside in (True, False):
            states, stored = qkv.clone(), cache.clone()
            step = AttentionPlan(lengths, lengths.tolist(), width)
            rotation = Rotation(states, stored, angles.cos(), angles.sin(), norms, 1e-6)
            if not inside:
                rotation.apply(rotate_write, step)
            query = states[:, :, :8].transpose(1, 2)
            options: Any = {"scaling": 0.1, "rotation": rotation if inside else None, "parts": parts}
            for _ in range(3 if inside else 1):
                out = fused(query, stored[0], stored[1], step, **options)
            if step.counters is not None and step.counters.any():
                raise AssertionError("a launch left its counters above zero")
            results.append((out, stored))
        # The sum of a head's squares has another order in programs of another shape.
        close = (2e-2 if dtype.itemsize == 2 else 1e-4) if norm else 0.0
        torch.testing.assert_close(*results, atol=close, rtol=close)


def _product(ctx: Context, m: int, n: int, k: int, dtype: torch.dtype, gate: bool) -> None:
    from kernels.triton import linear, pointwise

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape).to(ctx.device, dtype)

    x, weight = normal(m, k), normal(2 * n if gate else n, k) * k**-0.5
    extras: list[dict[str, Any]] = [{"norm": 1 + 0.1 * normal(k), "eps": 1e-5}, {"residual": normal(m, n)}]
    for extra in extras:
        wide: dict[str, Any] = {
            name: value.double() if isinstance(value, Tensor) else value for name, value in extra.items()
        }
        exact = linear_reference.linear(x.double(), weight.double(), gate=gate, **wide)
        plain = linear_reference.linear(x, weight, gate=gate, **extra)
        for module in (linear, pointwise):
            compare(module.linear(x, weight, gate=gate, **extra), plain, exact, steps=8.0)
    if not gate:
        # The last residual is overwritten.
        compare(pointwise.linear(x, weight, overwrite=True, **extra), plain, exact, steps=8.0)
