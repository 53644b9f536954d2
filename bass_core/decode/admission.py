"""Admission: decide whether a request fits the memory before anything is allocated. Call `admit`.

It compares an estimate for all lanes that run together (caches, logits and working memory) with the free memory.
If a request does not fit, the error names the largest batch and the largest number of new tokens that would fit.
Weights are already in memory and don't count.
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
from ..model.graphs import LEVELS, cache_columns, captured_level, probs_numbers, release_idle
from ..model.pair import ModelPair
from ..model.prefix import CachedTexts
from ..model.runner import min_shared_tokens, prefill_tokens, prefix_size
from ..model.weights.shape import config_value
from .request import Request

# Copies of the logits that exist at once while a distribution is filtered, compared and sampled.
_LOGIT_COPIES = 6
# Bytes per attention score: float32, before and after the softmax.
_SCORE_BYTES = 8
# Bytes per pair of tokens if transformers stores masks but no scores. All heads share the two masks: one of bytes,
# and one of float32 numbers that are added to the scores.
_MASK_BYTES = 5
# Numbers that one layer stores per element of the hidden state: its inputs, heads and wider MLP.
_HIDDEN_NUMBERS = 16
# Copied from kernels/triton/attention.py: the columns of a segment, and the maximum number of float32 values in
# all partial results together.
_SEGMENT, _MAX_PART_NUMBERS = 512, 1 << 26
# Share of the free memory that a request may take.
_HEADROOM = 0.9


class AdmittedMethod(Protocol):
    """The properties of a method that admission needs.

    Attributes:
        batched: whether all rows are in memory at the same time.
        outside: whether another library decodes.
    """

    @property
    def drafts(self) -> bool: ...

    @property
    def batched(self) -> bool: ...

    @property
    def outside(self) -> bool: ...


def admit(pair: ModelPair, request: Request, *together: Seq[AdmittedMethod]) -> int:
    """Return the bytes that the request needs; idle caches are freed if it needs their memory.

    The methods of a group in `together` run at the same time; the groups run one after another.

    Raises:
        RequestError: if a group does not fit.
    """

    def needs(rows: int, tokens: int) -> int:
        asked = replace(request, max_new_tokens=tokens)
        return max(estimate_bytes(pair, asked, methods, rows) for methods in together)

    rows, tokens = len(request.prompts), request.max_new_tokens
    needed = needs(rows, tokens)
    limit = make_room(pair, needed)
    if needed <= limit:
        return needed
    shorter = _largest(tokens, limit, lambda fewer: needs(rows, fewer))
    remedies = []
    if smaller := _largest(rows, limit, lambda fewer: needs(fewer, tokens)):
        remedies.append(f"a batch of {smaller} would fit")
    if shorter:
        remedies.append(f"{_new_tokens(shorter)} would fit")
    if not remedies and (shorter_row := _largest(tokens, limit, lambda fewer: needs(1, fewer))):
        remedies.append(f"a batch of 1 with {_new_tokens(shorter_row)} would fit")
    advice = ", or ".join(remedies) or "shorten the prompt or ask for fewer tokens"
    raise RequestError(
        f"This request needs about {needed / 2**30:.1f} GiB and {limit / _HEADROOM / 2**30:.1f} GiB are free: "
        f"{advice}."
    )


def make_room(pair: ModelPair, needed: int) -> int:
    """Return the bytes that a request may take, after freeing idle caches if they are fewer than `needed`."""
    limit = int(available_bytes(pair.device) * _HEADROOM)
    if needed <= limit:
        return limit
    for model in (pair.target_step, pair.draft_step):
        if model is not None:
            release_idle(model)
    return int(available_bytes(pair.device) * _HEADROOM)


def _new_tokens(count: int) -> str:
    return "1 new token" if count == 1 else f"{count} new tokens"


def _largest(below: int, limit: int, needs: Callable[[int], int]) -> int:
    """Return the largest n with 1 <= n < `below` and needs(n) <= `limit` (in bytes), or 0 if there is none."""
    return bisect_right(range(1, below), limit, key=needs)


def estimate_bytes(pair: ModelPair, request: Request, methods: Seq[AdmittedMethod], rows: int) -> int:
    """Return the bytes of caches and working memory that all methods need together, for `rows` rows."""
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
            most = request.longest_draft
            # Captured rounds are padded.
            padded = is_accelerator(pair.device) and most <= LEVELS[-1] and request.tree is None
            width += captured_level(most) if padded else most
            if request.kind.runs_model and pair.draft_step is not None:
                cropped = texts.cropped(pair.draft_step.context)
                total += cache_bytes(pair.draft_step, cropped, request.backend, batch)
                if is_accelerator(pair.device) and not request.sampling.greedy:
                    # The buffers of captured rounds, one for the draft and one for the target.
                    total += 2 * 4 * probs_numbers(batch, request.longest_draft, pair.vocab)
        logits = batch * width * pair.vocab * 4
        total += logits * (1 if request.sampling.greedy else _LOGIT_COPIES)
        total += logits * (_LOGIT_COPIES if request.sampling.shapes or request.grammars else 0)
        longest = max(len(prompt) for prompt in request.prompts)
        columns = captured_extent(request.backend, length, 2 * length) if is_accelerator(pair.device) else length
        total += max(
            _working_bytes(pair, request.backend, batch * width, columns),
            _working_bytes(pair, request.backend, _chunk_tokens(pair, request, batch), longest),
        )
    return total


def _outside_bytes(pair: ModelPair, request: Request, rows: int) -> int:
    """Return the bytes that transformers' `generate` needs.

    It pads all rows to the length of the longest, and prefills them in one forward.
    """
    config, model = pair.target.config.get_text_config(), pair.target_step
    itemsize, heads = pair.target.dtype.itemsize, config_value(config, "num_attention_heads") or 0
    prompt = max(map(len, request.prompts[:rows]))
    length = prompt + max(map(request.new_tokens, request.prompts[:rows]))
    # Keys and values of all layers, plus two copies for the layer that runs: one because the cache grows by
    # copying, and one in which keys and values are repeated for each query head.
    cache = rows * length * 2 * model.head_dim * itemsize * (model.kv_heads * (model.layers + 1) + heads)
    eager = config._attn_implementation == "eager"
    scores = rows * prompt * prompt * (heads * _SCORE_BYTES if eager else _MASK_BYTES)
    hidden = rows * prompt * config.hidden_size * _HIDDEN_NUMBERS * itemsize
    return int(cache + scores + hidden + rows * model.vocab * 4 * _LOGIT_COPIES)


def _chunk_tokens(pair: ModelPair, request: Request, batch: int) -> int:
    """Return the number of tokens in the largest prefill chunk, padding included. Equal prompts count once."""
    num_distinct = len({tuple(prompt) for prompt in request.prompts[:batch]})
    longest = max(len(prompt) for prompt in request.prompts)
    return min(num_distinct * longest, max(num_distinct, prefill_tokens(pair.device)))


def _working_bytes(pair: ModelPair, backend: str, tokens: int, columns: int) -> int:
    """Return the bytes that one layer needs, besides the cache, if `tokens` tokens attend to `columns` tokens."""
    config = pair.target.config.get_text_config()
    itemsize = pair.target_step.cache_dtype.itemsize if is_accelerator(pair.device) else 4
    heads = tokens * (config_value(config, "num_attention_heads") or 0)
    hidden = int(tokens * config.hidden_size * _HIDDEN_NUMBERS * itemsize)
    return hidden + _attention_bytes(backend, heads, columns, pair.target_step.head_dim)


def _attention_bytes(backend: str, heads: int, columns: int, dim: int) -> int:
    """Return the bytes that one layer's attention needs over `columns` tokens.

    `heads` is the number of tokens times the number of query heads, and `dim` the size of a head.

    pad, split and sdpa store a matrix of scores. flash stores none. fused and mixed store float32 partial results.
    """
    if backend == "flash":
        return 0
    if backend in ("fused", "mixed"):
        return min(-(-columns // _SEGMENT) * heads * (dim + 2), _MAX_PART_NUMBERS) * 4
    return heads * columns * _SCORE_BYTES


def cache_bytes(model: CausalModel, texts: CachedTexts, backend: str, batch: int) -> int:
    """Return the bytes of a runner's cache for `batch` texts at a time; shared prefixes count once."""
    shared = texts.shared(min_shared_tokens(model, backend))
    columns = cache_columns(model, texts.columns(shared), backend)
    return model.cache_bytes(batch, columns, *prefix_size(shared, batch))


def cache_padding(request: Request, drafts: bool) -> int:
    """Return the number of columns that a cache row needs after its text: a round may write padding there."""
    return 1 + (request.longest_draft if drafts else 0)
