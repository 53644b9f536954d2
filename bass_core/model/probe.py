"""Test at load time whether a model gives the same logits with our attention as with its own code.

`expect` runs a copy of the model as transformers would, on two texts of a few tokens. `check` runs it with our
attention and cache, in two steps and with rows of different lengths, and raises PairError if the logits differ. So
a model that we don't understand is refused at load.

A few tokens can't show everything, e.g. a window of thousands. Such windows are read from the masks that the model
requests; attention.py refuses unknown masks. A window that exists only in transformers' cache is refused here.

`agrees` tests a forward of ours in the same way, and returns False instead of raising. A test costs three forwards
of at most 8 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from ..errors import PairError
from .attention import Seen, unsupported
from .cache import RaggedCache
from .forward import ForwardBatch, ForwardOutput

# Tokens of the longer text, and of both texts in the first step. The shorter text continues from its first token.
_TOKENS, _FIRST = 4, 2
# Bounds of the logits' difference as a share of their norm. The median over the tokens must not exceed the bound.
# Rounding gave up to 6e-7 in float32 and 0.014 in bfloat16 in tiny models of three layers; deep models add more,
# and a mixture of experts in 16 bits may choose other experts for a token.
_BOUNDS = {torch.float32: 1e-3, torch.float64: 1e-3}
_BOUND_16 = 0.2


class Stepping(Protocol):
    """The part of CausalModel (base.py) that `agrees` needs."""

    name: str

    def forward(self, batch: ForwardBatch, cache: RaggedCache, backend: str = ...) -> ForwardOutput: ...

    def new_cache(self, max_batch: int, max_len: int) -> RaggedCache: ...


class Probed(Stepping, Protocol):
    """The part of CausalModel that `check` needs."""

    def probe(self, batch: ForwardBatch, cache: RaggedCache) -> tuple[Tensor, Seen]: ...


@dataclass
class Expected:
    """The results of transformers' own code for two texts.

    Attributes:
        tokens: int64 [2, _TOKENS], or embeddings [2, _TOKENS, hidden].
        logits: [2, _TOKENS, V].
        sizes: three sizes of transformers' cache: the number of layers, the maximum number of key-value heads in a
            layer, and the largest size of a key or value.
        slides: layers whose cache drops old tokens of a text within the context.
        bound: the allowed difference of logits, as a share of their norm.
        state_bytes: bytes of a row's states, in layers that keep some.
    """

    tokens: Tensor
    logits: Tensor
    sizes: tuple[int, int, int]
    slides: list[int]
    bound: float
    state_bytes: int = 0


@torch.inference_mode()
def expect(model: PreTrainedModel, name: str, context: int) -> Expected | None:
    """Run a copy of the model as transformers would, on two texts; None if its context is too short for a test.

    Raises:
        PairError: if the model's own code fails, or its cache holds anything but keys and values.
    """
    if context < _TOKENS:
        return None
    tokens = _tokens(model)
    inputs = {"inputs_embeds" if tokens.is_floating_point() else "input_ids": tokens}
    try:
        # Pass the same arguments as `generate`: without them some models count positions from another number.
        positions = torch.arange(_TOKENS, device=tokens.device).expand(2, -1)
        out = model(**inputs, attention_mask=torch.ones_like(positions), position_ids=positions, use_cache=True)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise unsupported(name, f"its own code can't run it ({_first_line(error)})") from error
    # The output names the cache as the forward does (base.cache_keyword).
    cache = getattr(out, "cache" if hasattr(out, "cache") else "past_key_values", None)
    if cache is None:
        raise unsupported(name, "it returns no cache of keys and values")
    layers: Any = getattr(getattr(cache, "self_attention_cache", cache), "layers", None) or []
    if all(type(layer) is DynamicLayer for layer in layers):
        # Without the layers that the config counts, but that were removed from the model.
        used = [layer for layer in layers if layer.is_initialized]
        if used != layers[: len(used)]:
            raise unsupported(name, "the layer_idx of its layers don't count from 0")
        layers = used
    stateful = [layer for layer in layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    # In a model with states, some layers have no keys.
    attending = [layer for layer in layers if not stateful or getattr(layer, "keys", None) is not None]
    parts: list[Any] = [getattr(layer, name, None) for layer in attending for name in ("keys", "values")]
    if not (parts or stateful) or not all(isinstance(part, Tensor) and part.dim() == 4 for part in parts):
        raise unsupported(name, "it keeps a state that can't be rolled back")
    heads, head_dim = (max((part.shape[dim] for part in parts), default=0) for dim in (1, 3))
    sizes = len(attending), heads, head_dim
    slides = [
        index
        for index, layer in enumerate(layers)
        if getattr(layer, "is_sliding", False) and getattr(layer, "sliding_window", 0) < context
    ]
    # The loosest bound of all weights: for example, an output layer may have more bits than the rest.
    bounds = [_BOUNDS.get(weight.dtype, _BOUND_16) for weight in model.parameters()]
    states = [
        state[:1]
        for layer in stateful
        for state in (*layer.conv_states.values(), *layer.recurrent_states.values())
        if state is not None
    ]
    nbytes = sum(state.nbytes for state in states)
    return Expected(tokens, out.logits, sizes, slides, max(bounds, default=_BOUND_16), nbytes)


@torch.inference_mode()
def check(model: Probed, expected: Expected, masked: bool) -> Seen:
    """Compare the model under our attention with `expected`, and return what its layers asked for.

    `masked` means that the model attends with its own code and our masks.

    Raises:
        PairError: if the logits differ, or if layers bypass our attention.
    """
    cache = model.new_cache(2, _TOKENS + 2)
    first_step, second_step = _steps(expected.tokens)
    try:
        first, seen = model.probe(first_step, cache)
        later = model.forward(second_step, cache, "sdpa").logits
    except (PairError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise unsupported(model.name, f"its code fails with our attention ({_first_line(error)})") from error
    if not masked and seen.calls < expected.sizes[0]:
        raise bypass_error(model.name)
    refuse_forgetting(model.name, seen, expected.slides)
    if not _same(first, later, expected):
        # Check for NaN as well: torch's own attention may hide a NaN in a key.
        sound = bool(first.isfinite().all() and later.isfinite().all())
        problem = "it computes other logits than by itself" if sound else "it computes NaN or infinite logits"
        raise unsupported(model.name, f"with our attention {problem}")
    return seen


@torch.inference_mode()
def agrees(model: Stepping, expected: Expected) -> bool:
    """Return whether our forward gives the same logits on these texts as the model's own code."""
    cache = model.new_cache(2, _TOKENS + 2)
    first_step, second_step = _steps(expected.tokens)
    first = model.forward(first_step, cache, "sdpa").logits
    return _same(first, model.forward(second_step, cache, "sdpa").logits, expected)


