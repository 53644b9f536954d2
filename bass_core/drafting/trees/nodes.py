"""A draft of a tree while the tree grows.

Contract: plain data; growth.py alone changes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...budget.trees import Draft


@dataclass
class Node(Draft):
    """fed: which of the row's drafts that the model was fed it is, or -1; q: the row of `_drawn` it comes from."""

    fed: int = -1
    q: int = -1
    chosen: bool = False
