"""Decode, verify and draft steps of the 7.8B shape against the time it takes to read their bytes.

Contract: floor = (bytes of weights and of live keys and values) / copy bandwidth. First each plan for the products
is timed, one of them with the best tiles of products.py. The fastest is used from then on, in later sections too;
the rows name it.
"""

from __future__ import annotations

from typing import Any

import torch

from bass_core.engine.cuda_graphs import release_idle
from bass_core.models.base import CausalModel
from bass_core.models.forward import ForwardBatch
from bass_core.models.llama_cuda import LlamaCuda, Plan

from .. import results
from ..context import Context, answers
from ..timing import milliseconds

Tiles = dict[tuple[int, bool], dict[str, int]]
_shipped: Any = None
PLANS = {
    "ours": Plan(),
    "ours up to 16 rows": Plan(most_rows=16),
    "ours, torch at 1 row": Plan(gemv=False),
    "torch": Plan(most_rows=0),
    "ours, K in parts": Plan(split_k=True),
    "ours, best tiles": Plan(),
}
TILED = "ours, best tiles"


def run(ctx: Context) -> None:
    """Bandwidth, plans, then the grid of steps."""
    ctx.row("device", "copy bandwidth", ctx.bandwidth / 1e9, "GB/s")
    target, draft = ctx.pair.target_step, ctx.pair.draft_step
    assert draft is not None
    for name, model in (("target", target), ("draft", draft)):
        ctx.row(name, "parameters", model.cost.parameters / 1e9, "1e9", "without a table that is only looked up")
    choose_plans(ctx)
    kvs = (16,) if ctx.dry else (512, 4096)
    for kv in kvs:
        for batch in (1, 8) if ctx.short else (1, 8, 32):
            report(ctx, target, f"decode-b{batch}-kv{kv}", batch, 1, kv)
    kv = kvs[0]
    for width in (5, 9):
        for batch in (8,) if ctx.short else (1, 8, 32):
            if not ctx.late:
                report(ctx, target, f"verify{width}-b{batch}-kv{kv}", batch, width, kv)
    for batch in (1, 8) if ctx.short else (1, 8, 32):
        report(ctx, draft, f"draft-b{batch}-kv{kv}", batch, 1, kv)


def choose_plans(ctx: Context) -> None:
    """Set each model's plan to the one with the least sum of step / floor over the timed shapes."""
    kv = 16 if ctx.dry else 512
    for name, model in (("target", ctx.pair.target_step), ("draft", ctx.pair.draft_step)):
        if not isinstance(model, LlamaCuda):
            ctx.row(name, "plan", "transformers' forward")
            continue
        # (batch, width), all of equal weight; only the target makes verify steps.
        shapes = ((1, 1), (8, 1)) if name == "draft" else ((1, 1), (8, 1), (8, 5))
        scores: dict[str, float] = {}
        for label in PLANS:
            if label == TILED and (name == "draft" or not best_tiles(ctx)):
                continue  # both models use the same tiles, and the target's products choose them
            try:
                use(ctx, name, label)
                times = [step_ms(ctx, model, batch, width, kv) for batch, width in shapes]
            except Exception as error:
                ctx.row(f"{name}, {label}", "failed", f"{type(error).__name__}: {error}"[:200])
                if not answers(ctx.device):
                    raise
                continue
            for (batch, width), ms in zip(shapes, times, strict=True):
                ctx.row(f"{name}, {label}", f"b{batch} x {width}", ms, "ms")
            scores[label] = sum(
                ms / step_floor(ctx, model, *shape, kv) for shape, ms in zip(shapes, times, strict=True)
            )
        best = min(scores, key=lambda label: scores[label])
        use(ctx, name, best)
        ctx.row(name, "plan", best)
        ctx.emit(kind="plan", model=name, plan=best)


def use(ctx: Context, name: str, label: str) -> None:
    """Give the target or the draft the plan with this label; the target's plan also sets the tiles."""
    model = ctx.pair.target_step if name == "target" else ctx.pair.draft_step
    if isinstance(model, LlamaCuda):
        model.plan = PLANS[label]
    if name == "target" and best_tiles(ctx):
        set_tiles(best_tiles(ctx) if label == TILED else {})


def apply_chosen(ctx: Context) -> None:
    """Use the plans and tiles that choose_plans recorded."""
    for line in results.read(ctx.out):
        if line["kind"] == "plan":
            use(ctx, line["model"], line["plan"])


def best_tiles(ctx: Context) -> Tiles:
    """The best tiles that products.py recorded, by rows and gate."""
    lines = results.read(ctx.out)
    return {(line["rows"], line["gate"]): line["tile"] for line in lines if line["kind"] == "tile"}


def set_tiles(best: Tiles) -> None:
    """Replace this process's tiles by the best ones: those for 8 rows serve 2 to 16, those for 40 serve more."""
    from kernels.triton import linear

    def tiles(rows: int, gate: bool, itemsize: int) -> dict[str, int]:
        measured = 1 if rows == 1 else 8 if rows <= 16 else 40
        return best.get((measured, gate)) or _shipped(rows, gate, itemsize)

    global _shipped
    _shipped = _shipped or linear.tiles
    linear.tiles = tiles


def report(ctx: Context, model: CausalModel, case: str, batch: int, width: int, kv: int) -> None:
    """A step's time, its floor, and their ratio."""
    ms, floor = step_ms(ctx, model, batch, width, kv), step_floor(ctx, model, batch, width, kv)
    ctx.row(case, "step", ms, "ms")
    ctx.row(case, "floor", floor, "ms")
    ctx.row(case, "step / floor", ms / floor)


def step_floor(ctx: Context, model: CausalModel, batch: int, width: int, kv: int) -> float:
    """Milliseconds to read the weights and the live keys and values at copy bandwidth."""
    return 1000 * (model.cost.weight_bytes + batch * (kv + width) * model.cost.kv_bytes) / ctx.bandwidth


@torch.inference_mode()
def step_ms(ctx: Context, model: CausalModel, batch: int, width: int, kv: int) -> float:
    """Median milliseconds of a replay of the captured step."""
    runner = ctx.runner(model, batch, kv + width)
    ids = torch.randint(0, model.vocab, (batch, width), device=ctx.device)
    runner.forward(ForwardBatch(ids, [kv] * batch))
    if not runner.slot.steps:
        raise RuntimeError("the step could not be captured")
    step = next(reversed(runner.slot.steps.values()))
    ms = milliseconds(step.replay, ctx.device, repeats=20)
    del runner, step
    release_idle(model)
    return ms
