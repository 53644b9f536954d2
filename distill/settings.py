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
    """rows: prompts a shard; own_share: of them, made up by the target itself (own_prompts.py); temperatures: one
    a shard, in turn; layers: of the target, ascending, whose residual stream is kept beside the last hidden state
    (HiddenStateTap in models/base.py).
    """

    rows: int
    own_share: float
    max_new_tokens: int
    temperatures: list[float]
    layers: list[int]


@dataclass(frozen=True)
class TrainSettings:
    """How a draft head is made.

    layers: how many, and start: "random", "target" for copies of its last ones, or the folder of a trained head to
    go on from. reads_states: whether it sees the target's states; reads_layers: all that the corpus kept, or
    the last one alone. vocabulary: how many of the most frequent ids it can propose. longest_row: tokens of a row
    that are looked at. loss: "kl" (forward), "tv" or "mix" (their sum); loss_share: of the positions, drawn anew
    each step. own_states: how many drafted tokens deep it is trained on its own states.
    """

    layers: int
    start: str
    reads_states: bool
    reads_layers: bool
    vocabulary: int
    longest_row: int
    tokens_per_step: int
    loss: str
    loss_share: float
    learning_rate: float
    warmup_steps: int
    own_states: int
    weight_decay: float
    checkpoint_seconds: float
    held_out_shards: int


@dataclass(frozen=True)
class NgramSettings:
    """longest: tokens of context at most; contexts: how many the table keeps."""

    longest: int
    contexts: int


@dataclass(frozen=True)
class Settings:
    """Everything a run depends on, beside the code and the number of tokens and steps asked for."""

    pair: str
    seed: int
    corpus: CorpusSettings
    train: TrainSettings
    ngram: NgramSettings


def load(path: Path = CONFIG) -> Settings:
    """The settings in a file; TypeError names what is unknown or missing."""
    data = json.loads(path.read_text())
    return Settings(
        pair=data["pair"],
        seed=data["seed"],
        corpus=CorpusSettings(**data["corpus"]),
        train=TrainSettings(**data["train"]),
        ngram=NgramSettings(**data["ngram"]),
    )
