"""Scores of one passk run: how many sequences finished within a budget, and how many of them pass. Call `row`.

A record is {"task_id", "lanes": {"METHOD N": [sequence, ...]}}. A sequence is {"text", "token_ids", "ended_ms",
"logprob", "passed"}: `ended_ms` is the lane time of the token that ended it, or None if it did not end; `logprob`
and `passed` are None until it is judged. A budget only stops a lane early, so one run with the longest budget also
contains the runs with all shorter budgets.
"""

from __future__ import annotations

from typing import Any

SPECULATIVE = "speculative"
Record = dict[str, Any]
Sample = dict[str, Any]


def samples(record: Record, method: str, n: int) -> list[Sample]:
    """Return the lane's sequences; of single-sequence speculation, which ran only once, the first n."""
    lanes: dict[str, list[Sample]] = record["lanes"]
    if method != SPECULATIVE:
        return lanes[f"{method} {n}"]
    longest = max((lane for name, lane in lanes.items() if name.startswith(method)), key=len)
    return longest[:n]


def finished(record: Record, method: str, n: int, budget_ms: float) -> list[Sample]:
    """Return the sequences whose last token came within the budget."""
    lane = samples(record, method, n)
    return [sample for sample in lane if sample["ended_ms"] is not None and sample["ended_ms"] <= budget_ms]


def row(records: list[Record], method: str, n: int, budget_ms: float, judged: bool) -> dict[str, Any]:
    """Return one line of the table.

    Pass@First and Pass@All are shares of all problems; a problem without a finished sequence does not pass.
    `finished share` is a share of all n sequences per problem, and Pass@Finished a share of the finished
    sequences. Only shares of problems have Wilson intervals, because sequences of one problem are not independent.

    Args:
        method: the lanes' method.
        n: sequences per problem.
        budget_ms: the budget.
        judged: whether the sequences were judged; otherwise the pass figures are None.
    """
    each = [finished(record, method, n, budget_ms) for record in records]
    done = [sample for group in each for sample in group]
    line: dict[str, Any] = {
        "budget ms": round(budget_ms), "n": n, "method": method, "problems": len(records), "finished": len(done),
        "finished share": len(done) / (n * len(records)), "problems with one": sum(bool(group) for group in each),
    }  # fmt: skip
    line |= dict.fromkeys(("Pass@First", "95 % first", "Pass@All", "95 % all", "Pass@Finished"))
    if judged:
        first = sum(bool(group) and max(group, key=lambda sample: sample["logprob"])["passed"] for group in each)
        some = sum(any(sample["passed"] for sample in group) for group in each)
        line |= {
            "Pass@First": first / len(records),
            "95 % first": wilson(first, len(records)),
            "Pass@All": some / len(records),
            "95 % all": wilson(some, len(records)),
            "Pass@Finished": sum(sample["passed"] for sample in done) / len(done) if done else None,
        }
    return line


def wilson(passed: int, count: int) -> list[float]:
    """Return the 95 % interval of a share (Wilson 1927)."""
    from scipy.stats import binomtest

    interval = binomtest(passed, count).proportion_ci(method="wilson")
    return [round(float(interval.low), 4), round(float(interval.high), 4)]


def differing(records: list[Record], batches: list[int]) -> tuple[int, int]:
    """Compare each sequence of regular decoding with the same sequence in the smallest batch that contains it.

    Sequences of different lengths are compared up to the end of the shorter one.

    Returns:
        How many sequences differ, and how many were compared.
    """
    compared = wrong = 0
    for record in records:
        for n in batches[1:]:
            for index, sample in enumerate(samples(record, "regular", n)):
                other = next(samples(record, "regular", m)[index] for m in batches if m > index)
                if other is sample:
                    continue
                length = min(len(sample["token_ids"]), len(other["token_ids"]))
                compared += 1
                wrong += sample["token_ids"][:length] != other["token_ids"][:length]
    return wrong, compared
