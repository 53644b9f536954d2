"""Feeding a draft model what its cache lacks of each row's text, before it drafts.

Contract: rows may lack different numbers of tokens, some none; what a row lacks is fed once, in chunks of bounded
width, and padding never goes past the end of a row's cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..machine.transfer import to_device
from ..model.forward import ForwardBatch
from ..model.runner import ModelRunner

# Tokens of one row that are fed in one forward: the first proposal of a draft head follows a whole prompt.
CHUNK = 128


def feed_pending(
    runner: ModelRunner, x: Tensor, starts: list[int], counts: list[int], return_states: bool = False
) -> tuple[Tensor, Tensor | None, int]:
    """Feed the first counts[r] columns of row r of x, token ids [B, W] or embeddings [B, W, hidden], at starts[r].

    Returns the logits [B, V] after the last of them, its state [B, hidden] with return_states, and the number
    of forwards. A row of count 0 is fed padding after its tokens
    that count; its results mean nothing.
    """
    logits, states, forwards, at = torch.empty(0), None, 0, 0
    while at < max(counts):
        begins = [start + min(at, count) for start, count in zip(starts, counts, strict=True)]
        width = min(max(counts) - at, CHUNK, runner.cache.room(begins))
        left = [min(max(count - at, 0), width) for count in counts]
        take = [max(count - 1, 0) for count in left]
        real = [max(count, 1) for count in left]
        chunk = x[:, at : at + width]
        output = runner.forward(ForwardBatch(chunk, begins, real, take, return_states))
        fed, read = output.logits, None
        if return_states:
            read = output.require_states()[torch.arange(len(x), device=x.device), to_device(take, x.device)]
        if at:
            fresh = to_device([[count > at] for count in counts], x.device)
            fed = torch.where(fresh, fed, logits)
            read = None if read is None or states is None else torch.where(fresh, read, states)
        at += width
        # The next forward may overwrite these logits; `read` is a copy.
        logits, states, forwards = fed.clone() if at < max(counts) else fed, read, forwards + 1
    return logits, states, forwards
