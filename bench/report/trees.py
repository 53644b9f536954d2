"""The tables of trees and the planner, measured and simulated: file, columns, and which of its rows.

Contract: plain data for tables.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]

TREES: dict[str, tuple[str, dict[str, str], Callable[[Row], bool]]] = {
    "budget": (
        "budget-avx2",
        {"prompts": "prompts", "batch": "batch", "temperature": "temperature", "arm": "draft length",
         "ms/token": "ms/token", "over regular": "over regular", "tokens/row-round": "tokens a row-round",
         "drafts/row-round": "drafts a row-round", "accepted/drafted": "acceptance"},
        lambda row: row["part"] == "lanes" and row["arm"] != "regular",
    ),
    "budget-nodes": (
        "budget-nodes",
        {"batch": "batch", "arm": "drafts in all rows", "tokens/row-round": "tokens a row-round",
         "drafts/row-round": "drafts a row-round"},
        lambda row: row["part"] == "nodes",
    ),
    "rules": (
        "rules-cpu",
        {"temperature": "temperature", "children": "children", "rule": "rule", "pairs": "pairs",
         "chance": "one is accepted", "error": "standard error"},
        lambda row: True,
    ),
    "simulate-trees": (
        "simulate-trees",
        {"hardware": "GPU", "batch": "batch", "regular tokens/s": "regular, tokens/s",
         "Algorithm 1 tokens/s": "Algorithm 1", "cost-aware tokens/s": "cost-aware", "budget tokens/s": "budget",
         "padding free tokens/s": "budget, were padding free", "budget / Algorithm 1": "budget / Algorithm 1",
         "drafts a row-round": "drafts a row-round", "other candidates": "of them second candidates"},
        lambda row: row["section"] == "trees",
    ),
    "simulate-trees-turn": (
        "simulate-trees",
        {"hardware": "GPU", "Algorithm 1 below regular": "Algorithm 1 below regular",
         "budget below regular": "budget below regular", "budget below Algorithm 1": "budget below Algorithm 1",
         "budget below cost-aware": "budget below cost-aware", "trees become chains": "trees become chains"},
        lambda row: row["section"] == "trees turn",
    ),
}  # fmt: skip
