"""Block verification: the drafts of a row are judged together (Sun et al., arXiv 2403.10444).

Contract (P = target, Q = draft): reach_0 = 1, reach_i = min(1, reach_(i-1) P(x_i) / Q(x_i)). For i below the row's
number of drafts g, excess_i = sum over x of max(reach_i P(x | x_1..x_i) - Q(x | x_1..x_i), 0), and draft i has the
chance h_i = excess_i / (excess_i + 1 - reach_i), or 1 where that is 0 / 0; the last has h_g = reach_g. Accepted
are tau drafts, the LARGEST i with u_i < h_i, or 0: a failed test ends nothing. After tau < g of them the next
token comes from norm(max(reach_tau P - Q, 0)), after all of them from P.

So the text is distributed as the target's own, and at least as many drafts are accepted, on average, as draft by
draft. Nothing is carried to the next round; g may depend on the drafts before it. With point masses for Q the rule
accepts as many as draft by draft.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..sample.rows import residual, sums


def chances(
    p: Tensor, p_drafts: Tensor, q_drafts: Tensor, draft_probs: Tensor | None, num_drafted: Tensor
) -> tuple[Tensor, Tensor]:
    """(h [B, l], reach [B, l+1]) in p's dtype; numbers after a row's last draft mean nothing.

    p [B, l+1, V]; p_drafts, q_drafts [B, l]: of the drafted tokens; draft_probs [B, l, V]: what they were drawn
    from, None for point masses; num_drafted int64 [B]: each row's drafts that can be judged (acceptance.py).
    """
    width = p_drafts.shape[1]
    reach = torch.ones_like(p[:, :, 0])
    for i in range(width):
        share, q = reach[:, i] * p_drafts[:, i], q_drafts[:, i]
        # A token without probability is refused even if a drafter claims to have drawn it with none.
        reach[:, i + 1] = torch.where(share < q, share / q, (share > 0).to(share.dtype))
    h = reach[:, 1:].clone()
    if width < 2:
        return h, reach
    inner = reach[:, 1:-1]
    if draft_probs is None:
        excess = (inner * (1 - p_drafts[:, 1:])).clamp_(min=0)
    else:
        excess = sums(residual(p[:, 1:-1], draft_probs[:, 1:], reach[:, 1:-1]))[..., 0]
    rest = excess + (1 - inner)
    behind = torch.arange(2, width + 1, device=p.device) <= num_drafted[:, None]
    h[:, :-1] = torch.where(behind, torch.where(rest == 0, 1.0, excess / rest), inner)
    return h, reach


def last_passed(passed: Tensor) -> Tensor:
    """How many drafts [B, l] are accepted if all up to a row's last true entry are: int64 [B]."""
    places = torch.arange(1, passed.shape[1] + 1, device=passed.device)
    return torch.nn.functional.pad(passed * places, (1, 0)).amax(1)
