"""Whether a request fits the memory, decided before any is allocated.

Contract: compares an estimate of the caches, logits and working memory of all lanes that run together with the
memory that is free now. A request that does not fit is refused with the largest batch and the largest number of
new tokens that would fit. Weights are in memory already and are not counted again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Protocol

from kernels.backends import captured_extent
from kernels.support import is_accelerator

from ..errors import RequestError
from ..machine.memory import available_bytes
from ..model.base import CausalModel
from ..model.graphs import columns_made, release_idle
from ..model.pair import ModelPair
from ..model.prefix import CachedTexts
from ..model.runner import least_saved, prefill_tokens, prefix_size
from .request import Request

# Copies of the logits alive at once while a distribution is filtered, compared and sampled from.
_LOGIT_COPIES = 6
# Bytes per attention score: float32, before and after the softmax.
_SCORE_BYTES = 8
# The same where transformers only masks: one mask for all heads, as bytes and as numbers added to the scores.
_MASK_BYTES = 5
# Numbers that one layer holds per element of the hidden state: its inputs, heads and wider MLP.
_HIDDEN_NUMBERS = 16
# From kernels/triton/attention.py: columns of a segment, and the most numbers of all segments' sums.
_SEGMENT, _MOST_PART_NUMBERS = 512, 1 << 26
# Share of the free memory that a request may need.
_HEADROOM = 0.9


class Method(Protocol):
    """What admission needs to know of a method: whether it drafts, whether all rows are in memory together, and
    whether other code than ours decodes."""

    @property
    def drafts(self) -> bool: ...

    @property
    def batched(self) -> bool: ...

    @property
    def outside(self) -> bool: ...


def admit(pair: ModelPair, request: Request, *together: Seq[Method]) -> None:
    """Raise RequestError unless each group in `together` fits: a group's methods run at once, groups in turn."""

    def needs(rows: int, tokens: int) -> int:
        asked = replace(request, max_new_tokens=tokens)
        return max(estimate_bytes(pair, asked, methods, rows) for methods in together)

    rows, tokens = len(request.prompts), request.max_new_tokens
    needed = needs(rows, tokens)
    if needed > int(available_bytes(pair.device) * _HEADROOM):
        for model in (pair.target_step, pair.draft_step):
            if model is not None:
                release_idle(model)
    free = available_bytes(pair.device)
    room = int(free * _HEADROOM)
    if needed <= room:
        return
    shorter = _largest(tokens, room, lambda fewer: needs(rows, fewer))
    ways = []
    if smaller := _largest(rows, room, lambda fewer: needs(fewer, tokens)):
        ways.append(f"a batch of {smaller} would fit")
    if shorter:
        ways.append(f"{_tokens(shorter)} would fit")
    if not ways and (alone := _largest(tokens, room, lambda fewer: needs(1, fewer))):
        ways.append(f"a batch of 1 with {_tokens(alone)} would fit")
    advice = ", or ".join(ways) or "shorten the prompt or ask for fewer tokens"
    raise RequestError(
        f"This request needs about {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free: {advice}."
    )


def _tokens(count: int) -> str:
    return "1 new token" if count == 1 else f"{count} new tokens"


def _largest(below: int, room: int, needs: Callable[[int], int]) -> int:
    """The largest number under `below` whose needs (bytes) fit the room; 0 if none does."""
    return bisect_right(range(1, below), room, key=needs)


