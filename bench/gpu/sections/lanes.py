"""The three lanes with synthetic acceptance: drafts are accepted with a given probability, all else is real work.

Contract: per batch size a regular lane, and per acceptance rate BASS under Algorithm 1 and with fixed draft
lengths, all greedy, without an early end. Batch 8 comes first, as most claims are about it. Lane clocks exclude
prefill and graph capture. The fastest policy of each case is named. `generate` is timed on the same weights.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from bass_core import generate, load_pair, race
from bass_core.lanes.generation import Generation
from bass_core.loading.weights import FOLDER, is_complete
from bass_core.machine.user_cache import cache_root
from bass_core.models.llama_cuda import LlamaCuda

from ...prompts import mixed
from ..context import Context
from .races import write_recording

ACCEPTANCES = (0.6, 0.7, 0.8, 0.9)


def run(ctx: Context) -> None:
    """Batch 8 with many policies, then generate, then the other batches with fewer."""
    fixed = (2, 3) if ctx.dry else (4, 6) if ctx.quick else (3, 4, 5, 6, 7, 8, 10)
    batch(ctx, 2 if ctx.dry else 8, fixed, repeats=1 if ctx.short else 3)
    chained_drafts(ctx, 2 if ctx.dry else 8, fixed[:1] if ctx.short else (4, 6, 8))
    transformers_generate(ctx)
    for size in () if ctx.short else (1, 16, 4, 2, 32):
        batch(ctx, size, (4, 6), repeats=1)


def batch(ctx: Context, size: int, fixed: tuple[int, ...], repeats: int) -> None:
    """Regular, speculative and BASS at one batch size."""
    if ctx.late:
        return
    prompts = ctx.prompts(size)
    count = 6 if ctx.dry else 128
    regular = record(ctx, f"b{size}", "regular", prompts, count, repeats)
    base = regular.metrics.ms_per_token or float("nan")
    for acceptance in ACCEPTANCES[2:3] if ctx.dry else ACCEPTANCES:
        if ctx.late:
            return
        if size <= 8 and acceptance == 0.8:
            one = record(ctx, f"b{size} a{acceptance}", "speculative", prompts, min(count, 64), 1, acceptance, 5)
            speedup(ctx, f"b{size} a{acceptance} speculative l=5", base, one)
        best: tuple[float, Any] = (0.0, None)
        # The cost-aware policy runs at batch 8 only: measuring its cost table takes time.
        measured = ("cost-aware",) if size == 8 else ()
        for policy in ("bass", *measured, *fixed):
            try:
                made = record(ctx, f"b{size} a{acceptance}", "bass", prompts, count, repeats, acceptance, policy)
            except Exception as error:
                ctx.row(f"b{size} a{acceptance} l={policy}", "failed", f"{type(error).__name__}: {error}"[:200])
                continue
            gained = speedup(ctx, f"b{size} a{acceptance} bass l={policy}", base, made)
            best = max(best, (gained, policy), key=lambda pair: pair[0])
        ctx.row(f"b{size} a{acceptance}", "best BASS / regular", best[0], "", f"draft length {best[1]}")


def chained_drafts(ctx: Context, size: int, lengths: tuple[int, ...]) -> None:
    """BASS with a round's greedy drafts in one captured step, over one step per draft; not a shipped option."""
    draft = ctx.pair.draft_step
    if ctx.late or not isinstance(draft, LlamaCuda):
        return
    prompts, count, plan = ctx.prompts(size), 6 if ctx.dry else 128, draft.plan
    for length in lengths:
        times = []
        for chain in (False, True):
            draft.plan = replace(plan, chain=chain)
            case = f"b{size}, {'drafts in one graph' if chain else 'draft by draft'},"
            made = record(ctx, case, "bass", prompts, count, 1, 0.8, length)
            times.append(made.metrics.ms_per_token or float("nan"))
        draft.plan = plan
        ctx.row(f"b{size} l={length}", "drafts in one graph / draft by draft", times[1] / times[0])


