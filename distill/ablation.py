"""Which parts of a draft head's recipe pay: short runs from the start, each with one setting changed.

Contract: `ablate` trains every arm of `ARMS` on one corpus for as many steps and yields a row an arm, as it is
done: how well it drafts on the held-out shards (train.py's `measure`), and what a drafted token costs. Arms that
were trained before are not trained again. Short runs rank settings roughly: a larger head learns more slowly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bass_core import ModelPair
from bass_core.draft_head import load_draft_head

from .evaluate import cost_ratio
from .settings import Settings
from .train import train

ARMS: dict[str, dict[str, Any]] = {
    "as in config.json": {},
    "2 layers": {"layers": 2},
    "3 layers": {"layers": 3},
    "last state alone": {"reads_layers": False},
    "no states": {"reads_states": False},
    "forward KL": {"loss": "kl"},
    "total variation": {"loss": "tv"},
    "true states alone": {"own_states": 0},
    "layers copied from the target": {"start": "target"},
}


def ablate(pair: ModelPair, settings: Settings, corpus: Path, out: Path, steps: int) -> Iterator[dict[str, Any]]:
    """One row an arm: name, changes, loss of the first token, held-out shards, drafted token's ms and c."""
    for name, changes in ARMS.items():
        arm = replace(settings, train=replace(settings.train, **changes))
        folder = out / name.replace(" ", "-")
        log = train(pair, arm, corpus, folder, steps)
        drafted = ModelPair(pair.target, load_draft_head(folder, pair.target), pair.tokenizer, name=pair.name)
        yield {
            "arm": name,
            "changes": changes,
            "steps": steps,
            "loss": log["loss"][-1][1],
            "seconds": log["held_out"][-1]["seconds"],
            "shards": log["held_out"][-1]["shards"],
            **cost_ratio(drafted),
        }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown: overlap and share of equal argmax of the first drafted token, then of the second."""
    shards = range(len(rows[0]["shards"]))
    lines = ["| arm | " + " | ".join(f"shard {i}" for i in shards) + " | ms a draft, c |"]
    lines.append("|---" * (len(shards) + 2) + "|")
    for row in rows:
        cells = [
            " \\| ".join(f"{token['overlap']:.3f}, {token['agreement']:.3f}" for token in tokens[:2])
            for tokens in row["shards"]
        ]
        lines.append(f"| {row['arm']} | {' | '.join(cells)} | {row['draft_ms']:.2f}, {row['c']:.3f} |")
    return "\n".join(lines)
