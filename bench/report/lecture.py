"""The table of docs/lecture.md, filled by tables.py.

Contract: name -> (result file, columns); docs/usage.md says what the figures mean.
"""

from __future__ import annotations

LECTURE = {
    "lecture": (
        "lecture-cpu",
        {
            "preset": "preset", "lane": "lane", "times": "times",
            "ms per token": "ms per token", "over regular": "over regular",
            "accepted": "accepted", "drafted": "drafted", "mean acceptance length": "mean acceptance length",
            "rounds": "rounds", "first token, ms": "first token, ms",
        },
    ),
}  # fmt: skip
