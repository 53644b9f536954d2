"""The corpus: conversations with the target, and perhaps its hidden states. Call `write_corpus`.

Shard k of a folder depends only on the pair, the settings, the installed Python library and k. It is written whole
or not at all, and a killed run continues with the first missing shard.

A shard holds these tensors:
    tokens: uint16 [N], or int32 if an id is above 65,535.
    scored: uint8 [N / 8], a bit per token: whether the target wrote the next token as a part of an answer.
    starts: int64 [rows + 1], the boundaries of the rows.
If the settings name layers, it also holds the states, a thousand times as many bytes. Training computes states
that are not stored (Reader in batches.py).
    states: float16 [N, hidden], the target's last hidden state at each token; zeros at a row's last token, whose
        state is not needed.
    streams: float8_e4m3fn [N, layers x hidden], the states of the settings' layers, likewise (HiddenStateTap in
        model/base.py). They are most of a shard, and 8 bits are enough for states that a head only reads.
    layers: int64, the settings' layers.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from filelock import FileLock, Timeout
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from bass_core import ModelPair
from bass_core.decode.request import make_request
from bass_core.machine.transfer import to_device, to_host
from bass_core.model.base import HiddenStateTap
from bass_core.model.forward import ForwardBatch, ForwardOutput
from bass_core.model.graphs import make_runner
from bass_core.sample.distribution import argmax
from bass_core.sample.rows import RaggedRows
from kernels.support import is_accelerator

from .prompts import Turn, conversations, evaluation_prompts
from .settings import CorpusSettings, Settings

# How many tokens of a prompt one forward reads while other rows write. An accelerator computes padding too, and
# captures steps of 1 and of CHUNK tokens.
CHUNK = {"cpu": 32, "accelerator": 4}
# The target invents some user turns by completing an empty one (Magpie, arXiv 2406.08464). These are the least and
# greatest number of tokens of such a turn, and its temperature. At temperature 1, more of these turns would be
# nonsense. Answers use the shard's temperature.
SHORTEST, LONGEST, TEMPERATURE = 4, 80, 0.8
# Other conversations may quote an answer that has at least MIN_QUOTED characters, if its prompt has at most
# MAX_ASKED.
MIN_QUOTED, MAX_ASKED = 200, 200
# The minimum number of letters of a word that a prompt may ask about.
SHORTEST_WORD = 4
# The minimum number of tokens that must remain for an answer.
MIN_ANSWER_ROOM = 48
# The number of probabilities that are summed up at once to draw a token.
BLOCK = 256


def write_corpus(
    pair: ModelPair, settings: Settings, folder: Path, tokens: int, deadline: float = math.inf
) -> int:
    """Write shards until the folder holds `tokens` scored tokens, and return how many it holds.

    Several processes may write to one folder: each takes the next shard that is neither written nor locked. No
    shard is begun after `deadline`, a time of `time.monotonic`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    counts: dict[Path, int] = {}
    with tqdm(total=tokens, unit="tok", desc="corpus") as bar:
        number = 0
        while _num_scored(folder, counts) < tokens and time.monotonic() < deadline:
            _write_missing(pair, settings, folder, number)
            bar.update(_num_scored(folder, counts) - bar.n)
            number += 1
    return _num_scored(folder, counts)


def _write_missing(pair: ModelPair, settings: Settings, folder: Path, number: int) -> None:
    path = folder / f"shard-{number:05d}.safetensors"
    if path.exists():
        return
    try:
        with FileLock(path.with_suffix(".lock"), timeout=0):
            if not path.exists():
                _save(path, write_shard(pair, settings, number))
    except Timeout:
        return  # Another process is writing this shard.


def _num_scored(folder: Path, counts: dict[Path, int]) -> int:
    """Return the scored tokens of all shards, from every process; `counts` caches those of each shard."""
    for path in shards(folder):
        if path not in counts:
            counts[path] = int(read_ids(open_shard(path))[1].sum())
    return sum(counts.values())


def write_shard(pair: ModelPair, settings: Settings, number: int) -> dict[str, Tensor]:
    """Let the target write the conversations of shard `number`, with answers at the shard's temperature."""
    corpus = settings.corpus
    seed = settings.seed * 1_000_003 + number
    step, readout = pair.target_step, pair.target_step.readout
    step.readout = HiddenStateTap(tuple(corpus.layers or ()))
    try:
        temperature = corpus.temperatures[number % len(corpus.temperatures)]
        user_turns = conversations(seed, corpus.conversations, words_of(pair))
        rows = Writer(pair, corpus, temperature, seed).write(user_turns)
    finally:
        step.readout = readout
    # Shift by one: `scored` is about the next token.
    scored = [flag for row in rows for flag in (*row.answer[1:], False)]
    tokens = [token for row in rows for token in row.tokens]
    ids = {
        "tokens": torch.tensor(tokens, dtype=torch.uint16 if max(tokens, default=0) < 1 << 16 else torch.int32),
        "scored": torch.from_numpy(np.packbits(scored)),
        "starts": torch.tensor([0, *(len(row.tokens) for row in rows)]).cumsum(0),
    }
    return ids if corpus.layers is None else ids | _states_of(rows, corpus.layers, step.hidden)


