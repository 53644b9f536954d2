"""The counts of a running lane (`Counts`), and the metrics computed from them (`Metrics`).

Counts come only from the rounds, and times only from the lane's own clock, in milliseconds. A metric that does not
apply or is not known yet is None, never 0. Names follow vLLM's if vLLM has the metric.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..sequence import Round, Sequence


@dataclass(frozen=True)
class Metrics:
    """The metrics of a lane of n rows, so far or at its end.

    `race` fills in speedup, round_cost and scatter (lanes/pace.py), the first two only if it has a reference lane.
    All three are None if the lane has run too few rounds.

    Attributes:
        ms_per_token: lane time without prefills / plain_steps. None before any row's second token.
        plain_steps: the number of plain steps that would write the lane's texts (lanes/pace.py).
        speedup: the reference lane's time for this lane's texts / this lane's time.
        round_cost: mean time of a round, as a multiple of the reference lane's time of a plain step.
        scatter: relative standard error of the speed.
        throughput_tps: new tokens per second of lane time until the last row finished, with prefills.
        acceptance_rate: accepted / drafted. In a tree, the drafts on the accepted path count as accepted.
        token_acceptance: accepted / tested. Tested drafts are those up to and including the first rejected one.
            For a tree, count depths instead of drafts: a depth is tested if it has a child of an accepted draft.
        mean_acceptance_length: 1 + accepted / row-rounds that drafted.
        per_position_acceptance: entry i is (accepted at position i) / (row-rounds that drafted position i). For a
            tree, a row-round drafted position i if depth i was tested.
        ptl_first_ms: per-token latency (`latency`) of the first sequence to finish.
        ptl_last_ms: the same for the last sequence to finish.
        ptl_all_ms: the mean over all sequences.
        ttft_ms: lane time of the lane's first token.
        rounds: verifications and plain steps.
        target_forwards: prefills + rounds.
        draft_length: the last length that the policy asked for.
        flops_utilization: see lanes/utilization.py, also for the next two.
        useful_flops_utilization: the same for emitted tokens only.
        bandwidth_utilization: bytes read, relative to the peak bandwidth.
    """

    ms_per_token: float | None = None
    plain_steps: float | None = None
    speedup: float | None = None
    round_cost: float | None = None
    scatter: float | None = None
    throughput_tps: float | None = None
    acceptance_rate: float | None = None
    token_acceptance: float | None = None
    mean_acceptance_length: float | None = None
    per_position_acceptance: list[float] | None = None
    ptl_first_ms: float | None = None
    ptl_last_ms: float | None = None
    ptl_all_ms: float | None = None
    ttft_ms: float | None = None
    rounds: int = 0
    target_forwards: int = 0
    draft_length: int | None = None
    new_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    flops_utilization: float | None = None
    useful_flops_utilization: float | None = None
    bandwidth_utilization: float | None = None


@dataclass
class Counts:
    """Running sums over the rounds of one lane.

    Attributes:
        prefill_ms: lane time spent in all prefills (one per sequence if they are decoded one after another).
        first_prefill_ms: lane time at which the first prefill ended.
        tested: tested draft tokens, see Metrics.token_acceptance.
        drafting_rows: row-rounds that drafted.
        drafted_at: entry i is the number of row-rounds that drafted position i.
        accepted_at: entry i is the number of row-rounds in which the draft at position i was accepted.
        draft_length: the last length that the policy asked for.
    """

    prefill_ms: float = 0.0
    first_prefill_ms: float | None = None
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    tested: int = 0
    drafting_rows: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    draft_length: int | None = None

    def add(self, round_: Round, spent_ms: float) -> None:
        """Count one round, which took `spent_ms` of lane time. For a prefill, only the time counts."""
        if round_.kind == "prefill":
            self.prefill_ms += spent_ms
            if round_.rows and self.first_prefill_ms is None:
                self.first_prefill_ms = round_.time_ms
            return
        self.rounds += 1
        self.draft_length = round_.draft_length
        for row in round_.rows:
            length = len(row.drafted)
            if not length:
                continue
            self.drafting_rows += 1
            self.drafted += length
            self.accepted += row.accepted
            tested = row.accepted + (length > row.accepted) if row.parents is None else len(row.tested)
            self.tested += tested
            reached = length if row.parents is None else tested
            self.drafted_at += [0] * (reached - len(self.drafted_at))
            self.accepted_at += [0] * (reached - len(self.accepted_at))
            for position in range(reached):
                self.drafted_at[position] += 1
                self.accepted_at[position] += position < row.accepted


def latency(sequence: Sequence, since_ms: float | None) -> float | None:
    """Return (time of the last token - since_ms) / (new tokens - 1) in ms.

    None if the sequence is unfinished or has fewer than two tokens.
    """
    if since_ms is None or sequence.finish_reason is None or len(sequence.token_ids) < 2:
        return None
    return (sequence.times_ms[-1] - since_ms) / (len(sequence.token_ids) - 1)


def summarise(counts: Counts, sequences: list[Sequence], clock_ms: float, target_forwards: int) -> Metrics:
    """Return a lane's metrics at lane time `clock_ms`, except those of its pace and its utilisation."""
    tokens = sum(len(sequence.token_ids) for sequence in sequences)
    since = counts.first_prefill_ms
    ended = [(s.times_ms[-1], latency(s, since)) for s in sequences if s.finish_reason and s.times_ms]
    timed = [latency_ms for _, latency_ms in sorted(ended, key=lambda e: e[0]) if latency_ms is not None]
    running = any(s.finish_reason is None for s in sequences)
    end_ms = clock_ms if running or not ended else max(at for at, _ in ended)
    drafts = counts.drafted > 0
    return Metrics(
        throughput_tps=1000 * tokens / end_ms if tokens and end_ms > 0 else None,
        acceptance_rate=counts.accepted / counts.drafted if drafts else None,
        token_acceptance=counts.accepted / counts.tested if drafts else None,
        mean_acceptance_length=1 + counts.accepted / counts.drafting_rows if drafts else None,
        per_position_acceptance=(
            [a / d for a, d in zip(counts.accepted_at, counts.drafted_at, strict=True)] if drafts else None
        ),
        ptl_first_ms=timed[0] if timed else None,
        ptl_last_ms=timed[-1] if timed and not running else None,
        ptl_all_ms=sum(timed) / len(timed) if timed and not running else None,
        ttft_ms=since,
        rounds=counts.rounds,
        target_forwards=target_forwards,
        draft_length=counts.draft_length,
        new_tokens=tokens,
        drafted=counts.drafted,
        accepted=counts.accepted,
    )
