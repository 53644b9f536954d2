"""The tables of long texts: from which file, which columns, and which of its rows.

Contract: plain data for tables.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
_STEPS = {f"verify {n} ms": f"{n} verified, ms" for n in (1, 2, 4)}

LONG_TEXTS: dict[str, tuple[str, dict[str, str], Callable[[Row], bool]]] = {
    "prompt": (
        "prompt-native-bf16",
        {"what": "what", "kind": "rows have", "ms": "ms", "of own": "of own prompts", "of one row": "of one row",
         "MB": "MB", "estimate off": "admission's estimate off by"},
        bool,
    ),
    "attention": (
        "attention-cpu",
        {"cache": "cache", "rows": "rows", "tokens": "tokens a row", "cached": "cached tokens",
         "pad ms": "pad, ms", "split ms": "split, ms", "sdpa ms": "sdpa, ms", "auto / best": "auto / best"},
        lambda row: row["rows"] in (1, 8) and row["tokens"] in (1, 5),
    ),
    "shared-attention": (
        "floor-native-bf16",
        {"what": "what", "rows": "rows", "tokens a row": "tokens a row", "floor ms": "floor, ms",
         "lowest ms": "lowest, ms", "median ms": "median, ms", "lowest / floor": "lowest / floor"},
        lambda row: str(row["what"]).startswith("attention"),
    ),
    "window": (
        "window-cpu",
        {"text": "text", "prompt": "prompt", "cached": "its tokens", "window": "window", "rounds": "rounds",
         "acceptance": "acceptance", "tokens a round": "tokens a round of 4 drafts"},
        lambda row: row["part"] == "acceptance",
    ),
    "window-steps": (
        "window-cpu",
        {"rows": "rows", "cached": "cached tokens", "regular ms": "regular step, ms",
         "draft ms": "windowed step, ms", **_STEPS, "best length": "best length",
         "speed-up, computed": "speed-up, computed"},
        lambda row: row["part"] == "steps",
    ),
    "window-whole": (
        "window-cpu",
        {"rows": "rows", "cached": "longest prompt", "draft length": "draft length", "acceptance": "acceptance",
         "regular ms/token": "regular, ms/token", "windowed ms/token": "windowed, ms/token",
         "speed-up": "speed-up"},
        lambda row: row["part"] == "whole",
    ),
    "window-turn": (
        "window-cpu",
        {"rows": "rows", "pays from": "pays from, cached tokens", "kind": "kind",
         "ms a thousand cached": "ms that a thousand cached tokens add to a step",
         "draft ms": "windowed step, ms"},
        lambda row: row["part"] == "turn",
    ),
    "simulate-window": (
        "simulate-window",
        {"hardware": "GPU", "batch": "batch", "context": "cached tokens a row", "window": "windowed target",
         "window l": "its best length", "310M": "310M draft", "310M l": "its best length",
         "window / 310M": "windowed / 310M", "break-even": "acceptance at which windowed drafts break even"},
        lambda row: row["section"] == "window",
    ),
}  # fmt: skip
