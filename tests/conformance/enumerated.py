"""Enumerates every text that a few rounds of the decoding loop can write, with its probability.

`enumerate_scene` runs the library's own loop, drafters, policies and verification once for each combination of
random outcomes. It replaces the models by tables, and `draw` and `uniform` by choices: each noise key has one
number in (0, 1), of which only an interval is known, and each draw or test narrows it. A noise key that is used
twice therefore gives the same number twice. Each reading of the clock advances it by one tick, so that policies
that time rounds are deterministic. If a scene is `exact`, the library computes in float64, by its torch code;
otherwise in float32, as for a user. If it is `captured`, the runners replay their captures, as on an accelerator.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate, count, pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bass_core import SamplingParams
from bass_core.decode.base import DecodingParams
from bass_core.decode.batch import BatchDecoder
from bass_core.draft import tree
from bass_core.draft.forced import GrammarDrafter
from bass_core.model import graphs
from bass_core.model.cache import RaggedCache
from bass_core.model.forward import CapturedBatch, ForwardBatch, ForwardOutput
from bass_core.model.pointer import Pointer
from bass_core.model.prefix import SharedPrompts
from bass_core.model.runner import ModelRunner
from bass_core.sample import draw as draws
from bass_core.sample import noise
from bass_core.sample.grammar import Matcher, compiled
from bass_core.sequence import Sequence
from bass_core.verify import rejection
from bass_core.verify.rules import Verification, find_verification
from kernels.plan import MAX_TREE_TOKENS

Text = tuple[int, ...]
# table[token] has the probability of each next token.
Table = tuple[tuple[float, ...], ...]
# The joint distribution of the texts of all rows.
Law = dict[tuple[Text, ...], float]
# A choice with a smaller probability is impossible: only rounding makes its probability nonzero.
_NOTHING = 1e-14
WARM = SamplingParams(1.0)


class Walk:
    """Iterates over all paths through a program's random choices, depth first: run it once per iteration."""

    def __init__(self) -> None:
        self.chance, self.replays = 1.0, 0
        self._capturing = False
        self._known: dict[Any, tuple[float, float]] = {}
        # For each choice on the path: its options as (index, probability), and which of them is taken.
        self._choices: list[tuple[list[tuple[int, float]], int]] = []
        self._at = 0

    def __iter__(self) -> Iterator[None]:
        while True:
            self.chance, self._known, self._at = 1.0, {}, 0
            yield
            while self._choices and self._choices[-1][1] + 1 == len(self._choices[-1][0]):
                self._choices.pop()
            if not self._choices:
                return
            options, taken = self._choices[-1]
            self._choices[-1] = options, taken + 1

    def part(self, key: Any, edges: list[float]) -> int:
        """Choose between which two neighbouring `edges` this key's number lies, and return the first one's index.

        edges: ascending, from 0 to 1.
        """
        low, high = self._known.get(key, (0.0, 1.0))
        inside = [min(max(edge, low), high) for edge in edges]
        place = self._choose([(b - a) / (high - low) for a, b in pairwise(inside)])
        self._known[key] = inside[place], inside[place + 1]
        return place

    def number(self, key: Any) -> float:
        """Return the middle of the interval in which this key's number is known to lie."""
        return sum(self._known.get(key, (0.0, 1.0))) / 2

    def _choose(self, chances: list[float]) -> int:
        if self._at == len(self._choices):
            self._choices.append(([(i, chance) for i, chance in enumerate(chances) if chance > _NOTHING], 0))
        options, taken = self._choices[self._at]
        self._at += 1
        place, chance = options[taken]
        self.chance *= chance
        return place

    def capture(self, forward: Callable[[], Any], pool: Any) -> tuple[Any, Callable[[], None]]:
        """Replace `capture` of machine/capture.py: a replay calls the function.

        As on a GPU, the results of the capture's own run are never used. So this run makes no choices.
        """
        self._capturing = True
        try:
            static, replay = graphs.record_calls(forward)
        finally:
            self._capturing = False

        def counted() -> None:
            self.replays += 1
            replay()

        return static, counted

    def draw(
        self, weights: Tensor, seed: Any, ids: Tensor, positions: Tensor, streams: Tensor, tokens: Any = None
    ) -> Tensor:
        """Replace `draw` of sample/draw.py: each token gets a share of the interval (0, 1) by its weight.

        If a weight is NaN, or all are 0, the first token is drawn.
        """
        if self._capturing:
            return torch.zeros(weights.shape[:-1], dtype=torch.long)
        keys = _keys(weights.shape[:-1], seed, ids, positions, streams)
        rows = weights.reshape(-1, weights.shape[-1]).tolist()
        drawn = [self._draw(key, row) for key, row in zip(keys, rows, strict=True)]
        return torch.tensor(drawn, dtype=torch.long).view(weights.shape[:-1])

    def _draw(self, key: Any, weights: list[float]) -> int:
        total = math.fsum(weights)
        if not total > 0:
            return 0
        return self.part(key, [0.0, *(edge / total for edge in accumulate(weights[:-1])), 1.0])

    def uniform(self, seed: Any, ids: Tensor, positions: Tensor, streams: Tensor) -> Any:
        """Replace `uniform` of sample/noise.py."""
        shape = torch.broadcast_shapes(ids.shape, positions.shape, streams.shape)
        if self._capturing:
            return torch.full(shape, 0.5)
        keys = _keys(shape, seed, ids, positions, streams)
        return Uniforms([Uniform(self, key) for key in keys], shape)


