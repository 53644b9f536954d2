"""Ablation of a draft head's recipe: short runs, each with one setting changed. Call `ablate`.

Runs start as in the settings. From a trained head, name the arms that it fits (`_continue_from` in train.py).
Arms that were trained before are not trained again. Short runs rank settings only roughly, because a larger head
learns more slowly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    "last state alone": {"reads_layers": []},
    "one tap": {"reads_layers": [15]},
    "three taps": {"reads_layers": [8, 15, 22]},
    "q/k norms": {"qk_norm": True},
    "variation": {"loss": "variation"},
    "three drafts": {"own_states": 2},
    "variation, three drafts": {"loss": "variation", "own_states": 2},
}


def ablate(
    pair: ModelPair,
    settings: Settings,
    corpus: Path,
    out: Path,
    steps: int,
    arms: Sequence[str],
    questions: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """Train some arms of `ARMS` on one corpus for `steps` steps, and yield each one's row as soon as it is done.

    `questions` as in `train`.

    A row has the arm's name and changes, steps, seconds, the quality on the held-out shards (train.py's
    `measure`), and the cost of a draft token in ms and relative to a target step (c).
    """
    for name in arms:
        changes = ARMS[name]
        arm = replace(settings, train=replace(settings.train, **changes))
        if arm == settings and name != BASELINE:
            continue
        folder = out / f"{steps}-steps" / name.replace(" ", "-")
        last = train(pair, arm, corpus, folder, steps, questions)["held_out"][-1]
        yield {"arm": name, "changes": changes, **last, **_cost(pair, folder)}


def _cost(pair: ModelPair, folder: Path) -> dict[str, float]:
    head = load_draft_head(folder, pair.target)
    return cost_ratio(ModelPair(pair.target, head, pair.tokenizer, name=pair.name))


def as_markdown(rows: list[dict[str, Any]], temperatures: list[float]) -> str:
    """Return a table with the overlap and the share of equal argmax of the first draft token, the second, ...

    Args:
        rows: the rows of `ablate`.
        temperatures: those of the corpus; held-out shard i has temperature i modulo their number.
    """
    names = [f"T {temperatures[i % len(temperatures)]:g}" for i in range(len(rows[0]["shards"]))]
    lines = ["| arm | " + " | ".join(names) + " | ms a draft, c |", "|---" * (len(names) + 2) + "|"]
    for row in rows:
        cells = [
            " \\| ".join(f"{token['overlap']:.3f}, {token['agreement']:.3f}" for token in tokens)
            for tokens in row["shards"]
        ]
        lines.append(f"| {row['arm']} | {' | '.join(cells)} | {row['draft_ms']:.2f}, {row['c']:.3f} |")
    return "\n".join(lines)
