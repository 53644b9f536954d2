"""A draft head's pointer, which raises the logit of the token that followed the same words earlier in the text.

`followers` finds that token and the length of the match. It searches only the text: drafts of the current proposal
extend the words to look for, but are not searched. `Pointer` computes the increase of the logit from the head's
state and the match length. Unlike the pointer of Merity et al. (arXiv 1609.07843), which mixes two distributions,
it adds to a logit. A head needs it because one layer can't find by itself where its last words occurred before.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.support import is_accelerator

# Length in tokens of the shortest match to use. Matches longer than LONGEST are treated as LONGEST tokens long.
SHORTEST, LONGEST = 2, 8
# Increase of a logit before training, for the shortest and the longest match.
INITIAL_INCREASE = 1.0, 6.0


class Pointer(nn.Module):
    """Computes the increase of a logit from the head's state and the match length.

    Attributes:
        weight: [hidden], multiplied with the head's state.
        by_size: [LONGEST - SHORTEST + 1], one value per match length.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden))
        self.by_size = nn.Parameter(torch.linspace(*INITIAL_INCREASE, LONGEST - SHORTEST + 1))

    def forward(self, states: Tensor, sizes: Tensor) -> Tensor:
        """Return the increases float32 [...] for states [..., hidden] and match lengths `sizes` [...]."""
        # Sum in float64, so that the order of summing has no effect. Accelerators use float32, because some lack
        # float64.
        wide = torch.float32 if is_accelerator(states.device) else torch.float64
        from_state = (states.to(wide) @ self.weight.to(wide)).float()
        return from_state + self.by_size.float()[(sizes - SHORTEST).clamp(min=0)]


def windows(text: Tensor) -> Tensor:
    """Return the last LONGEST tokens at each position of int64 [B, T], newest first: [B, T, LONGEST].

    Before the text begins they are -1.
    """
    return torch.stack([F.pad(text, (back, 0), value=-1)[:, : text.shape[1]] for back in range(LONGEST)], dim=-1)


def followers(text: Tensor, lengths: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Find the token after the longest match, the most recent one on ties, and the match length.

    For example, after "a b c a b" the token is c and the length 2.

    Args:
        text: int64 [B, T, LONGEST], the windows of the text to search.
        lengths: int64 [B, W], how many tokens of the text to search.
        last: int64 [B, W, LONGEST], the tokens to look for, newest first, padded with -1.

    Returns:
        The token, or -1 without a match, and the match length, or 0; both int64 [B, W].
    """
    width = text.shape[1]
    positions = torch.arange(width, device=text.device)
    equal = (text[:, None] == last[:, :, None]) & (last >= 0)[:, :, None]
    # A match counts only if a token follows it.
    sizes = equal.cumprod(-1, dtype=torch.uint8).sum(-1) * (positions + 1 < lengths[..., None])
    best_match = (sizes * width + positions).amax(-1)
    size, position = best_match // width, best_match % width
    is_match = size >= SHORTEST
    next_token = text[..., 0].gather(1, (position + 1).clamp(max=width - 1))
    return next_token.where(is_match, -1), size.where(is_match, 0)