def _keys(shape: torch.Size, seed: Any, *parts: Tensor) -> list[tuple[int, ...]]:
    columns = [part.expand(shape).flatten().tolist() for part in parts]
    return [(int(seed), *key) for key in zip(*columns, strict=True)]


@dataclass(frozen=True)
class Uniform:
    """The number of one key, times a factor.

    A comparison of the number with a threshold is one of the program's choices.
    """

    walk: Walk
    key: Any
    factor: float = 1.0

    def __mul__(self, factor: float) -> Uniform:
        return replace(self, factor=self.factor * factor)

    def __lt__(self, bar: float) -> bool:
        edge = bar / self.factor if self.factor else float(bar > 0)
        # A comparison with NaN is false.
        edge = 0.0 if math.isnan(edge) else min(max(edge, 0.0), 1.0)
        return self.walk.part(self.key, [0.0, edge, 1.0]) == 0

    def __float__(self) -> float:
        return self.walk.number(self.key) * self.factor


class Uniforms:
    """A tensor of `Uniform` numbers, with the operations that verification uses."""

    def __init__(self, numbers: list[Uniform], shape: torch.Size) -> None:
        self.numbers, self.shape = numbers, shape

    def __mul__(self, factors: Any) -> Uniforms:
        each = self._each(factors)
        return Uniforms([u * factor for u, factor in zip(self.numbers, each, strict=True)], self.shape)

    def __lt__(self, bars: Any) -> Tensor:
        each = self._each(bars)
        passed = [u < bar for u, bar in zip(self.numbers, each, strict=True)]
        return torch.tensor(passed, dtype=torch.bool).view(self.shape)

    def tolist(self) -> list[Any]:
        """Return the numbers of a tree's tests; for rows of records, numbers that fit their verdicts."""
        if len(self.shape) == 1:
            return list(self.numbers)
        return self._fitting().tolist()

    def _fitting(self) -> Tensor:
        return torch.tensor([float(u) for u in self.numbers]).view(self.shape)

    def _each(self, values: Any) -> list[float]:
        expanded: list[float] = torch.as_tensor(values).expand(self.shape).flatten().tolist()
        return expanded

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        """Give records numbers that fit their verdicts; no other function may read the numbers."""
        assert function is torch.cat, f"{function} reads a uniform number in a way that is not enumerated"
        parts = [part._fitting() if isinstance(part, cls) else part for part in arguments[0]]
        return torch.cat(parts, *arguments[1:], **(named or {}))


class Double(Tensor):
    """A float64 tensor whose `float()` stays float64, so that later results are float64 too."""

    def float(self, *_: Any, **__: Any) -> Tensor:
        return self


