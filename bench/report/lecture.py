"""The table of docs/lecture.md and those of the outside lane, filled by tables.py.

Contract: name -> (result file, columns, which rows); docs/usage.md says what the figures mean.
"""

from __future__ import annotations

OUTSIDE = {
    "batch": "batch", "waiting": "OMP_WAIT_POLICY", "generate ms": "generate",
    "in a thread ms": "generate in a thread", "lane ms": "the lane", "lane in a race ms": "the lane in a race",
    "turn us": "an empty turn, µs",
}  # fmt: skip
LECTURE = {
    "lecture": (
        "lecture-cpu",
        {
            "preset": "preset", "lane": "lane", "times": "times",
            "ms per token": "ms per token", "over regular": "over regular",
            "accepted": "accepted", "drafted": "drafted", "mean acceptance length": "mean acceptance length",
            "rounds": "rounds", "first token, ms": "first token, ms",
        },
        # The picture shows those of the sweep.
        lambda row: row["preset"] != "Sweep",
    ),
    "outside": ("outside-cpu", OUTSIDE),
    "outside-default": ("outside-default-cpu", OUTSIDE),
}  # fmt: skip
