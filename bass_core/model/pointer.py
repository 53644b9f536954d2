"""A draft head's pointer: it raises the logit of what followed where the text's last tokens stood before.

Contract: `followers` finds that token in a row's text, and how many tokens match; the drafts of the proposal in
hand lengthen what is looked for and are not searched. `Pointer` says by how much its logit is raised, from the
head's state and the match's size: a pointer as in Merity et al., arXiv 1609.07843, which adds to a logit where
theirs mixes two distributions. One layer does not find by itself where it saw its last words before.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.support import is_accelerator

# Tokens of the shortest match that counts; longer ones than the longest count as that.
SHORTEST, LONGEST = 2, 8
# By how much the shortest and the longest match raise a logit before training.
BEGIN = 1.0, 6.0


class Pointer(nn.Module):
    """weight [hidden], of the head's state; by_size [LONGEST - SHORTEST + 1], of a match's size."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden))
        self.by_size = nn.Parameter(torch.linspace(*BEGIN, LONGEST - SHORTEST + 1))

    def forward(self, states: Tensor, sizes: Tensor) -> Tensor:
        """What is added to the logits of the followers: float32 [...], of states [..., hidden] and sizes [...]."""
        # Summed in float64, so that no order of summing shows; some accelerators have none, and need none.
        wide = torch.float32 if is_accelerator(states.device) else torch.float64
        own = (states.to(wide) @ self.weight.to(wide)).float()
        return own + self.by_size.float()[(sizes - SHORTEST).clamp(min=0)]


def windows(text: Tensor) -> Tensor:
    """The last tokens at each place of int64 [B, T], newest first, -1 before the text: [B, T, LONGEST]."""
    return torch.stack([F.pad(text, (back, 0), value=-1)[:, : text.shape[1]] for back in range(LONGEST)], dim=-1)


def followers(text: Tensor, lengths: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """The token behind the longest match, of several the newest, or -1; and the match's size, or 0.

    Both int64 [B, W]. text [B, T, LONGEST]: the windows of what is searched. lengths int64 [B, W]: how much of it.
    last int64 [B, W, LONGEST]: the tokens that are looked for, newest first, -1 where there are fewer.
    """
    width = text.shape[1]
    places = torch.arange(width, device=text.device)
    alike = (text[:, None] == last[:, :, None]) & (last >= 0)[:, :, None]
    # A match ends where a token follows.
    sizes = alike.cumprod(-1, dtype=torch.uint8).sum(-1) * (places + 1 < lengths[..., None])
    best = (sizes * width + places).amax(-1)
    size, place = best // width, best % width
    found = size >= SHORTEST
    behind = text[..., 0].gather(1, (place + 1).clamp(max=width - 1))
    return behind.where(found, -1), size.where(found, 0)
