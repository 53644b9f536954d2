"""Whether a request fits the memory, asked before any is taken.

Contract: an estimate of caches and logits of all lanes at once against the memory that is free now; what does
not fit is refused with the largest batch that would. Weights are in memory already and are not counted again.
"""

from __future__ import annotations

from bisect import bisect_right

import psutil
import torch

from .drafting import runs_model
from .errors import RequestError
from .lane import cache_length
from .pair import ModelPair
from .request import Request

# Copies of the logits that live at once while a distribution is filtered, compared and drawn from.
_LOGIT_COPIES = 6
_HEADROOM = 0.9


def admit(pair: ModelPair, request: Request, *together: tuple[str, ...]) -> None:
    """Raises RequestError unless each group of methods that run `together` fits, one group after another."""

    def needs(rows: int) -> int:
        return max(estimate_bytes(pair, request, methods, rows) for methods in together)

    free = available_bytes(pair.device)
    rows = len(request.prompts)
    needed = needs(rows)
    if needed <= free * _HEADROOM:
        return
    fitting = bisect_right(range(1, rows), free * _HEADROOM, key=needs)
    advice = f"a batch of {fitting} would fit" if fitting else "shorten the prompt or ask for fewer tokens"
    raise RequestError(
        f"This request needs about {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free: {advice}."
    )


def estimate_bytes(pair: ModelPair, request: Request, methods: tuple[str, ...], rows: int) -> int:
    """Bytes of caches and working memory of all methods, for a batch of `rows`."""
    total = 0
    for method in methods:
        drafts = method != "regular"
        batch = 1 if method == "speculative" else rows
        length = cache_length(request, drafts)
        total += pair.target_step.cache_bytes(batch, length)
        width = 1
        if drafts:
            width += min(request.policy.limit, request.max_new_tokens)
            if runs_model(request.drafter) and pair.draft_step is not None:
                total += pair.draft_step.cache_bytes(batch, length)
        logits = batch * width * pair.vocab * 4
        total += logits * (1 if request.sampling.greedy else _LOGIT_COPIES)
    return total


def available_bytes(device: torch.device) -> int:
    """Memory that a new allocation on the device could take, in bytes."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return int(psutil.virtual_memory().available)