def record(
    ctx: Context,
    case: str,
    method: str,
    prompts: list[list[int]],
    count: int,
    repeats: int,
    acceptance: float | None = None,
    policy: Any = 0,
) -> Generation:
    """One unmeasured run that captures the graphs, then the median of `repeats` runs by ms per token."""
    arguments: dict[str, Any] = {"max_new_tokens": count, "eos_token_id": None, "attention": ctx.backend}
    if method != "regular":
        arguments |= {"draft_length": policy, "synthetic_acceptance": acceptance, "drafter": "model"}
    runs = [generate(ctx.pair, prompts, method=method, seed=i, **arguments) for i in range(repeats + 1)][1:]
    made = sorted(runs, key=lambda run: run.metrics.ms_per_token or 0)[len(runs) // 2]
    name = f"{case} {method}" + ("" if method == "regular" else f" l={policy}")
    note = "" if acceptance is None else f"synthetic acceptance {acceptance}"
    metrics = made.metrics
    for what, unit in (
        ("ms_per_token", "ms"),
        ("ptl_first_ms", "ms"),
        ("ptl_last_ms", "ms"),
        ("ptl_all_ms", "ms"),
        ("throughput_tps", "tokens/s"),
        ("mean_acceptance_length", "tokens"),
        ("flops_utilization", ""),
        ("useful_flops_utilization", ""),
        ("bandwidth_utilization", ""),
    ):
        ctx.row(name, what, getattr(metrics, what), unit, note)
    return made


def speedup(ctx: Context, case: str, base: float, made: Generation) -> float:
    """Regular decoding's ms per token over this run's."""
    gained = base / (made.metrics.ms_per_token or float("nan"))
    ctx.row(case, "speed-up over regular", gained)
    return gained


def transformers_generate(ctx: Context) -> None:
    """Eager `generate` at batch 8: time per decoding step, from runs of two lengths."""
    size = 2 if ctx.dry else 8
    short, long = (2, 6) if ctx.dry else (4, 36)
    ms = generate_ms(ctx, size, short, long, {})
    ctx.row(f"b{size}", "generate, eager", ms, "ms/token", f"transformers, attention {attention(ctx)}")


def attention(ctx: Context) -> str:
    """The attention implementation with which transformers runs the model as given."""
    return str(ctx.pair.target.config._attn_implementation)


def generate_ms(ctx: Context, size: int, short: int, long: int, options: dict[str, Any]) -> float:
    """(Time of `long` tokens - time of `short` tokens) / (long - short), in ms: the prefill cancels out."""
    rows = ctx.prompts(size)
    width = max(len(row) for row in rows)
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=ctx.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=ctx.device)
    model: Any = ctx.pair.target
    times = []
    for count in (short, short, long, short, long):
        if not ctx.dry:
            torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=count, min_new_tokens=count, pad_token_id=0,
            **options,
        )  # fmt: skip
        if not ctx.dry:
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    # The first call warms up; the rest alternate.
    return (min(times[2], times[4]) - min(times[1], times[3])) / (long - short)


def compiled(ctx: Context) -> None:
    """`generate` with a static cache, which transformers compiles; compiling is slow, hence its own section."""
    if ctx.dry:
        ctx.row("generate, static cache", "not run", "compiling needs a GPU")
        return
    ms = generate_ms(ctx, 8, 4, 36, {"cache_implementation": "static"})
    ctx.row("b8", "generate, static + compile", ms, "ms/token", "transformers")


def smollm2(ctx: Context) -> None:
    """The `smollm2` pair, greedy on real text, if its weights are in the cache folder; nothing is downloaded."""
    if ctx.dry or not is_complete(cache_root() / FOLDER):
        ctx.row("smollm2", "not run", "a dry run" if ctx.dry else f"no weights in {cache_root()}")
        return
    pair = load_pair("smollm2", device=ctx.device)
    arguments: dict[str, Any] = {"max_new_tokens": 128, "eos_token_id": None, "draft_length": "bass"}
    for size in (1, 8):
        prompts = mixed(size)
        for method in ("regular", "bass"):
            generate(pair, prompts, method=method, **arguments)
            metrics = generate(pair, prompts, method=method, **arguments).metrics
            ctx.row(f"smollm2 b{size} {method}", "ms_per_token", metrics.ms_per_token, "ms")
            ctx.row(f"smollm2 b{size} {method}", "acceptance_rate", metrics.acceptance_rate)
    snapshots = list(race(pair, mixed(4), **arguments))
    about = f"smollm2 (SmolLM2-135M-Instruct) on {ctx.device}, batch 4, greedy, scheduling fair"
    write_recording(ctx.recordings / "smollm2-fair.json.xz", about, snapshots)