def _tokens(model: PreTrainedModel) -> Tensor:
    """Return ids int64 [2, _TOKENS], or embeddings for a draft head's body, which is never fed ids."""
    config = model.config.get_text_config()
    words = getattr(model.get_input_embeddings(), "num_embeddings", 0) or int(config.vocab_size)
    if words < 2:
        drawn = torch.randn(2, _TOKENS, config.hidden_size, generator=torch.Generator("cpu").manual_seed(0))
        return drawn.to(model.device, model.dtype)
    return (torch.arange(2 * _TOKENS, device=model.device).view(2, _TOKENS) * 7 + 3) % words


def _steps(tokens: Tensor) -> tuple[ForwardBatch, ForwardBatch]:
    """Return two steps: the first tokens of both texts, then the next ones, with rows of different lengths."""
    shorter_len = _FIRST - 1
    second = torch.stack((tokens[0, _FIRST:], tokens[1, shorter_len : shorter_len + _TOKENS - _FIRST]))
    first_step = ForwardBatch(tokens[:, :_FIRST], [0, 0], eager=True)
    return first_step, ForwardBatch(second, [_FIRST, shorter_len], eager=True)


def _same(first: Tensor, later: Tensor, expected: Expected) -> bool:
    """Return whether the logits [2, S, V] of the two steps are those of the whole texts."""
    shorter_len, whole = _FIRST - 1, expected.logits
    pairs = (
        (first[:, 1:], whole[:, 1:_FIRST]),
        (later[0], whole[0, _FIRST:]),
        (later[1], whole[1, shorter_len : shorter_len + _TOKENS - _FIRST]),
    )
    differences = [_apart(ours, reference) for ours, reference in pairs]
    # Test each part: an error counts even if it is only in the second step, or only in the shorter row.
    return not any(
        bool(difference.median() > expected.bound) or bool(difference.isinf().any()) for difference in differences
    )


def sliding(config: Any) -> tuple[int, ...]:
    """Return the layers in which transformers' cache drops old tokens, according to the config."""
    layers = DynamicCache(config=config).layers
    return tuple(layer for layer, cache_layer in enumerate(layers) if getattr(cache_layer, "is_sliding", False))


def refuse_forgetting(name: str, seen: Seen, slides: Sequence[int]) -> None:
    """Raise PairError if a layer attended to all earlier tokens although its own cache drops some."""
    if any(seen.windows.get(layer, 0) is None for layer in slides):
        raise unsupported(name, "its cache forgets what its masks still show")


def bypass_error(name: str) -> PairError:
    """Make the error for a model whose layers don't call our attention."""
    return unsupported(name, "its attention does not go through transformers' attention interface")


def _apart(ours: Tensor, reference: Tensor) -> Tensor:
    """Return the norm of the logits' difference as a share of the norm [...]; infinite if ours aren't finite."""
    finite = reference.isfinite()
    ours, reference = (torch.where(finite, logits.float(), 0.0) for logits in (ours, reference))
    share: Tensor = (ours - reference).norm(dim=-1) / reference.norm(dim=-1).clamp_min(1e-30)
    return share.nan_to_num(nan=float("inf"))


def _first_line(error: Exception) -> str:
    """Return the type and first line of an error, at most 200 characters of it."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
