"""Block verification: the drafts of a row are judged together (Sun et al., arXiv 2403.10444).

With P = target, Q = draft and g = the row's number of drafts x_1 .. x_g:

    reach_0 = 1, reach_i = min(1, reach_(i-1) P(x_i) / Q(x_i))
    excess_i = sum over x of max(reach_i P(x | x_1..x_i) - Q(x | x_1..x_i), 0), for i < g
    h_i = excess_i / (excess_i + 1 - reach_i), or 1 for 0 / 0; h_g = reach_g

The number of accepted drafts tau is the LARGEST i with u_i < h_i, or 0 if there is none. Drafts after a failed
test are still tested. If tau < g, the next token comes from norm(max(reach_tau P - Q, 0)), else from P.

The text has the target's distribution. On average, at least as many drafts are accepted as by the rejection rule
(just as many if Q is a point mass). Nothing is carried over to the next round. Whether a row drafts an i-th token
may depend on the drafts before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..sample.rows import residual, sums


def chances(
    p: Tensor, p_drafts: Tensor, q_drafts: Tensor, draft_probs: Tensor | None, num_drafted: Tensor
) -> tuple[Tensor, Tensor]:
    """Return h [B, l] and reach [B, l+1], in p's dtype; numbers after a row's last draft mean nothing.

    Args:
        p: [B, l+1, V], the target's distributions.
        p_drafts: [B, l], the target's probability of each draft.
        q_drafts: [B, l], the draft's probability of each draft.
        draft_probs: [B, l, V], the distributions that the drafts were drawn from; None for point masses.
        num_drafted: int64 [B], the drafts of each row that can be judged (acceptance.py).
    """
    width = p_drafts.shape[1]
    reach = torch.ones_like(p[:, :, 0])
    for i in range(width):
        joint, q = reach[:, i] * p_drafts[:, i], q_drafts[:, i]
        # If p is 0, reject the token, even if q is 0 too.
        reach[:, i + 1] = torch.where(joint < q, joint / q, (joint > 0).to(joint.dtype))
    h = reach[:, 1:].clone()
    if width < 2:
        return h, reach
    inner = reach[:, 1:-1]
    if draft_probs is None:
        excess = (inner * (1 - p_drafts[:, 1:])).clamp_(min=0)
    else:
        excess = sums(residual(p[:, 1:-1], draft_probs[:, 1:], reach[:, 1:-1]))[..., 0]
    total = excess + (1 - inner)
    has_next = torch.arange(2, width + 1, device=p.device) <= num_drafted[:, None]
    h[:, :-1] = torch.where(has_next, torch.where(total == 0, 1.0, excess / total), inner)
    return h, reach


def last_passed(passed: Tensor) -> Tensor:
    """Return the number of accepted drafts, int64 [B]: the 1-based place of each row's last true entry, or 0."""
    places = torch.arange(1, passed.shape[1] + 1, device=passed.device)
    return torch.nn.functional.pad(passed * places, (1, 0)).amax(1)
