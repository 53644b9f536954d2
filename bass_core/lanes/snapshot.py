"""The types of what `race` yields: the plain data that the page, the API, recordings and benches read.

Contract: every value is JSON-ready. A key is always present unless its class says otherwise; a number that does
not apply or is not known yet is None. Times are milliseconds of the lane's own clock (lanes/clock.py), except
`elapsed_ms`, which is wall time. Non-goals: computing the values (lanes/metrics.py, lanes/trace.py).
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict


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


class CandidateRecord(TypedDict):
    """`Candidate` (sequence.py) as plain data; `text` is None without a tokenizer."""

    token: int
    text: str | None
    p: float
    q: float | None
    residual: float | None


class EndingRecord(TypedDict):
    """`Ending` (sequence.py) as plain data."""

    after: int
    draft: int | None
    mass: float | None
    reach: float
    top: list[CandidateRecord]


class DetailRecord(TypedDict):
    """`RowDetail` (sequence.py) as plain data."""

    rule: str
    sources: list[str]
    own_p: list[float | None] | None
    own_q: list[float | None] | None
    ending: EndingRecord | None


class RowRecord(TypedDict):
    """What one round did to one sequence: it appended `written` tokens, from index `start` of its new tokens on.

    `drafted`: the drafted tokens; `p`, `q`, `u`, `chance`: their tests; `accepted`: how many were accepted;
    `one_by_one`: how many the rejection rule would have accepted with the same u; `parents`, `path`: of a tree of
    drafts, None for a chain; see RowRound. `drafted_text` is None without a tokenizer;
    `detail` without `inspect`, and of a row without drafts.
    """

    sequence: int
    start: int
    drafted: list[int]
    drafted_text: list[str] | None
    p: list[float | None]
    q: list[float | None]
    u: list[float | None]
    chance: list[float | None]
    accepted: int
    one_by_one: int
    written: int
    next_p: float | None
    parents: list[int] | None
    path: list[int] | None
    detail: DetailRecord | None


class RoundRecord(TypedDict):
    """One round of a lane. `round` counts verifications and plain steps from 1; 0 is a prefill.

    `time_ms`: the lane's clock at its end; it began where the round before it ended. `draft_ms`, `verify_ms`: see
    `Spent` (sequence.py); None if not known. `lengths`: what the policy gave each row, in the order of `rows`, and
    `draft_length` the longest; see Round.
    """

    round: int
    kind: str
    draft_length: int
    lengths: list[int]
    time_ms: float
    draft_ms: float | None
    verify_ms: float | None
    rows: list[RowRecord]


class MetricsRecord(TypedDict):
    """`Metrics` (lanes/metrics.py) as plain data, field by field."""

    ms_per_token: float | None
    speedup: float | None
    throughput_tps: float | None
    acceptance_rate: float | None
    token_acceptance: float | None
    mean_acceptance_length: float | None
    per_position_acceptance: list[float] | None
    ptl_first_ms: float | None
    ptl_last_ms: float | None
    ptl_all_ms: float | None
    ttft_ms: float | None
    rounds: int
    target_forwards: int
    draft_length: int | None
    new_tokens: int
    drafted: int
    accepted: int
    flops_utilization: float | None
    useful_flops_utilization: float | None
    bandwidth_utilization: float | None


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


class ReadingRecord(TypedDict):
    """`Reading` (sequence.py) as plain data: `fed` of `total` tokens of these sequences' prompts are read."""

    fed: int
    total: int
    sequences: list[int]


class CacheRecord(TypedDict):
    """`CacheBytes` (decode/base.py) as plain data: bytes of keys and values."""

    shared: int
    own: int
    draft: int
    copies: int


class _Lane(TypedDict):
    sequences: list[SequenceSnapshot]
    metrics: MetricsRecord
    rounds: list[RoundRecord]
    clock_ms: float
    finished: bool
    error: str | None
    reading: ReadingRecord | None
    cache: CacheRecord | None


class LaneSnapshot(_Lane, total=False):
    """One lane. `reading`: None unless prompts are being read; `cache`: None if the decoder does not tell, or on a
    simulated clock with other models.

    `timeline`: present only if draft and target overlap; see decode/overlapped/timeline.py.
    """

    timeline: dict[str, Any]


class MeasuringRecord(TypedDict):
    """`Progress` (decode/measuring.py) as plain data: the share that is done, and the estimated rest."""

    done: float
    left_ms: float | None


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
    `measuring`: present only while `phase` is "measuring", and only once costs are being measured.
    """

    clock: ClockRecord
    comparison: dict[str, list[Difference | None]]
    measuring: MeasuringRecord
