"""Whether a model computes under our attention what its own code does: tried once, when it is made.

Contract: `expect` runs a copy of the model as transformers would, on two texts of a few tokens; `check` runs it
with our attention and cache, in two steps and with rows of different lengths, and raises PairError in one sentence
where the logits differ. So a model that is not understood is refused at load. What a few tokens can't show, such
as a window of thousands, is read from the masks that the model asks for (attention.py), which refuses those that
it does not know; a window that only transformers' cache has is refused here. Cost: three forwards of at most 8
tokens. A model that a forward of ours computes from its weights alone is tried as well, by `agrees`, which says no
instead of refusing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ..errors import PairError
from .attention import Seen, unsupported
from .cache import RaggedCache
from .forward import ForwardBatch, ForwardOutput

# Tokens of the longer text, and of both in the first step; the shorter text then goes on from its first token.
_TOKENS, _FIRST = 4, 2
# The most that a token's logits may differ, as a share of their norm: the median over the tokens. Rounding alone
# gave up to 6e-7 in float32 and 0.014 in bfloat16 in tiny models of three layers; deep ones add more. A mixture of
# experts in 16 bits may choose others for a token.
_BOUNDS = {torch.float32: 1e-3, torch.float64: 1e-3}
_BOUND_16 = 0.2


class Stepping(Protocol):
    """What `agrees` needs of a CausalModel (base.py)."""

    name: str

    def forward(self, batch: ForwardBatch, cache: RaggedCache, backend: str = ...) -> ForwardOutput: ...

    def new_cache(self, max_batch: int, max_len: int) -> RaggedCache: ...


class Probed(Stepping, Protocol):
    """What `check` needs of it."""

    def probe(self, batch: ForwardBatch, cache: RaggedCache) -> tuple[Tensor, Seen]: ...


@dataclass
class Expected:
    """What transformers computes of two texts.

    Args:
        tokens: int64 [2, _TOKENS], or embeddings [2, _TOKENS, hidden].
        logits: [2, _TOKENS, V] of the model's own code.
        sizes: layers, the most key-value heads of a layer, and the largest key or value, in its own cache.
        slides: layers in which that cache forgets.
        bound: the most that logits may differ, as a share of their norm.
    """

    tokens: Tensor
    logits: Tensor
    sizes: tuple[int, int, int]
    slides: list[int]
    bound: float


@torch.inference_mode()
def expect(model: PreTrainedModel, name: str, context: int) -> Expected | None:
    """What transformers computes of two texts; None for a model that holds too few tokens to try it.

    Raises PairError if the model's own code fails, or if its cache holds anything but keys and values.
    """
    if context < _TOKENS:
        return None
    tokens = _tokens(model)
    given = {"inputs_embeds" if tokens.is_floating_point() else "input_ids": tokens}
    try:
        # As `generate` calls it: some models would otherwise count positions from another number.
        at = torch.arange(_TOKENS, device=tokens.device).expand(2, -1)
        out = model(**given, attention_mask=torch.ones_like(at), position_ids=at, use_cache=True)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise unsupported(name, f"its own code can't run it ({_said(error)})") from error
    # As its forward names it (base.cache_keyword).
    cache = getattr(out, "cache" if hasattr(out, "cache") else "past_key_values", None)
    layers: Any = getattr(getattr(cache, "self_attention_cache", cache), "layers", None) or []
    parts: list[Any] = [getattr(one, name, None) for one in layers for name in ("keys", "values")]
    if not parts or not all(isinstance(part, Tensor) and part.dim() == 4 for part in parts):
        raise unsupported(name, "it keeps a state that can't be rolled back")
    sizes = len(layers), max(part.shape[1] for part in parts), max(part.shape[3] for part in parts)
    slides = [layer for layer, one in enumerate(layers) if getattr(one, "is_sliding", False)]
    # A model may have an output layer of more bits than the rest.
    bounds = [_BOUNDS.get(one.dtype, _BOUND_16) for one in model.parameters()]
    return Expected(tokens, out.logits, sizes, slides, max(bounds, default=_BOUND_16))


@torch.inference_mode()
def check(model: Probed, expected: Expected, masked: bool) -> Seen:
    """What the model's layers saw. Raises PairError if logits differ, or if layers pass our attention by.

    masked: whether the model attends by its own code.
    """
    cache = model.new_cache(2, _TOKENS + 2)
    begin, go_on = _steps(expected.tokens)
    try:
        first, seen = model.probe(begin, cache)
        later = model.forward(go_on, cache, "sdpa").logits
    except (PairError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise unsupported(model.name, f"its code fails with our attention ({_said(error)})") from error
    if not masked and seen.calls < expected.sizes[0]:
        raise passes_by(model.name)
    refuse_forgetting(model.name, seen, expected.slides)
    if not _same(first, later, expected):
        # torch's own attention may hide a NaN in a key.
        sound = bool(first.isfinite().all() and later.isfinite().all())
        how = "it computes other logits than by itself" if sound else "it computes NaN or infinite logits"
        raise unsupported(model.name, f"with our attention {how}")
    return seen


@torch.inference_mode()
def agrees(model: Stepping, expected: Expected) -> bool:
    """Whether a forward of ours computes what the model's own code does, as far as the texts show it."""
    cache = model.new_cache(2, _TOKENS + 2)
    begin, go_on = _steps(expected.tokens)
    first = model.forward(begin, cache, "sdpa").logits
    return _same(first, model.forward(go_on, cache, "sdpa").logits, expected)


