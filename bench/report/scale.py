"""The tables of docs/scale.md, filled by tables.py.

Contract: name -> (result file, columns).
"""

from __future__ import annotations

SCALE = {
    "workers": (
        "workers-cpu",
        {
            "arm": "races", "regular, ms/token": "regular, ms/token",
            "speculative, ms/token": "speculative, ms/token",
            "bass, ms/token": "bass, ms/token", "first snapshot, ms": "first snapshot, ms",
            "snapshots a second": "snapshots a second",
        },
    ),
    "placement": (
        "placement-cpu",
        {
            "order": "who comes next", "small races, median wait, s": "small races, median wait, s",
            "small races, longest wait, s": "longest wait, s", "large race, wait, s": "the large race's wait, s",
        },
    ),
}  # fmt: skip
