"""The chances of block verification: one launch for all drafts of all rows.

One program per row and draft sums over the vocabulary, so that no program waits for another. Nothing is read on
the host. Given the same probabilities, results equal those of the torch reference up to the order of sums. The
formulas are in the reference (bass_core/verify/block.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..support import interpreting, why_unavailable
from .launch import launch

BLOCK_V = 2048
WARPS = 8
# Rows per program under Triton's interpreter, whose time grows with the number of programs; 1 on a GPU.
_ROWS_INTERPRETED = 16


@triton.jit(do_not_specialize=["batch", "width"])
def weigh(
    p, q, drafts, num_drafted, chances_out, reach_out, batch, width, vocab,
    SOFT: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute the reach after i + 1 drafts and the chance of draft i + 1, of ROWS rows, in program (b, i).

    SOFT: q is given. The reach before the first draft is 1 and not written.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = row < batch
    last = tl.program_id(1)
    count = tl.load(num_drafted + row, mask=real, other=0)
    p_row = p + row * (width + 1) * vocab
    q_row = q + row * width * vocab
    reach = tl.full([ROWS], 1.0, tl.float32)
    for i in range(0, last + 1):
        draft = tl.load(drafts + row * width + i, mask=real, other=0)
        share = reach * tl.load(p_row + i * vocab + draft, mask=real, other=0.0)
        q_draft = share * 0.0 + 1.0
        if SOFT:
            q_draft = tl.load(q_row + i * vocab + draft, mask=real, other=1.0)
        # Refuse a token with p = 0, even if a drafter claims q = 0 for it.
        whole = tl.where(share > 0.0, 1.0, 0.0)
        reach = tl.where(share < q_draft, share / tl.where(q_draft > 0.0, q_draft, 1.0), whole)
    chance = reach
    goes_on = real & (last + 1 < count)
    if last + 1 < width:
        here = last + 1
        if SOFT:
            sums = tl.zeros([ROWS, BLOCK_V], tl.float32)
            for start in range(0, vocab, BLOCK_V):
                token = start + tl.arange(0, BLOCK_V)[None, :]
                exists = goes_on[:, None] & (token < vocab)
                weight = tl.load(p_row[:, None] + here * vocab + token, mask=exists, other=0.0)
                taken = tl.load(q_row[:, None] + here * vocab + token, mask=exists, other=0.0)
                sums += tl.maximum(reach[:, None] * weight - taken, 0.0)
            excess = tl.sum(sums, 1)
        else:
            draft = tl.load(drafts + row * width + here, mask=goes_on, other=0)
            weight = tl.load(p_row + here * vocab + draft, mask=goes_on, other=0.0)
            excess = tl.maximum(reach * (1.0 - weight), 0.0)
        rest = excess + (1.0 - reach)
        inner = tl.where(rest == 0.0, 1.0, excess / tl.where(rest == 0.0, 1.0, rest))
        chance = tl.where(goes_on, inner, chance)
    tl.store(chances_out + row * width + last, chance, mask=real)
    tl.store(reach_out + row * (width + 1) + last + 1, reach, mask=real)


def chances(p: Tensor, q: Tensor | None, drafts: Tensor, num_drafted: Tensor) -> tuple[Tensor, Tensor]:
    """Return h float32 [B, l] and reach float32 [B, l+1]; numbers after a row's last draft are undefined.

    Args:
        p: float32 [B, l+1, V].
        q: float32 [B, l, V], None for point masses.
        drafts: int64 [B, l].
        num_drafted: int64 [B], drafts per row; the rest of `drafts` is padding.

    Raises:
        ValueError: if shapes do not fit.
    """
    batch, width = drafts.shape
    reason = why_unavailable(drafts.device)
    if reason:
        raise ValueError(f"the kernel can't run: {reason}.")
    if p.shape[:2] != (batch, width + 1) or (q is not None and q.shape != (batch, width, p.shape[2])):
        raise ValueError("chances needs p for each drafted position and one more, and q for the drafted ones.")
    h = torch.empty(batch, width, device=p.device)
    reach = torch.ones(batch, width + 1, device=p.device)
    rows = _ROWS_INTERPRETED if interpreting() else 1
    if width:
        launch(weigh, (triton.cdiv(batch, rows), width),
            p.float().contiguous(), h if q is None else q.float().contiguous(), drafts.contiguous(), num_drafted,
            h, reach, batch, width, p.shape[2],
            SOFT=q is not None, ROWS=rows, BLOCK_V=BLOCK_V, num_warps=WARPS,
        )  # fmt: skip
    return h, reach