def _tokens(model: PreTrainedModel) -> Tensor:
    """Ids int64 [2, _TOKENS]; embeddings [2, _TOKENS, hidden] for a draft head's body, which is never fed ids."""
    config = model.config.get_text_config()
    words = getattr(model.get_input_embeddings(), "num_embeddings", 0) or int(config.vocab_size)
    if words < 2:
        drawn = torch.randn(2, _TOKENS, config.hidden_size, generator=torch.Generator("cpu").manual_seed(0))
        return drawn.to(model.device, model.dtype)
    return (torch.arange(2 * _TOKENS, device=model.device).view(2, _TOKENS) * 7 + 3) % words


def _steps(tokens: Tensor) -> tuple[ForwardBatch, ForwardBatch]:
    """Both texts' first tokens; then the longer one goes on, and the shorter one from its first token."""
    behind = _FIRST - 1
    second = torch.stack((tokens[0, _FIRST:], tokens[1, behind : behind + _TOKENS - _FIRST]))
    begin = ForwardBatch(tokens[:, :_FIRST], [0, 0], eager=True)
    return begin, ForwardBatch(second, [_FIRST, behind], eager=True)


def _same(first: Tensor, later: Tensor, expected: Expected) -> bool:
    """Whether the logits of the two steps [2, S, V] are those of the whole texts."""
    behind, wanted = _FIRST - 1, expected.logits
    pairs = (
        (first[:, 1:], wanted[:, 1:_FIRST]),
        (later[0], wanted[0, _FIRST:]),
        (later[1], wanted[1, behind : behind + _TOKENS - _FIRST]),
    )
    apart = [_apart(ours, own) for ours, own in pairs]
    # Each by itself: what is wrong in a second step, or for the shorter row alone, is wrong.
    return not any(bool(one.median() > expected.bound) or bool(one.isinf().any()) for one in apart)


def sliding(config: Any) -> tuple[int, ...]:
    """Of a model that is not tried, the layers in which transformers' cache forgets, by its config."""
    layers = DynamicCache(config=config).layers
    return tuple(layer for layer, one in enumerate(layers) if getattr(one, "is_sliding", False))


def refuse_forgetting(name: str, seen: Seen, slides: Sequence[int]) -> None:
    """Raises PairError where a layer attended to all that is before a token, and its own cache forgets."""
    if any(seen.windows.get(layer, 0) is None for layer in slides):
        raise unsupported(name, "its cache forgets what its masks still show")


def passes_by(name: str) -> PairError:
    """The refusal of a model whose layers don't call our attention."""
    return unsupported(name, "its attention does not go through transformers' attention interface")


def _apart(ours: Tensor, own: Tensor) -> Tensor:
    """How far logits [..., V] differ as a share of the norm [...], over the model's own that are finite; infinity
    where ours are not."""
    known = own.isfinite()
    ours, own = (torch.where(known, one.float(), 0.0) for one in (ours, own))
    share: Tensor = (ours - own).norm(dim=-1) / own.norm(dim=-1).clamp_min(1e-30)
    return share.nan_to_num(nan=float("inf"))


def _said(error: Exception) -> str:
    """The first line of an error, at most 200 characters."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
