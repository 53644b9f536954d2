"""The corpus: the target's answers to many prompts, with its hidden states at every token.

Contract: shard k of a folder depends only on the pair, the settings, the installed Python library and k. It is
written whole or not at all; a run that was killed goes on with the first missing shard. A shard holds `tokens`
int32 [N]; `states` float16 [N, width], the target's states at each token (of the layers that the settings name,
then the last hidden state, as HiddenStateTap in model/base.py says; zeros at a row's last token, which was never
fed); `starts` int64 [rows + 1], where rows begin and end; `prompts` int64 [rows], the length of each row's prompt;
and `layers` int64, those layers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from bass_core import ModelPair, SamplingParams
from bass_core.decode.base import DecodingParams
from bass_core.decode.batch import BatchDecoder
from bass_core.decode.request import make_request
from bass_core.draft.base import Drafter, Proposal
from bass_core.model.base import HiddenStateTap
from bass_core.model.runner import ModelRunner
from bass_core.sample.noise import NoiseKeys
from bass_core.sequence import Sequence

from .own_prompts import own_prompts
from .prompts import corpus_prompts
from .settings import Settings

PROMPT_TOKENS = 256
# The least prefill_tokens here: no request has to stop halfway, and on a CPU long chunks take half the time.
SHARD_PREFILL_TOKENS = 2048


class StateRecorder(Drafter):
    """A drafter that proposes nothing and keeps the states that it is given."""

    observes_states = True

    def __init__(self) -> None:
        self.states: dict[int, list[Tensor]] = {}

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        return Proposal(torch.zeros(len(rows), 0, dtype=torch.long), [0] * len(rows))

    def observe_states(self, rows: list[Sequence], states: list[Tensor]) -> None:
        for row, state in zip(rows, states, strict=True):
            self.states.setdefault(row.index, []).append(state.to("cpu", torch.float16, copy=True))


def write_corpus(pair: ModelPair, settings: Settings, folder: Path, tokens: int) -> int:
    """Write shards until the folder holds `tokens` generated tokens; returns how many it holds.

    Several processes may write to one folder: each takes the next shard that is neither written nor locked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    check_layers(shards(folder), settings)
    counts: dict[Path, int] = {}
    with tqdm(total=tokens, unit="tok", desc="corpus") as bar:
        number = 0
        while _held(folder, counts) < tokens:
            _write_missing(pair, settings, folder, number)
            bar.update(_held(folder, counts) - bar.n)
            number += 1
    return _held(folder, counts)


def _write_missing(pair: ModelPair, settings: Settings, folder: Path, number: int) -> None:
    path = folder / f"shard-{number:05d}.safetensors"
    if path.exists():
        return
    try:
        with FileLock(path.with_suffix(".lock"), timeout=0):
            if not path.exists():
                _save(path, write_shard(pair, settings, number))
    except Timeout:
        return  # Another process writes this one.


def _held(folder: Path, counts: dict[Path, int]) -> int:
    """Generated tokens in all shards, whichever process wrote them; `counts` caches those of each shard."""
    for path in shards(folder):
        if path not in counts:
            with safe_open(path, "pt") as shard:
                starts, prompts = shard.get_tensor("starts"), shard.get_tensor("prompts")
            counts[path] = int(starts[-1] - prompts.sum())
    return sum(counts.values())


def write_shard(pair: ModelPair, settings: Settings, number: int) -> dict[str, Tensor]:
    """One batch of different prompts, answered by regular decoding at the shard's temperature."""
    corpus = settings.corpus
    seed = settings.seed * 1_000_003 + number
    own = round(corpus.own_share * corpus.rows)
    prompts = corpus_prompts(seed, corpus.rows - own) + own_prompts(pair, own, seed)
    ids = [make_request(pair, prompt).prompts[0][:PROMPT_TOKENS] for prompt in prompts]
    sampling = SamplingParams(temperature=corpus.temperatures[number % len(corpus.temperatures)])
    request = make_request(pair, ids, max_new_tokens=corpus.max_new_tokens, sampling=sampling, seed=seed)
    sequences, recorder = request.sequences(), StateRecorder()
    step, readout = pair.target_step, pair.target_step.readout
    step.readout = HiddenStateTap(tuple(corpus.layers))
    try:
        runner = ModelRunner(step, len(ids), request.longest + 1, pair.vocab, request.backend)
        runner.prefill_tokens = max(runner.prefill_tokens, SHARD_PREFILL_TOKENS)
        decoder = BatchDecoder(sequences, runner, DecodingParams(sampling, seed), recorder)
        while not decoder.finished:
            decoder.step()
    finally:
        step.readout = readout
    rows = [torch.cat(recorder.states[row.index]) for row in sequences]
    # The newest token of a row was never fed, so it has no state.
    states = [torch.cat((state, state.new_zeros(1, state.shape[1]))) for state in rows]
    lengths = [0, *(len(row.tokens) for row in sequences)]
    return {
        "tokens": torch.tensor([token for row in sequences for token in row.tokens], dtype=torch.int32),
        "states": torch.cat(states),
        "starts": torch.tensor(lengths).cumsum(0),
        "prompts": torch.tensor([len(row.prompt) for row in sequences]),
        "layers": torch.tensor(corpus.layers, dtype=torch.long),
    }


def shards(folder: Path) -> list[Path]:
    """The shards of a folder, in order."""
    return sorted(folder.glob("shard-*.safetensors"))


def check_layers(paths: list[Path], settings: Settings) -> None:
    """Exits if a shard holds other layers of the target than the settings name."""
    for path in paths:
        with safe_open(path, "pt") as shard:
            held = shard.get_tensor("layers").tolist() if "layers" in list(shard.keys()) else []
        if held != settings.corpus.layers:
            raise SystemExit(
                f"{path} was written with the target's layers {held}, and config.json names "
                f"{settings.corpus.layers}: name those, or write the corpus again in another --work folder."
            )


def rows_of(path: Path) -> Iterator[tuple[Tensor, Tensor, int]]:
    """(tokens int64 [n], states float16 [n, width], length of the prompt) of each row of a shard."""
    shard = load_file(path)
    starts = shard["starts"].tolist()
    for row, prompt in enumerate(shard["prompts"].tolist()):
        part = slice(starts[row], starts[row + 1])
        yield shard["tokens"][part].long(), shard["states"][part], prompt


def _save(path: Path, shard: dict[str, Tensor]) -> None:
    part = path.with_suffix(".part")
    save_file(shard, part)
    os.replace(part, path)
