"""Feeding a draft model those tokens of each row that its cache lacks (`feed_pending`)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..machine.transfer import to_device
from ..model.forward import ForwardBatch
from ..model.runner import ModelRunner

# Maximum number of tokens per row in one forward. More are fed in several forwards: a draft head's first proposal
# has to feed a whole prompt.
CHUNK = 128


def feed_pending(
    runner: ModelRunner,
    x: Tensor,
    starts: list[int],
    counts: list[int],
    return_states: bool = False,
    eager: bool = False,
) -> tuple[Tensor, Tensor | None, int]:
    """Feed each row's missing tokens in chunks of at most CHUNK, without padding past the end of the cache.

    Args:
        runner: runs the draft model.
        x: token ids [B, W] or embeddings [B, W, hidden]. Row r feeds its first counts[r] columns.
        starts: the position of each row's first column.
        counts: tokens to feed per row. A row with 0 is fed padding, and its results mean nothing.
        return_states: whether to return states.
        eager: as in ForwardBatch, for prompts.

    Returns:
        The logits [B, V] after each row's last token, that token's state [B, hidden] or None, and the number of
        forwards.
    """
    logits, states, forwards, at = torch.empty(0), None, 0, 0
    while at < max(counts):
        begins = [start + min(at, count) for start, count in zip(starts, counts, strict=True)]
        width = min(max(counts) - at, CHUNK, runner.cache.room(begins))
        left = [min(max(count - at, 0), width) for count in counts]
        take = [max(count - 1, 0) for count in left]
        real = [max(count, 1) for count in left]
        chunk = x[:, at : at + width]
        output = runner.forward(ForwardBatch(chunk, begins, real, take, return_states, eager=eager))
        fed, read = output.logits, None
        if return_states:
            read = output.require_states()[torch.arange(len(x), device=x.device), to_device(take, x.device)]
        if at:
            fresh = to_device([[count > at] for count in counts], x.device)
            fed = torch.where(fresh, fed, logits)
            read = None if read is None or states is None else torch.where(fresh, read, states)
        at += width
        # Copy the logits if another forward follows, which may overwrite them. `read` is already a copy.
        logits, states, forwards = fed.clone() if at < max(counts) else fed, read, forwards + 1
    return logits, states, forwards
