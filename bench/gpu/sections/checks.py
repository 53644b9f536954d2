"""Every kernel against its reference, on fresh random inputs, with outputs poisoned before each call.

Contract: errors are held to the rule of rules.py. A row says how many cases a kernel
passed; a case that fails or raises is named, and the others go on.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from bass_core.sampling.distribution import probabilities
from bass_core.sampling.draw import draw
from bass_core.sampling.noise import NoiseKeys, Role
from bass_core.sampling.params import SamplingParams
from bass_core.verification.rejection import verify
from bass_core.verification.table import VERIFICATIONS
from kernels.backends import why_backend_unavailable
from kernels.plan import AttentionPlan
from kernels.reference import cache as cache_reference
from kernels.reference import linear as linear_reference
from kernels.reference.attention import pad

from ..context import Context
from .rules import DTYPES, Cases, compare, poisoned
from .trees import tree_cases


def run(ctx: Context) -> None:
    """All kernels, each over its grid; several processes divide the kernels' variants among them."""
    reason = why_backend_unavailable("fused", ctx.device)
    if reason:
        ctx.row("kernels", "not run", reason)
        return
    groups = {
        "attention": attention_cases(ctx),
        "products": product_cases(ctx),
        "int8 products": int8_cases(ctx),
        "cache write": write_cases(ctx),
        "accept": accept_cases(ctx),
        "trees": tree_cases(ctx),
    }
    with poisoned():
        ctx.cases((name, variant, label, case) for name, cases in groups.items() for variant, label, case in cases)


def attention_cases(ctx: Context) -> Cases:
    dims = (64, 128) if ctx.short else (64, 80, 96, 128, 256)
    widths = (1, 5) if ctx.dry else (1, 5, 9, 33)
    extras: list[dict[str, Any]] = [{}] if ctx.dry else [{}, {"window": 37, "softcap": 20.0}]
    longest = 30 if ctx.dry else 1500
    dtypes = DTYPES[:1] if ctx.dry else DTYPES
    for dim, dtype, width, extra in itertools.product(dims, dtypes, widths, extras):

        def case(dim: int = dim, dtype: torch.dtype = dtype, width: int = width, extra: Any = extra) -> None:
            lengths = torch.randint(0, longest, (4,)).tolist()
            step = AttentionPlan(torch.tensor(lengths, device=ctx.device), lengths, width)
            wide = torch.randn(4, 8, width, dim, device=ctx.device)
            caches = torch.randn(2, 4, 2, step.extent + 3, dim, device=ctx.device)
            query, (key, value) = wide.to(dtype), caches.to(dtype)
            exact = pad(query.double(), *_cut(key.double(), value.double(), step), step, scaling=0.1, **extra)
            plain = pad(query, *_cut(key, value, step), step, scaling=0.1, **extra)
            from kernels.triton.attention import fused

            for parts in (False, True):
                ours = fused(query, key, value, step, scaling=0.1, parts=parts, **extra)
                compare(ours, plain, exact)

        yield (dim, dtype), f"D={dim} S={width} {dtype} {extra}", case


def _cut(key: Tensor, value: Tensor, step: AttentionPlan) -> tuple[Tensor, Tensor]:
    return key[:, :, : step.extent], value[:, :, : step.extent]


def product_cases(ctx: Context) -> Cases:
    rows = (1, 8) if ctx.short else (1, 2, 8, 16, 40, 64)
    sizes = [(40, 96)] if ctx.dry else [(1024, 4096), (300, 1000)]
    dtypes = DTYPES[:1] if ctx.dry else DTYPES
    for m, (n, k), dtype, gate in itertools.product(rows, sizes, dtypes, (False, True)):
        if dtype == torch.float32 and m > 16:
            continue

        def case(m: int = m, n: int = n, k: int = k, dtype: torch.dtype = dtype, gate: bool = gate) -> None:
            from kernels.triton.linear import linear

            x = torch.randn(m, k, device=ctx.device).to(dtype)
            weight = (torch.randn(n * (2 if gate else 1), k, device=ctx.device) * k**-0.5).to(dtype)
            norm = (1 + 0.1 * torch.randn(k, device=ctx.device)).to(dtype)
            residual = torch.randn(m, n, device=ctx.device).to(dtype)
            extras: list[dict[str, Any]] = [{"norm": norm, "eps": 1e-5}, {"residual": residual}]
            for extra in extras:
                wide: dict[str, Any] = {
                    name: one.double() if isinstance(one, Tensor) else one for name, one in extra.items()
                }
                exact = linear_reference.linear(x.double(), weight.double(), gate=gate, **wide)
                plain = linear_reference.linear(x, weight, gate=gate, **extra)
                for split_k in (False, True) if m > 16 else (False,):
                    ours = linear(x, weight, gate=gate, split_k=split_k, **extra)
                    compare(ours, plain, exact, steps=8.0)

        yield (1 if m == 1 else 16 if m <= 16 else 64, dtype, gate), f"M={m} N={n} K={k} {dtype} gate={gate}", case


