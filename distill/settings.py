"""The settings of a run: config.json beside this file, with any of them overridden on the command line.

Contract: `load` returns plain frozen data; an unknown name in the file is an error.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

CONFIG = Path(__file__).parent / "config.json"


@dataclass(frozen=True)
class CorpusSettings:
    """conversations: in a shard; rows: of them written at once; max_new_tokens: of an answer; longest_row: tokens
    of a conversation; temperatures: of the answers, one per shard, in turn; layers: layers of the target,
    ascending, whose residual stream is kept besides the last hidden state (HiddenStateTap in model/base.py).
    """

    conversations: int
    rows: int
    max_new_tokens: int
    longest_row: int
    temperatures: list[float]
    layers: list[int]


@dataclass(frozen=True)
class TrainSettings:
    """How a draft head is made.

    layers: how many it has; start: "random", "target" for copies of the target's last ones, or the folder of a
    trained head to continue from. reads_states: whether it reads the target's states; reads_layers: all that the
    corpus kept, or only the last. vocabulary: how many of the most frequent ids it can propose. longest_row: rows
    are cut to so many tokens. share: of the positions that count, drawn anew each step. own_states: how many
    drafted tokens deep it is trained on its own states.
    """

    layers: int
    start: str
    reads_states: bool
    reads_layers: bool
    vocabulary: int
    longest_row: int
    tokens_per_step: int
    share: float
    learning_rate: float
    warmup_steps: int
    own_states: int
    weight_decay: float
    checkpoint_seconds: float
    held_out_shards: int


@dataclass(frozen=True)
class Settings:
    """Everything a run depends on, besides the code and the number of tokens and steps asked for."""

    pair: str
    seed: int
    corpus: CorpusSettings
    train: TrainSettings


def load(path: Path = CONFIG) -> Settings:
    """The settings in a file. Raises TypeError, naming an unknown or missing one."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return Settings(
        pair=data["pair"],
        seed=data["seed"],
        corpus=CorpusSettings(**data["corpus"]),
        train=TrainSettings(**data["train"]),
    )
