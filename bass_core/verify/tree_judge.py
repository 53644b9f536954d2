"""The part of a round of trees after the target's forward, captured with it (`TreeJudge`).

Greedy and coupled trees are judged by the target's own choices at all nodes, which the device makes and the host
follows. Sampled trees are walked by a kernel (tree_triton.py), or outside of graphs if it can't run (tree.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.plan import TreeMask
from kernels.support import available, is_accelerator

from ..machine.transfer import to_device
from ..model.forward import ForwardOutput
from ..model.static_step import Judged, RoundInputs
from ..sample.distribution import dense
from ..sample.noise import NoiseKeys
from .acceptance import Outcomes
from .judge import Judge
from .rejection import plain
from .tree import choices_of, followed, verify_tree
from .tree_shape import JudgedTree, TreeShape


@dataclass(frozen=True)
class TreeJudge(Judge):
    """How trees are judged; equal judges share captured graphs, in which all trees have the shape `shape`.

    A row that drafted less deep has other tokens in place of the rest of its tree. No draft sees them, and neither
    the host nor the kernel follows them.
    """

    shape: TreeShape | None = None

    @property
    def reads_text(self) -> bool:
        return False

    @property
    def columns(self) -> int:
        """One for the newest token, and one for each draft."""
        return 1 + self.full_shape.firsts[-1]

    @property
    def full_shape(self) -> TreeShape:
        """The shape of all trees in captured rounds."""
        assert self.shape is not None
        return self.shape

    @property
    def follows_choices(self) -> bool:
        """Whether the trees are judged by the target's own choices."""
        return self.sampling.greedy or self.verification.coupled

    def captures(self, device: torch.device, probs: Tensor | None) -> bool:
        if self.shape is None:
            return False
        if self.sampling.shapes:
            return False
        if self.follows_choices:
            return True
        if probs is None or not (is_accelerator(device) and available(device)):
            return False
        from .tree_triton import can_walk  # imports triton

        return can_walk(device, probs.shape[-1])

    def constants(self, device: torch.device) -> dict[str, Tensor]:
        """Return int64 [4, 1 + N]: what each node sees, its depth, its parent's node, its distribution.

        The newest token is node 0, and draft i is node i + 1.
        """
        shape = self.full_shape
        sees = [1, *(1 | bits << 1 for bits in shape.sees)]
        depths = [0, *shape.depths]
        parents = [0, *(parent + 1 for parent in shape.parents)]
        return {"nodes": to_device([sees, depths, parents, [-1, *shape.drawn]], device)}

    def tree(self, constants: dict[str, Tensor], rows: int) -> TreeMask:
        sees, depths = (nodes.expand(rows, -1).contiguous() for nodes in constants["nodes"][:2])
        return TreeMask(sees, depths, torch.zeros_like(sees[:, 0]))

    def run(
        self,
        logits: Tensor,
        fed: Tensor,
        inputs: RoundInputs,
        probs: Tensor | None,
        text: Tensor | None,
        constants: dict[str, Tensor],
    ) -> Judged:
        """Judge a round on its device.

        Arguments are as in Judge.run, but `probs` float32 [B, P, V] has the distributions of TreeShape.drawn.
        """
        keys, (_, depths, parents, drawn) = inputs.keys, constants["nodes"]
        if not self.follows_choices:
            from .tree_triton import packed_walks  # imports triton

            assert probs is not None
            firsts = probs.shape[1] * torch.arange(len(fed), device=fed.device)[:, None]
            is_draft = torch.arange(len(drawn) - 1, device=fed.device) < inputs.counts[:, None]
            drafts_after = (parents[1:] - 1).expand(is_draft.shape)
            # The kernel ignores drafts with -2.
            q_rows = (drawn[1:] + firsts * (drawn[1:] >= 0)).where(is_draft, -2)
            all_probs = probs.flatten(0, 1)
            packed = packed_walks(logits, all_probs, fed[:, 1:], drafts_after, q_rows, keys, self.sampling)
            return Judged(packed, None)
        q = None
        if probs is not None:
            rows = torch.arange(len(fed), device=fed.device)[:, None]
            q = probs[rows, drawn.clamp(min=0), fed].where(drawn >= 0, 1.0)
        at = (depths.expand(fed.shape), parents.expand(fed.shape))
        return Judged(choices_of(logits, fed, *at, q, keys, self.sampling), None)

    def outcomes(self, packed: Tensor, proposal: Any) -> Outcomes:
        tree = JudgedTree.of(proposal.tokens, proposal.parents, None, None)
        if self.follows_choices:
            return Outcomes.of(followed(packed, tree, self.sampling))
        from .tree_triton import outcomes_of  # imports triton

        return Outcomes.of(outcomes_of(packed, tree))

    def verify(self, output: ForwardOutput, proposal: Any, drafts: Tensor, keys: NoiseKeys) -> Outcomes:
        if not proposal.width:
            return plain(output.logits[:, 0], keys, self.sampling)
        tree = JudgedTree.of(drafts, proposal.parents, proposal.drawn, dense(proposal.probs))
        return Outcomes.of(verify_tree(output.logits, tree, keys, self.sampling, self.verification))