def int8_cases(ctx: Context) -> Cases:
    """The exact result is the reference in float64 on the int8 weights."""
    n, k = (40, 96) if ctx.dry else (1024, 4096)
    rows, dtypes = ((1, 8), DTYPES[:1]) if ctx.dry else ((1, 8, 40), DTYPES[1:])
    for m, dtype, gate in itertools.product(rows, dtypes, (False, True)):

        def case(m: int = m, dtype: torch.dtype = dtype, gate: bool = gate) -> None:
            from kernels.triton.linear_int8 import linear

            x = torch.randn(m, k, device=ctx.device).to(dtype)
            weight = torch.randint(-127, 128, (n * (2 if gate else 1), k), dtype=torch.int8, device=ctx.device)
            scale = torch.rand(len(weight), device=ctx.device) * k**-0.5 / 64
            norm = (1 + 0.1 * torch.randn(k, device=ctx.device)).to(dtype)
            options: dict[str, Any] = {"gate": gate, "eps": 1e-5}
            reference = linear_reference.linear_int8
            exact = reference(x.double(), weight, scale.double(), norm=norm.double(), **options)
            plain = reference(x, weight, scale, norm=norm, **options)
            compare(linear(x, weight, scale, norm=norm, **options), plain, exact, steps=8.0)

        yield (1 if m == 1 else 16 if m <= 16 else 64, dtype, gate), f"M={m} {dtype} gate={gate}", case


