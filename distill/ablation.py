"""Ablation of a draft head's recipe: short runs from scratch, each with one setting changed. Call `ablate`.

Arms that were trained before are not trained again. Short runs rank settings only roughly, because a larger head
learns more slowly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bass_core import ModelPair
from bass_core.model.draft_head import load_draft_head

from .evaluate import cost_ratio
from .settings import Settings
from .train import train

BASELINE = "baseline"
ARMS: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "2 layers": {"layers": 2},
    "3 layers": {"layers": 3},
    "last state alone": {"reads_layers": False},
    "no states": {"reads_states": False},
    "true states alone": {"own_states": 0},
    "layers copied from the target": {"start": "target"},
}


def ablate(pair: ModelPair, settings: Settings, corpus: Path, out: Path, steps: int) -> Iterator[dict[str, Any]]:
    """Train every arm of `ARMS` on one corpus for `steps` steps, and yield its row as soon as it is done.

    A row has the arm's name and changes, steps, seconds, the quality on the held-out shards (train.py's
    `measure`), and the cost of a draft token in ms and relative to a target step (c).

    Raises:
        SystemExit: if the settings start from a trained head, which does not fit arms of other shapes.
    """
    if settings.train.start not in ("random", "target"):
        raise SystemExit('An ablation trains new heads: set start to "random" or "target".')
    for name, changes in ARMS.items():
        arm = replace(settings, train=replace(settings.train, **changes))
        if arm == settings and name != BASELINE:
            continue
        folder = out / f"{steps}-steps" / name.replace(" ", "-")
        last = train(pair, arm, corpus, folder, steps)["held_out"][-1]
        yield {"arm": name, "changes": changes, **last, **_cost(pair, folder)}


def _cost(pair: ModelPair, folder: Path) -> dict[str, float]:
    head = load_draft_head(folder, pair.target)
    return cost_ratio(ModelPair(pair.target, head, pair.tokenizer, name=pair.name))


def as_markdown(rows: list[dict[str, Any]], temperatures: list[float]) -> str:
    """Return a table with the overlap and the share of equal argmax of the first draft token, then of the second.

    Args:
        rows: the rows of `ablate`.
        temperatures: those of the corpus; held-out shard i has temperature i modulo their number.
    """
    names = [f"T {temperatures[i % len(temperatures)]:g}" for i in range(len(rows[0]["shards"]))]
    lines = ["| arm | " + " | ".join(names) + " | ms a draft, c |", "|---" * (len(names) + 2) + "|"]
    for row in rows:
        cells = [
            " \\| ".join(f"{token['overlap']:.3f}, {token['agreement']:.3f}" for token in tokens[:2])
            for tokens in row["shards"]
        ]
        lines.append(f"| {row['arm']} | {' | '.join(cells)} | {row['draft_ms']:.2f}, {row['c']:.3f} |")
    return "\n".join(lines)
