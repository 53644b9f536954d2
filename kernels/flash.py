"""flash-attn's attention over a cache with row lengths, from whichever of its packages runs on a device.

`version_for(device)` returns the first of VERSIONS that is installed and runs there, or None. Its `attend` takes
queries [B, S, Hq, D], keys and values [B, N, Hkv, D] and int32 lengths [B] that count the new tokens, and returns
[B, S, Hq, D]. Keys are never split (num_splits=1): the number of parts would depend on the batch and on S, so a
row's bits would too.

None of these packages has been run here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .support import capability


def _with_kvcache(
    function: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Call `flash_attn_with_kvcache`, which flash-attn 2 and 3 have."""
    return function(
        query, key, value, cache_seqlens=lengths, softmax_scale=scaling, causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0), softcap=softcap or 0.0, num_splits=1,
    )  # fmt: skip


def _two_queries(function: Callable[..., Tensor], query: Tensor, *rest: Any) -> Tensor:
    """Call `_with_kvcache` with two queries or more.

    flash-attn 3 drops `causal` for a single query, and then sums in tiles of another size, so that its bits differ
    from those of several queries.
    """
    if query.shape[1] > 1:
        return _with_kvcache(function, query, *rest)
    return _with_kvcache(function, torch.cat((query, query), 1), *rest)[:, 1:]


def _varlen(
    function: Callable[..., tuple[Tensor, Any]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Call flash-attn 4's `flash_attn_varlen_func`, which returns the log-sum-exps too."""
    out, _ = function(
        query, key, value, seqused_k=lengths, softmax_scale=scaling, causal=True,
        window_size=(None, None) if window is None else (window - 1, 0), softcap=softcap or 0.0, num_splits=1,
    )  # fmt: skip
    return out


@dataclass(frozen=True)
class Version:
    """A flash-attn package.

    Attributes:
        modules: the modules that may have the function, tried in order.
        capabilities: the compute capabilities that it runs on.
        call: calls the function with the arguments of `attend`.
    """

    name: str
    modules: tuple[str, ...]
    function: str
    capabilities: range
    call: Callable[..., Tensor]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Attend over the first lengths[b] columns of each row b; arguments as in the module's docstring."""
        return self.call(_function(self), query, key, value, lengths, scaling, window, softcap)


VERSIONS = (
    Version(
        "flash-attn 3",
        ("flash_attn_3.flash_attn_interface", "flash_attn_interface"),
        "flash_attn_with_kvcache",
        range(90, 100),
        _two_queries,
    ),
    Version("flash-attn 4", ("flash_attn.cute",), "flash_attn_varlen_func", range(80, 130), _varlen),
    Version("flash-attn 2", ("flash_attn",), "flash_attn_with_kvcache", range(80, 130), _with_kvcache),
)


@cache
def _function(version: Version) -> Any:
    """Return a version's function, or None.

    Only an import shows whether it is installed, because the packages share the namespace flash_attn.
    """
    for module in version.modules:
        try:
            return getattr(import_module(module), version.function)
        except Exception:  # an import of compiled code may raise anything
            continue
    return None


def version_for(device: torch.device) -> Version | None:
    """Return the first installed version that runs on the device, or None."""
    number = capability(device)
    return next((each for each in VERSIONS if number in each.capabilities and _function(each) is not None), None)