def _states_of(rows: list[Conversation], layers: list[int], hidden: int) -> dict[str, Tensor]:
    """Return the tensors of a shard that hold the rows' states."""
    lengths = [len(row.tokens) for row in rows]
    states = torch.zeros(sum(lengths), hidden, dtype=torch.float16)
    streams = torch.zeros(sum(lengths), len(layers) * hidden, dtype=torch.float8_e4m3fn)
    for row, end in zip(rows, accumulate(lengths), strict=True):
        assert row.states is not None
        part = slice(end - len(row.tokens), end - 1)
        streams[part], states[part] = row.states[: len(row.tokens) - 1].tensor_split((streams.shape[1],), dim=1)
    return {"states": states, "streams": streams, "layers": torch.tensor(layers, dtype=torch.long)}


@cache
def words_of(pair: ModelPair) -> list[str]:
    """Return tokens that are words or beginnings of words, that is, a space and enough letters."""
    texts = pair.tokenizer.batch_decode([[token] for token in range(len(pair.tokenizer))])
    return [text[1:] for text in texts if text[0:1] == " " and text[1:].isalpha() and len(text) > SHORTEST_WORD]


@dataclass(frozen=True)
class Template:
    """The parts of a chat template.

    Attributes:
        opening: the text before the first turn.
        answer: the text before an answer.
        again: the text before a later turn.
        end: the token id that ends a turn.
    """

    opening: str
    answer: str
    again: str
    end: int

    @classmethod
    def of(cls, pair: ModelPair) -> Template:
        """Return the parts of the pair's chat template.

        Raises:
            SystemExit: if the template does not end each turn with one end token.
        """
        mark = "@@"
        turns = [{"role": role, "content": mark} for role in ("user", "assistant", "user")]
        parts = pair.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True).split(mark)
        begins = {pair.tokenizer(part, add_special_tokens=False).input_ids[0] for part in parts[1:3]}
        if len(parts) != 4 or len(begins) != 1 or not begins <= pair.default_eos():
            raise SystemExit(
                "This target's chat template does not end each turn with one end token: choose another."
            )
        (opening, answer, again, _), (end,) = parts, begins
        return cls(opening, answer, again, end)


@dataclass
class Conversation:
    """A conversation while it is written.

    Attributes:
        tokens: its tokens so far.
        answer: for each token whether it is part of an answer.
        fed: number of tokens fed to the target.
        temperature: the temperature of the next token, which we send to `talk`.
        talk: the generator that writes the conversation; None once it has ended.
        states: float16 [longest row, width], the states of the tokens fed so far, or None if they are not kept.
            One buffer per row: small pieces between the large tensors of the forwards would fragment the heap,
            which grew to 12 GB.
    """

    tokens: list[int] = field(default_factory=list)
    answer: list[bool] = field(default_factory=list)
    fed: int = 0
    temperature: float = 0.0
    talk: Generator[float, int, None] | None = None
    states: Tensor | None = None

    def add(self, tokens: list[int], answer: bool = False) -> None:
        """Append tokens; `answer` marks them as part of an answer."""
        self.tokens += tokens
        self.answer += [answer] * len(tokens)