def estimate_bytes(pair: ModelPair, request: Request, methods: Seq[Method], rows: int) -> int:
    """Bytes of caches and working memory that all methods need together, for a batch of `rows`."""
    total = 0
    for method in methods:
        if method.outside:
            total += _outside_bytes(pair, request, rows)
            continue
        drafts = method.drafts
        batch = rows if method.batched else 1
        texts = request.texts(cache_padding(request, drafts), rows)
        length = max(texts.ends)
        total += cache_bytes(pair.target_step, texts, request.backend, batch)
        width = 1
        if drafts:
            width += request.longest_draft
            if request.kind.runs_model and pair.draft_step is not None:
                read = texts.cropped(pair.draft_step.context)
                total += cache_bytes(pair.draft_step, read, request.backend, batch)
        logits = batch * width * pair.vocab * 4
        total += logits * (1 if request.sampling.greedy else _LOGIT_COPIES)
        total += logits * (_LOGIT_COPIES if request.sampling.shapes else 0)
        longest = max(len(prompt) for prompt in request.prompts)
        looked_at = captured_extent(request.backend, length, 2 * length) if is_accelerator(pair.device) else length
        total += max(
            _working_bytes(pair, request.backend, batch * width, looked_at),
            _working_bytes(pair, request.backend, _chunk(pair, request, batch), longest),
        )
    return total


def _outside_bytes(pair: ModelPair, request: Request, rows: int) -> int:
    """Bytes that transformers' `generate` needs: rows as long as the longest, all prompts read in one forward."""
    config, model = pair.target.config.get_text_config(), pair.target_step
    number, heads = pair.target.dtype.itemsize, config.num_attention_heads
    prompt = max(map(len, request.prompts[:rows]))
    length = prompt + max(map(request.new_tokens, request.prompts[:rows]))
    # All layers' keys and values, and of one layer those that it grows into and those repeated per query head.
    cache = rows * length * 2 * model.head_dim * number * (model.kv_heads * (model.layers + 1) + heads)
    eager = config._attn_implementation == "eager"
    scores = rows * prompt * prompt * (heads * _SCORE_BYTES if eager else _MASK_BYTES)
    hidden = rows * prompt * config.hidden_size * _HIDDEN_NUMBERS * number
    return int(cache + scores + hidden + rows * model.vocab * 4 * _LOGIT_COPIES)


def _chunk(pair: ModelPair, request: Request, batch: int) -> int:
    """Tokens in a prefill's largest chunk: equal prompts are computed once, shorter ones padded to the longest."""
    different = len({tuple(prompt) for prompt in request.prompts[:batch]})
    longest = max(len(prompt) for prompt in request.prompts)
    return min(different * longest, max(different, prefill_tokens(pair.device)))


def _working_bytes(pair: ModelPair, backend: str, tokens: int, columns: int) -> int:
    """Bytes that one layer needs beyond the cache while `tokens` attend to up to `columns` cached tokens."""
    config = pair.target.config.get_text_config()
    number = pair.target_step.cache_dtype.itemsize if is_accelerator(pair.device) else 4
    heads = tokens * config.num_attention_heads
    hidden = int(tokens * config.hidden_size * _HIDDEN_NUMBERS * number)
    return hidden + _attention_bytes(backend, heads, columns, pair.target_step.head_dim)


def _attention_bytes(backend: str, heads: int, columns: int, dim: int) -> int:
    """Bytes that a backend needs for `heads` (tokens x query heads) of `dim` numbers over so many columns.

    pad, split and sdpa make a matrix of scores. flash makes none. fused and mixed make none either, but write
    float32 partial results.
    """
    if backend == "flash":
        return 0
    if backend in ("fused", "mixed"):
        return min(-(-columns // _SEGMENT) * heads * (dim + 2), _MOST_PART_NUMBERS) * 4
    return heads * columns * _SCORE_BYTES


def cache_bytes(model: CausalModel, texts: CachedTexts, backend: str, batch: int) -> int:
    """Bytes of a runner's cache for `batch` of the texts at a time, what they share counted once."""
    shared = texts.shared(least_saved(model, backend))
    columns = columns_made(model, texts.columns(shared), backend)
    return model.cache_bytes(batch, columns, *prefix_size(shared, batch))


def cache_padding(request: Request, drafts: bool) -> int:
    """Tokens that a row of the cache must hold beyond its text: a round may write padding past its end."""
    return 1 + (request.longest_draft if drafts else 0)
