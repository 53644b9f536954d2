"""The types of the snapshots that `race` yields: plain data for the page, the API, recordings and benches.

Every value is JSON-ready. Every key is always present, unless the docstring of its class says otherwise. A number
that does not apply or is not known yet is None. Times are milliseconds of the lane's own clock (lanes/clock.py),
except for `elapsed_ms`, which is wall time. metrics.py and trace.py compute the values.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from ..sequence import Record


class DeviceReading(TypedDict):
    """One sample of `Monitor`. Keys that start with gpu_ describe the whole board, the others this process.

    gpu_utilization and keys with _percent are percentages (cpu_percent: of one core). Keys with _mb are in units
    of 2**20 bytes, gpu_power_w is in watts, and gpu_energy_mj in millijoules.
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
    """One text so far, with each token's id, piece of text, origin and time.

    `text` and `pieces` are None without a tokenizer. `finish_reason` is None until the text is finished.
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
    """One lane. Its records are dataclasses as plain data.

    Attributes:
        metrics: Metrics (lanes/metrics.py).
        rounds: Round (sequence.py).
        reading: Reading (sequence.py), or None unless prompts are being read.
        cache: CacheBytes (decode/base.py), or None if the decoder doesn't report it, or if a simulated clock
            predicts the times of other models than the pair that runs.
        timeline: present only if draft and target overlap, see decode/amusd/timeline.py.
    """

    timeline: dict[str, Any]


class Weighed(TypedDict):
    """Probabilities of the two tokens at which two texts diverge, and their `tie`: 1 is an exact tie."""

    p_ours: float | None
    p_theirs: float | None
    tie: float | None


class Difference(Weighed):
    """The first difference of a row's text from the reference lane's: the token's index and both token ids."""

    at: int
    ours: int
    theirs: int


class ClockRecord(TypedDict):
    """The hardware and models that the lanes' times are predicted for (SimulatedClock).

    If the times come from a measured table, `assumptions` is empty, and gpus, target and draft are None.

    Attributes:
        assumptions: the shares of bandwidth, compute and link that a step reaches, and microseconds per layer and
            per reduction (Assumptions).
    """

    kind: Literal["predicted"]
    hardware: str
    gpus: int | None
    target: str | None
    draft: str | None
    assumptions: dict[str, float]
    source: str


class _Snapshot(TypedDict):
    phase: Literal["measuring", "running", "error"]
    done: bool
    scheduling: str
    elapsed_ms: float
    lanes: dict[str, LaneSnapshot]
    device: DeviceReading


class Snapshot(_Snapshot, total=False):
    """All lanes at one instant. `lanes` is empty while `phase` is "measuring".

    Attributes:
        clock: present only with a simulated clock. All times of the lanes, and all figures computed from them, are
            then predictions.
        comparison: present only in the last snapshot, and only if two lanes must give the same text. A lane's list
            has one entry per row, None if the row equals the reference lane's.
        measuring: present only while `phase` is "measuring" and costs are being measured: Progress
            (decode/measuring.py) as plain data.
        error: present only in the last snapshot of the page's `/race`, and only if the race was refused or failed:
            one sentence. `phase` is then "error", and `lanes` has the texts so far.
    """

    clock: ClockRecord
    comparison: dict[str, list[Difference | None]]
    measuring: Record
    error: str