class Bigram:
    """A model whose distribution after a token is that token's row of a table.

    Its inputs are ids, or embeddings [..., 1] that hold ids; its states are 0.
    """

    name, context, min_shared_tokens = "bigram", 1 << 20, None
    device = torch.device("cpu")

    def __init__(self, table: Table, exact: bool, capturable: bool = False) -> None:
        self.capturable = capturable
        logits = torch.tensor(table, dtype=torch.float64).log()
        self.logits = logits.as_subclass(Double) if exact else logits.float()

    def new_cache(self, max_batch: int, max_len: int, prefixes: int = 0, prefix_len: int = 0) -> RaggedCache:
        prefix = self.new_cache(prefixes, prefix_len) if prefixes else None
        return RaggedCache(1, max_batch, max_len, 1, 1, torch.float32, prefix=prefix)

    def forward(self, batch: ForwardBatch, cache: RaggedCache, backend: str) -> ForwardOutput:
        cache.check_room(batch.lengths, batch.tokens.shape[1])
        ids = batch.tokens[..., 0].long() if batch.tokens.is_floating_point() else batch.tokens
        logits = self.logits[ids]
        if batch.wanted_columns is not None:
            logits = logits[torch.arange(len(logits)), torch.tensor(batch.wanted_columns)]
        return ForwardOutput(logits, torch.zeros(*ids.shape, 1))

    def forward_captured(self, batch: CapturedBatch, cache: RaggedCache, backend: str) -> ForwardOutput:
        ids = batch.tokens[..., 0].long() if batch.tokens.is_floating_point() else batch.tokens
        return ForwardOutput(self.logits[ids], torch.zeros(*ids.shape, 1))


@dataclass(frozen=True)
class BigramHead:
    """The parts of a head (model/draft_head.py) that HeadDrafter uses; `vocabulary` has each column's token id."""

    vocabulary: Tensor
    pointer: Pointer
    config = SimpleNamespace(hidden=1, reads_layers=())
    compiled_inputs = None

    def inputs(self, ids: Tensor, states: Tensor) -> Tensor:
        return ids[..., None].to(states.dtype)

    def column_of(self, ids: Tensor) -> Tensor:
        alike = ids[..., None] == self.vocabulary
        return torch.where(alike.any(-1), alike.long().argmax(-1), -1)

    def readout(self) -> Any:
        return SimpleNamespace(finish=lambda states: states)


