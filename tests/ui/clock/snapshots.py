"""Contract: snapshots of one race with other times, from which a test learns what on the page comes from times."""

from __future__ import annotations

import copy
from typing import Any

# Metrics that grow with a lane's time, and those that fall.
GROW = ("ms_per_token", "ptl_first_ms", "ptl_last_ms", "ptl_all_ms", "ttft_ms")
FALL = ("speedup", "throughput_tps", "flops_utilization", "useful_flops_utilization", "bandwidth_utilization")


def slower(snapshot: dict[str, Any], factor: float = 1.7) -> dict[str, Any]:
    """The same race with longer lane times: the first lane's by `factor`, each other's by a fifth more."""
    made = copy.deepcopy(snapshot)
    for at, lane in enumerate(made["lanes"].values()):
        _slow(lane, factor * 1.2**at)
    return made


def _slow(lane: dict[str, Any], by: float) -> None:
    lane["clock_ms"] *= by
    for key in (*GROW, *FALL):
        value = lane["metrics"].get(key)
        if value is not None:
            lane["metrics"][key] = value * by if key in GROW else value / by
    for sequence in lane["sequences"]:
        sequence["times_ms"] = [ms * by for ms in sequence["times_ms"]]
    for record in lane["rounds"]:
        record["time_ms"] *= by
        for key in ("draft_ms", "verify_ms"):
            record[key] = None if record[key] is None else record[key] * by
        # Another machine, so that a draft costs more there, and its parts are not in proportion.
        if record["draft_ms"] is not None:
            record["verify_ms"], record["draft_ms"] = 0.9 * record["verify_ms"], record["draft_ms"] * 1.05
