"""The `smollm2` pair, where its weights are at hand: lanes on real text, and a recording of words.

Contract: nothing is fetched; where the converted folder is missing the section says so and ends.
"""

from __future__ import annotations

from typing import Any

from bass_core import generate, load_pair, race
from bass_core.weights import FOLDER, cache_root, is_complete

from ..prompts import mixed
from .context import Context
from .races import write_recording


def run(ctx: Context) -> None:
    """Greedy, 128 tokens, batch 1 and 8."""
    if ctx.dry or not is_complete(cache_root() / FOLDER):
        ctx.row("smollm2", "not run", "a dry run" if ctx.dry else f"no weights in {cache_root()}")
        return
    pair = load_pair("smollm2", device=ctx.device)
    arguments: dict[str, Any] = {"max_new_tokens": 128, "eos_token_id": None}
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