@dataclass(frozen=True)
class Scene:
    """The setup of an enumeration of the prefill and the `rounds` rounds after it.

    Attributes:
        drafter: Makes the drafter for a scene.
        rule: The name of the verification.
        ids: The rows' sequence ids; by default, their numbers.
        captured: Whether rounds are captured, if they can be.
        shared: The prefixes that prompts share in a cache.
        languages: for each row, all texts of its grammar, with the letters a, b and c for tokens 0, 1 and 2; None
            for a row without a grammar, () if no row has one.
    """

    p: Table
    drafter: Callable[[Scene], Any]
    policy: Any
    rule: str = "rejection"
    prompts: tuple[Text, ...] = ((0,),)
    new_tokens: int = 4
    rounds: int = 1
    eos: frozenset[int] = frozenset()
    exact: bool = True
    sampling: SamplingParams = WARM
    ids: tuple[int, ...] = ()
    captured: bool = False
    shared: tuple[Text, ...] = ()
    languages: tuple[tuple[str, ...] | None, ...] = ()
    # Models that are used on all paths, so that their captures are too.
    _models: dict[tuple[Table, bool], Any] = field(default_factory=dict, compare=False)

    @property
    def verification(self) -> Verification:
        return find_verification(self.rule)

    def runner(self, table: Table) -> ModelRunner:
        model = self._models.setdefault((table, self.captured), Bigram(table, self.exact, self.captured))
        # A tree may be wider than the rest of a text.
        longest = max(map(len, self.prompts)) + self.new_tokens + MAX_TREE_TOKENS
        make = graphs.GraphRunner if self.captured else ModelRunner
        shared = SharedPrompts(self.shared)
        return make(model, len(self.prompts), longest, len(table[0]), "sdpa", shared=shared)

    def decoder(self) -> BatchDecoder:
        ids = self.ids or range(len(self.prompts))
        rows = [
            Sequence(r, key, list(prompt), self.new_tokens, self.eos)
            for r, (key, prompt) in enumerate(zip(ids, self.prompts, strict=True))
        ]
        self.add_grammars(rows)
        params, drafter = DecodingParams(self.sampling, verification=self.verification), self.drafter(self)
        if self.languages and not (drafter.branches or drafter.is_user_object):
            drafter = GrammarDrafter(drafter)
        return BatchDecoder(rows, self.runner(self.p), params, drafter, copy.deepcopy(self.policy))

    def add_grammars(self, rows: list[Sequence]) -> None:
        """Give each row a matcher of its language."""
        for row, language in zip(rows, self.languages, strict=False):
            row.grammar = None if language is None else matcher("|".join(language), self.eos)

    def after(self, tokens: int) -> Scene:
        """Return this scene with a policy that has seen `tokens` tokens per row, drawn with ordinary noise."""
        before = replace(self, new_tokens=tokens, eos=frozenset())
        decoder = before.decoder()
        while not decoder.finished:
            decoder.step()
        return replace(self, policy=decoder.policy)

    def expected(self) -> Law:
        """Return the joint distribution if each row follows the target, independently of the others."""
        laws = [self._rest((), row) for row in range(len(self.prompts))]
        return {
            tuple(text for text, _ in row): math.prod(chance for _, chance in row)
            for row in product(*(law.items() for law in laws))
        }

    def completed(self, law: Law) -> Law:
        """Return the distribution of whole texts, if the target alone completes the texts of `law`."""
        whole: dict[tuple[Text, ...], float] = defaultdict(float)
        for texts, chance in law.items():
            rests = [self._rest(text, row) for row, text in enumerate(texts)]
            for row in product(*(rest.items() for rest in rests)):
                whole[tuple(text for text, _ in row)] += chance * math.prod(rest for _, rest in row)
        return dict(whole)

    def following(self, row: int, text: Text) -> list[float]:
        """Return the next token's distribution after a row's prompt and a text, under `sampling`."""
        how, whole = self.sampling, (*self.prompts[row], *text)
        logits = [math.log(chance) if chance else -math.inf for chance in self.p[whole[-1]]]
        for token, logit in enumerate(logits):
            logits[token] = logit = logit + dict(how.logit_bias).get(token, 0.0)
            if token in whole:
                logits[token] = logit / how.repetition_penalty if logit > 0 else logit * how.repetition_penalty
            logits[token] -= how.presence_penalty * (token in text) + how.frequency_penalty * text.count(token)
            words = [word for word in how.bad_words if word[-1] == token]
            if any((*whole, token)[-len(word) :] == word for word in words):
                logits[token] = -math.inf
            if not self.allows(row, (*text, token)):
                logits[token] = -math.inf
        weights = [math.exp(logit / how.temperature) for logit in logits]
        weights = [weight if weight >= how.min_p * max(weights) else 0.0 for weight in weights]
        return [weight / math.fsum(weights) for weight in weights]

    def allows(self, row: int, text: Text) -> bool:
        """Return whether a row's grammar allows this text, or one that begins with it."""
        language = self.languages[row] if self.languages else None
        if language is None:
            return True
        if text[-1] in self.eos:
            return _spelled(text[:-1]) in language
        return any(word.startswith(_spelled(text)) for word in language)

    def _ended(self, row: int, text: Text) -> bool:
        """Return whether a row's text is complete."""
        if len(text) == self.new_tokens or (text and text[-1] in self.eos):
            return True
        language = self.languages[row] if self.languages else None
        return language is not None and not any(
            word.startswith(_spelled(text)) and len(word) > len(text) for word in language
        )

    def _rest(self, text: Text, row: int) -> dict[Text, float]:
        """Return the distribution of the whole texts that result if the target alone completes a row's `text`."""
        if self._ended(row, text):
            return {text: 1.0}
        texts: dict[Text, float] = {}
        for token, chance in enumerate(self.following(row, text)):
            if chance:
                rest = self._rest((*text, token), row)
                texts |= {whole: chance * rest_chance for whole, rest_chance in rest.items()}
        return texts


