"""The settings of a run: `load` reads config.json or night.json here; the command line can override them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

CONFIG, NIGHT = (Path(__file__).parent / name for name in ("config.json", "night.json"))


@dataclass(frozen=True)
class CorpusSettings:
    """Settings of the corpus.

    Attributes:
        conversations: conversations per shard.
        rows: conversations written at the same time.
        max_new_tokens: the maximum number of tokens in an answer.
        longest_row: the maximum number of tokens in a conversation.
        temperatures: temperatures of the answers, one per shard, in turn.
        layers: layers of the target, ascending, whose residual stream is stored in addition to the last hidden
            state (HiddenStateTap in bass_core/model/base.py); null to store no states.
    """

    conversations: int
    rows: int
    max_new_tokens: int
    longest_row: int
    temperatures: list[float]
    layers: list[int] | None


@dataclass(frozen=True)
class TrainSettings:
    """The recipe of a draft head.

    Attributes:
        layers: the number of its layers.
        start: "random", "target" for copies of the target's last layers, or the folder of a trained head to
            continue from.
        reads_states: whether it reads the target's states.
        reads_layers: the layers of the target whose residual stream it reads in addition to the last hidden state;
            best those of the corpus.
        vocabulary: how many of the most frequent ids it can propose.
        longest_row: rows are cut to this many tokens.
        tokens_per_step: the maximum number of tokens in a batch, including padding.
        share: the share of the scored positions that a step trains on, drawn again in each step.
        learning_rate: the highest learning rate.
        warmup_steps: steps of linear warm-up.
        own_states: how many levels of draft tokens after the first we train on the head's own states.
        weight_decay: AdamW's weight decay.
        checkpoint_seconds: time between checkpoints.
        held_out_shards: the first shards, which are only used for measuring.
        loss: "log" or "variation" (LOSSES in train.py).
        qk_norm: whether its layers normalise queries and keys.
    """

    layers: int
    start: str
    reads_states: bool
    reads_layers: list[int]
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
    loss: str = "log"
    qk_norm: bool = False


@dataclass(frozen=True)
class Settings:
    """Everything that a run depends on, except for the code and the requested numbers of tokens and steps."""

    pair: str
    seed: int
    corpus: CorpusSettings
    train: TrainSettings


def load(path: Path = CONFIG) -> Settings:
    """Return the settings in a file.

    Raises:
        TypeError: if a setting is unknown or missing; the message names it.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    return Settings(
        pair=data["pair"],
        seed=data["seed"],
        corpus=CorpusSettings(**data["corpus"]),
        train=TrainSettings(**data["train"]),
    )
