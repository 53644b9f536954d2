"""The trees that a step's new tokens form, as the compiled forward takes them.

Contract: plain arrays; nothing is imported that needs numba.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class Tree(NamedTuple):
    """The trees that the new tokens of a step form (TokenTree in kernels/plan.py), one a row.

    bases int64 [B]: the first column of a row's tree, `lengths` less what earlier steps fed of it. sees, depths
    int64 [N], of each new token: which columns base + j it sees, a bit j each, and how many of them are before it.
    """

    bases: Array
    sees: Array
    depths: Array


_NOTHING = np.empty(0, np.int64)
NO_TREE = Tree(_NOTHING, _NOTHING, _NOTHING)