def _spelled(text: Text) -> str:
    return "".join("abc"[token] for token in text)


class LetterTokenizer:
    """A tokenizer of the letters a, b and c, in the form that llguidance reads; token 3 is its end."""

    tokens, eos_token_id, bos_token_id, special_token_ids = (b"a", b"b", b"c", b"<end>"), 3, None, (3,)

    def __call__(self, text: Any) -> list[int]:
        letters: bytes = text.encode() if isinstance(text, str) else text
        return [self.tokens.index(bytes([letter])) for letter in letters]


@cache
def letters() -> Any:
    """Return llguidance's form of the LetterTokenizer."""
    guidance = pytest.importorskip("llguidance")
    return guidance.LLTokenizer(guidance.TokenizerWrapper(LetterTokenizer()))


def matcher(regex: str, eos: frozenset[int] = frozenset()) -> Matcher:
    """Return a matcher of texts of letters."""
    source = letters() and pytest.importorskip("llguidance").LLMatcher.grammar_from_regex(regex)
    return compiled(source, letters(), eos).matcher(eos)


@dataclass
class Enumeration:
    """The result of enumerating a scene; `law` is the distribution of the texts after the last round."""

    law: Law = field(default_factory=dict)
    paths: int = 0
    drafted: set[int] = field(default_factory=set)
    origins: set[str] = field(default_factory=set)
    replays: int = 0


def enumerate_scene(scene: Scene, patch: pytest.MonkeyPatch) -> Enumeration:
    walk, result, law = Walk(), Enumeration(), defaultdict[tuple[Text, ...], float](float)
    dtype = torch.get_default_dtype()
    replaced = (draws.draw, walk.draw), (noise.uniform, walk.uniform)
    with patch.context() as here:
        for module in [module for name, module in sys.modules.items() if name.startswith("bass_core.")]:
            for original, ours in replaced:
                if vars(module).get(original.__name__) is original:
                    here.setattr(module, original.__name__, ours)
        # Switch off the compiled rules, which do not use the replaced `draw`.
        # tests/kernels/cpu/test_verification.py compares the compiled rules with those in torch.
        here.setattr(rejection, "compiled", lambda rows: False)
        here.setattr(graphs, "capture", walk.capture)
        here.setattr(graphs, "refuse_capture", _fail)
        # On a CPU the hash takes an int, but a graph's seed is a tensor.
        here.setattr(tree, "exponentials", lambda seed, *keys: noise.exponentials(int(seed), *keys))
        ticks = count()
        here.setattr(time, "perf_counter", lambda: next(ticks) / 1024)
        torch.set_default_dtype(torch.float64 if scene.exact else torch.float32)
        try:
            for _ in walk:
                rows = _run(scene, result)
                law[tuple(tuple(row.token_ids) for row in rows)] += walk.chance
                result.paths += 1
        finally:
            torch.set_default_dtype(dtype)
    result.law, result.replays = dict(law), walk.replays
    return result


def _fail(model: Any, error: Exception) -> None:
    raise error


def _run(scene: Scene, result: Enumeration) -> list[Sequence]:
    decoder, rounds = scene.decoder(), 0
    while rounds < scene.rounds and not decoder.finished:
        round_ = decoder.step()
        rounds += round_.kind != "prefill"
        for row in round_.rows:
            result.origins.update(row.origins)
            if round_.kind != "prefill":
                result.drafted.add(len(row.drafted))
    return decoder.sequences


def distance(one: Law, other: Law) -> float:
    """Return the total variation distance between two distributions."""
    return sum(abs(one.get(texts, 0.0) - other.get(texts, 0.0)) for texts in one.keys() | other.keys()) / 2
