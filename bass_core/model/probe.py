"""Whether a model computes under our attention what its own code does: tried once, when it is made.

Contract: `expect` runs a copy of the model as transformers would, on two texts of a few tokens; `check` runs it
with our attention and cache, in two steps and with rows of different lengths, and raises PairError in one sentence
where the logits differ. So a model that is not understood is refused at load. What a few tokens can't show, such
as a window of thousands, is read from the masks that the model asks for (attention.py), which refuses those that
it does not know; a window that only transformers' cache has is refused here. Cost: three forwards of at most 8
tokens. Llama and Qwen3, which the tests hold to transformers' own texts, are not tried.
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


class Probed(Protocol):
    """Of a CausalModel (base.py), what is tried."""

    name: str

    def probe(self, batch: ForwardBatch, cache: RaggedCache) -> tuple[Tensor, Seen]: ...

    def forward(self, batch: ForwardBatch, cache: RaggedCache, backend: str = ...) -> ForwardOutput: ...

    def new_cache(self, max_batch: int, max_len: int) -> RaggedCache: ...


@dataclass
class Expected:
    """tokens int64 [2, _TOKENS]; logits [2, _TOKENS, V] of the model's own code; sizes: layers, the most key-value
    heads of a layer, and the largest key or value, as its own cache holds them; slides: layers in which that cache
    forgets."""

    tokens: Tensor
    logits: Tensor
    sizes: tuple[int, int, int]
    slides: list[int]


@torch.inference_mode()
def expect(model: PreTrainedModel, name: str, context: int) -> Expected | None:
    """What transformers computes of two texts; None for a model that holds too few tokens to try it.

    Raises PairError if the model's own code fails, or if its cache holds anything but keys and values.
    """
    if context < _TOKENS:
        return None
    table = model.get_input_embeddings()
    words = getattr(table, "num_embeddings", 0) or int(model.config.get_text_config().vocab_size)
    tokens = (torch.arange(2 * _TOKENS, device=model.device).view(2, _TOKENS) * 7 + 3) % words
    try:
        # As `generate` calls it: some models would otherwise count positions from another number.
        at = torch.arange(_TOKENS, device=tokens.device).expand(2, -1)
        out = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), position_ids=at, use_cache=True)
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
    return Expected(tokens, out.logits, sizes, slides)


@torch.inference_mode()
def check(model: Probed, expected: Expected, masked: bool) -> Seen:
    """What the model's layers saw. Raises PairError if logits differ, or if layers pass our attention by.

    masked: whether the model attends by its own code.
    """
    tokens, cache = expected.tokens, model.new_cache(2, _TOKENS + 2)
    behind = _FIRST - 1
    second = torch.stack((tokens[0, _FIRST:], tokens[1, behind : behind + _TOKENS - _FIRST]))
    try:
        first, seen = model.probe(ForwardBatch(tokens[:, :_FIRST], [0, 0]), cache)
        later = model.forward(ForwardBatch(second, [_FIRST, behind]), cache, "sdpa").logits
    except (PairError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise unsupported(model.name, f"its code fails with our attention ({_said(error)})") from error
    if not masked and seen.calls < expected.sizes[0]:
        raise passes_by(model.name)
    refuse_forgetting(model.name, seen, expected.slides)
    wanted = expected.logits
    pairs = (
        (first[:, 1:], wanted[:, 1:_FIRST]),
        (later[0], wanted[0, _FIRST:]),
        (later[1], wanted[1, behind : behind + _TOKENS - _FIRST]),
    )
    apart = [_apart(ours, own) for ours, own in pairs]
    bound = _BOUNDS.get(wanted.dtype, _BOUND_16)
    # Each by itself: what is wrong in a second step, or for the shorter row alone, is wrong.
    if any(bool(one.median() > bound) or bool(one.isinf().any()) for one in apart):
        raise unsupported(model.name, "with our attention it computes other logits than by itself")
    return seen


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