def write_cases(ctx: Context) -> Cases:
    for dim, dtype, norm in itertools.product((64, 80, 128), DTYPES, (False, True)):

        def case(dim: int = dim, dtype: torch.dtype = dtype, norm: bool = norm) -> None:
            from kernels.triton.cache_write import rotate_write, write

            lengths = torch.tensor([3, 0, 17], device=ctx.device)
            qkv = torch.randn(3, 5, 12, dim, device=ctx.device).to(dtype)
            cache = torch.randn(2, 4, 2, 32, dim, device=ctx.device).to(dtype)
            angles = torch.outer(torch.arange(20.0), 1.0 / torch.arange(1, dim // 2 + 1)).to(ctx.device)
            weights = torch.rand(2, dim, device=ctx.device).to(dtype)
            norms = (weights[0], weights[1]) if norm else None
            expected, expected_cache = qkv.clone(), cache.clone()
            rotate_write(qkv, cache, lengths, angles.cos(), angles.sin(), norms, 1e-6)
            cache_reference.rotate_write(
                expected, expected_cache, lengths, angles.cos(), angles.sin(), norms, 1e-6
            )
            close = 1e-4 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(qkv, expected, atol=close, rtol=close)
            torch.testing.assert_close(cache, expected_cache, atol=close, rtol=close)
            keys, values = torch.randn(2, 3, 2, 5, dim, device=ctx.device).to(dtype)
            write(keys, values, cache, lengths)
            cache_reference.write(keys, values, expected_cache, lengths)
            torch.testing.assert_close(cache, expected_cache, atol=close, rtol=close)

        yield (dim, dtype), f"D={dim} {dtype} norm={norm}", case


def accept_cases(ctx: Context) -> Cases:
    """The reference is `verify` on CPU copies, where it uses torch only."""
    vocab, rows = (50, 8) if ctx.dry else (32000, 64)
    for temperature, top_p, verification, soft in (
        (0.0, 1.0, "rejection", True),
        (1.0, 1.0, "rejection", True),
        (0.7, 0.95, "rejection", True),
        (1.0, 1.0, "rejection", False),
        (1.0, 1.0, "block", True),
        (0.7, 0.95, "block", True),
        (1.0, 1.0, "block", False),
        (1.0, 1.0, "coupled", True),
        (1.0, 1.0, "coin", False),
    ):
        params = SamplingParams(temperature, top_p=top_p)

        def case(params: SamplingParams = params, verification: str = verification, soft: bool = soft) -> None:
            logits = torch.randn(rows, 8, vocab) * 3
            near = logits[:, :7] + torch.randn(rows, 7, vocab) * 0.5
            q = None if params.greedy else probabilities(near, params)
            ids, at = torch.arange(rows) * 2**33, torch.randint(0, 9999, (rows,))
            keys = NoiseKeys(2**40 + 7, ids, at)
            sequences, positions = keys.at(7)
            roles = torch.full_like(positions, int(Role.DRAFT))
            drafts = near.argmax(-1)
            if q is not None:
                drafts = draw(q, keys.seed, sequences.expand_as(positions), positions, roles)
            q = q if soft else None
            counts = torch.randint(0, 8, (rows,))
            options: dict[str, Any] = (
                {"synthetic": 0.7} if verification == "coin" else {"verification": VERIFICATIONS[verification]}
            )
            theirs = verify(logits, drafts, q, counts, keys, params, **options)
            here = NoiseKeys(keys.seed, ids.to(ctx.device), at.to(ctx.device))
            from bass_core.verification.rejection_triton import verify_on_device

            ours = verify_on_device(
                logits.to(ctx.device), drafts.to(ctx.device), None if q is None else q.to(ctx.device),
                counts.to(ctx.device), here, params, **options,
            )  # fmt: skip
            clear = ((theirs.u * theirs.q - theirs.p).abs() > 1e-5).all(dim=1) | theirs.u.isnan().all(dim=1)
            if theirs.chance is not None:
                clear = ((theirs.u - theirs.chance).abs() > 1e-5).all(dim=1)
            wrong = (ours.accepted.cpu() != theirs.accepted) | (ours.next_token.cpu() != theirs.next_token)
            if (wrong & clear).any():
                raise AssertionError(f"{int((wrong & clear).sum())} of {rows} rows decide differently")
            if verification != "coupled" and not torch.equal(ours.u.cpu(), theirs.u):
                raise AssertionError("the uniforms differ")

        yield (verification, soft), f"temperature {temperature} top_p {top_p} {verification} soft={soft}", case
    yield "distribution", "distribution", lambda: _distribution(ctx)


def _distribution(ctx: Context) -> None:
    """Chi-squared test that rows drafted from q and verified against p emit first tokens by p (level 1e-4)."""
    from kernels.triton.accept import Verification, accept

    rows, vocab = (512 if ctx.dry else 200_000), 6
    params = SamplingParams(temperature=1.0)
    p = probabilities(torch.tensor([1.5, 0.2, -0.4, 0.9, -1.0, 0.0]), params).to(ctx.device)
    q = probabilities(torch.tensor([-0.5, 1.0, 0.3, 0.0, 0.4, -2.0]), params).to(ctx.device)
    ids, at = torch.arange(rows, device=ctx.device), torch.full((rows,), 5, device=ctx.device)
    roles = torch.full_like(at, int(Role.DRAFT))
    drafts = draw(q.expand(rows, vocab), 11, ids, at, roles)[:, None]
    accepted, token, *_ = accept(
        p.expand(rows, 2, vocab), q.expand(rows, 1, vocab), drafts, torch.ones_like(at), None, ids, at,
        torch.tensor([11], device=ctx.device), verification=Verification.REJECTION,
    )  # fmt: skip
    first = torch.where(accepted > 0, drafts[:, 0], token)
    expected = p.double() * rows
    statistic = ((torch.bincount(first, minlength=vocab) - expected) ** 2 / expected).sum().item()
    # The 1 - 1e-4 quantile of chi-squared with five degrees of freedom.
    if statistic > 25.74:
        raise AssertionError(f"chi-squared {statistic:.1f} with 5 degrees of freedom")
