"""The trees that a step's new tokens form, as the compiled forward takes them: plain arrays, no numba."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class Tree(NamedTuple):
    """The trees that the new tokens of a step form, one per row (TreeMask in kernels/plan.py).

    Attributes:
        bases: int64 [B], the first column of each row's tree: its length minus the tree tokens of earlier steps.
        sees: int64 [N]; a token sees column base + j if bit j is set.
        depths: int64 [N]; a token's position is base + depth.
    """

    bases: Array
    sees: Array
    depths: Array


_NOTHING = np.empty(0, np.int64)
NO_TREE = Tree(_NOTHING, _NOTHING, _NOTHING)
