"""The types of what `race` yields: the plain data that the page, the API, recordings and benches read.

Contract: every value is JSON-ready. A key is always present unless its class says otherwise; a number that does
not apply or is not known yet is None. Times are milliseconds of the lane's own clock (lanes/clock.py), except
`elapsed_ms`, which is wall time. Non-goals: computing the values (metrics.py, trace.py).
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from ..sequence import Record


class DeviceReading(TypedDict):
    """One sample of `Monitor`: keys that start with gpu_ are of the whole board, the others of this process.

    gpu_utilization, gpu_sm_percent, gpu_tensor_percent and gpu_dram_percent are percentages; cpu_percent is in
    percent of one core; memory is in units of 2**20 bytes, gpu_power_w in watts, gpu_energy_mj in millijoules.
    """

    name: str
    kind: str
    gpu_utilization: float | None
    gpu_memory_mb: float | None
    gpu_memory_total_mb: float | None
    gpu_power_w: float | None
    gpu_energy_mj: float | None
    gpu_sm_percent: float | None
    gpu_tensor_percent: float | None
    gpu_dram_percent: float | None
    cpu_percent: float | None
    cpu_count: int | None
    rss_mb: float | None


class SequenceSnapshot(TypedDict):
    """One text so far: for each token its id, its piece of the text, where it came from, and when.

    `text` and `pieces` are None without a tokenizer; `finish_reason` is None until the text is finished.
    """

    text: str | None
    token_ids: list[int]
    pieces: list[str] | None
    origins: list[str]
    times_ms: list[float]
    finish_reason: str | None


class _Lane(TypedDict):
    sequences: list[SequenceSnapshot]
    metrics: Record
    rounds: list[Record]
    clock_ms: float
    finished: bool
    error: str | None
    reading: Record | None
    cache: Record | None


class LaneSnapshot(_Lane, total=False):
    """One lane. Its records are dataclasses as plain data: `metrics` of Metrics (lanes/metrics.py), `rounds` of
    Round, `reading` of Reading (sequence.py), `cache` of CacheBytes (decode/base.py). `reading` is None unless
    prompts are being read; `cache` if the decoder does not tell, or on a simulated clock with other models.

    `timeline`: present only if draft and target overlap; see decode/overlapped/timeline.py.
    """

    timeline: dict[str, Any]


class Weighed(TypedDict):
    """The two tokens' probabilities at the place where two texts diverge, and how close they are; 1 is a tie."""

    p_ours: float | None
    p_theirs: float | None
    tie: float | None


class Difference(Weighed):
    """Where a row's text first differs from the reference lane's: the token index and the two token ids."""

    at: int
    ours: int
    theirs: int


class ClockRecord(TypedDict):
    """What the lanes' times are predicted for (SimulatedClock), and by what.

    assumptions: the shares of bandwidth, compute and link that a step reaches, and microseconds a layer and a
    reduction (Assumptions); empty where the times are a measured table's, and gpus, target and draft None.
    """

    kind: Literal["predicted"]
    hardware: str
    gpus: int | None
    target: str | None
    draft: str | None
    assumptions: dict[str, float]
    source: str


class _Snapshot(TypedDict):
    phase: Literal["measuring", "running"]
    done: bool
    scheduling: str
    elapsed_ms: float
    lanes: dict[str, LaneSnapshot]
    device: DeviceReading


class Snapshot(_Snapshot, total=False):
    """All lanes at one instant; `lanes` is empty while `phase` is "measuring".

    `clock`: present only under a simulated clock; all times of the lanes, and all figures made of them, are then
    predictions.
    `comparison`: present only in the last snapshot, and only if two lanes must give the same text.
    A lane's list in `comparison` has one entry per row: None if the row equals the reference lane's.
    `measuring`: present only while `phase` is "measuring", and only once costs are being measured: Progress
    (decode/measuring.py) as plain data.
    """

    clock: ClockRecord
    comparison: dict[str, list[Difference | None]]
    measuring: Record