class Writer:
    """Lets the target write conversations, `corpus.rows` at a time; when one ends, the next takes its row."""

    def __init__(self, pair: ModelPair, corpus: CorpusSettings, temperature: float, seed: int) -> None:
        self.pair, self.corpus, self.temperature = pair, corpus, temperature
        self.template, self.ends = Template.of(pair), pair.default_eos()
        # Both without the first token, the end token, which the target has already written.
        self.answer = self._ids(self.template.answer)[1:]
        self.again: str = pair.tokenizer.decode(self._ids(self.template.again)[1:])
        self.noise, self.choices = torch.Generator().manual_seed(seed), random.Random(seed)
        backend = make_request(pair, "x").backend
        self.on_accelerator = is_accelerator(pair.device)
        self.chunk = CHUNK["accelerator" if self.on_accelerator else "cpu"]
        longest = corpus.longest_row + self.chunk
        self.runner = make_runner(pair.target_step, corpus.rows, longest, pair.vocab, backend)
        # The number of entries of a token's states.
        self.width = (len(pair.target_step.readout.layers) + 1) * pair.target_step.hidden
        self.taken = {prompt["text"] for prompt in evaluation_prompts()}
        # Prompts and answers for later conversations to quote.
        self.quotable: list[tuple[str, str]] = []

    @torch.inference_mode()
    def write(self, user_turns: list[list[Turn]]) -> list[Conversation]:
        """Return the rows of these conversations, except for those without an answer."""
        waiting = list(reversed(user_turns))
        rows: list[Conversation] = []
        done: list[Conversation] = []
        while waiting or rows:
            while waiting and len(rows) < self.corpus.rows:
                row = Conversation()
                if self.corpus.layers is not None:
                    row.states = torch.empty(self.corpus.longest_row, self.width, dtype=torch.float16)
                row.talk = self._talk(row, waiting.pop())
                if _go_on(row, None):
                    self.runner.commit(len(rows), 0)
                    rows.append(row)
            if rows:
                self._step(rows)
            for place in reversed(range(len(rows))):
                if rows[place].talk is None:
                    if any(rows[place].answer):
                        if (states := rows[place].states) is not None:
                            # Copy, so that a short row doesn't keep the memory of the longest one.
                            rows[place].states = states[: len(rows[place].tokens)].clone()
                        done.append(rows[place])
                    self.runner.move_row(len(rows) - 1, place)
                    rows[place] = rows[-1]
                    rows.pop()
        return done

    def _step(self, rows: list[Conversation]) -> None:
        """Feed each row its next tokens, and draw a new token for rows that have been fed all of theirs."""
        parts = [row.tokens[row.fed : row.fed + self.chunk] for row in rows]
        counts = [len(part) for part in parts]
        width = max(counts)
        if self.on_accelerator and width > 1:
            width = self.chunk
        # numpy reads lists several times as fast as torch.
        ids = np.array([part + [0] * (width - len(part)) for part in parts])
        lengths = [row.fed for row in rows]
        take = [count - 1 for count in counts]
        keeps = self.corpus.layers is not None
        fed = to_device(torch.from_numpy(ids), self.runner.device)
        output = self.runner.forward(ForwardBatch(fed, lengths, counts, take, return_states=keeps))
        if keeps:
            _keep_states(output, rows, counts)
        for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
            row.fed += count
            self.runner.commit(place, row.fed)
        ready = [place for place, row in enumerate(rows) if row.fed == len(row.tokens)]
        if not ready:
            return
        drawn = self._draw(_rows_at(output.logits, ready), [rows[place].temperature for place in ready])
        for place, token in zip(ready, drawn, strict=True):
            _go_on(rows[place], token)

    def _draw(self, logits: Tensor, temperatures: list[float]) -> list[int]:
        """Draw a token for each row of logits [N, V], the likeliest at temperature 0."""
        cold = [place for place, temperature in enumerate(temperatures) if not temperature]
        hot = [place for place, temperature in enumerate(temperatures) if temperature]
        device = logits.device
        drawn = torch.empty(len(temperatures), dtype=torch.int64, device=device)
        if cold:
            drawn[to_device(cold, device)] = argmax(_rows_at(logits, cold))
        if hot:
            divisors = to_device([temperatures[place] for place in hot], device)[:, None]
            u = to_device(torch.rand(len(hot), 1, generator=self.noise), device)
            drawn[to_device(hot, device)] = _sampled((_rows_at(logits, hot).float() / divisors).softmax(-1), u)
        tokens: list[int] = to_host(drawn).tolist()
        return tokens

    def _talk(self, row: Conversation, turns: list[Turn]) -> Generator[float, int, None]:
        """Append the conversation to the row: yield the temperature of each new token, and receive the token."""
        before = self.template.opening
        for turn in turns:
            room = self.corpus.longest_row - len(row.tokens)
            prompt = None if turn.text is None else self._filled(turn)
            ids = self._ids(before if prompt is None else before + prompt + self.template.answer)
            if len(ids) + MIN_ANSWER_ROOM + (LONGEST + len(self.answer) if prompt is None else 0) > room:
                return
            start = len(row.tokens)
            row.add(ids)
            if prompt is None:
                prompt = yield from self._invented(row)
                if prompt is None:
                    del row.tokens[start:], row.answer[start:]
                    return
                row.add(self.answer)
            room = self.corpus.longest_row - len(row.tokens)
            written = yield from self._written(row, min(self.corpus.max_new_tokens, room), self.temperature, True)
            text = self.pair.tokenizer.decode(written, skip_special_tokens=True).strip()
            if len(text) >= MIN_QUOTED and turn is turns[0] and len(prompt) <= MAX_ASKED:
                self.quotable.append((prompt, text))
            if written[-1] != self.template.end:
                return
            before = self.again

    def _invented(self, row: Conversation) -> Generator[float, int, str | None]:
        """Let the target write a user's turn; return None if it did not end in time or is too short."""
        written = yield from self._written(row, LONGEST, TEMPERATURE, False)
        text: str = self.pair.tokenizer.decode(written[:-1]).strip()
        if written[-1] == self.template.end and len(written) > SHORTEST and text not in self.taken:
            return text
        return None

    def _written(
        self, row: Conversation, most: int, temperature: float, answer: bool
    ) -> Generator[float, int, list[int]]:
        start = len(row.tokens)
        while len(row.tokens) - start < most:
            token = yield temperature
            row.add([token], answer)
            if token in self.ends:
                break
        return row.tokens[start:]

    def _filled(self, turn: Turn) -> str:
        """Return the user's text with its quotes filled in; they are empty if there is nothing to quote yet."""
        assert turn.text is not None
        if not turn.quotes:
            return turn.text
        quoted = self.choices.sample(self.quotable, min(turn.quotes, len(self.quotable))) or [("", "")]
        question = self.choices.choice(quoted)[0]
        text = "\n\n".join(answer for _, answer in quoted)
        return turn.text.replace("{question}", question).replace("{text}", text)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.pair.tokenizer(text, add_special_tokens=False).input_ids
        return ids


def _go_on(row: Conversation, token: int | None) -> bool:
    """Send a row its next token, or None to start it; return False, and set `talk` to None, if it has ended."""
    try:
        assert row.talk is not None
        row.temperature = next(row.talk) if token is None else row.talk.send(token)
    except StopIteration:
        row.talk = None
    return row.talk is not None


def _rows_at(logits: Tensor, places: list[int]) -> Tensor:
    """Return some rows of logits, ascending, without copying if they are all of them."""
    return logits if len(places) == len(logits) else logits[to_device(places, logits.device)]


def _sampled(p: Tensor, u: Tensor) -> Tensor:
    """Draw an index int64 [N] from each row of p [N, V] by u [N, 1]: a block of probabilities, then one of them.

    Summing up all of V in order would take twice as long, and torch.multinomial ten times.
    """
    p = F.pad(p, (0, -p.shape[1] % BLOCK)) if p.shape[1] % BLOCK else p
    blocks = p.unflatten(1, (-1, BLOCK))
    ends = blocks.sum(-1).cumsum(-1)
    u = u * ends[:, -1:]
    block = torch.searchsorted(ends, u, right=True).clamp(max=ends.shape[1] - 1)
    chosen = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0]
    before = ends.gather(1, block) - chosen.sum(-1, keepdim=True)
    place = torch.searchsorted(chosen.cumsum(-1), u - before, right=True).clamp(max=BLOCK - 1)
    return (block * BLOCK + place)[:, 0]


def _keep_states(output: ForwardOutput, rows: list[Conversation], counts: list[int]) -> None:
    """Copy the states of each row's first `counts` tokens, without making padding for the others."""
    states = output.vectors
    parts: Any = states.rows.split(counts) if isinstance(states, RaggedRows) else output.require_states()
    for row, part, count in zip(rows, parts, counts, strict=True):
        assert row.states is not None
        row.states[row.fed : row.fed + count] = part[:count]


def shards(folder: Path) -> list[Path]:
    """Return the shards of a folder, in order."""
    return sorted(folder.glob("shard-*.safetensors"))


def open_shard(path: Path) -> Any:
    """Return an open shard.

    Raises:
        SystemExit: if it has an older format.
    """
    shard = safe_open(path, "pt")
    if "scored" not in shard.keys() or shard.get_slice("scored").get_dtype() != "U8":  # noqa: SIM118
        raise SystemExit(f"{path} was written by an earlier version: write the corpus in another --work folder.")
    return shard


def read_ids(shard: Any) -> tuple[Tensor, Tensor]:
    """Return an open shard's tokens int64 [N] and scored bool [N]."""
    tokens: Tensor = shard.get_tensor("tokens").long()
    scored = np.unpackbits(shard.get_tensor("scored").numpy(), count=len(tokens))
    return tokens, torch.from_numpy(scored).bool()


def _save(path: Path, shard: dict[str, Tensor]) -> None:
    part = path.with_suffix(".part")
    save_file(shard, part)
    os.replace(part, path)
