"""Counts of one passk run: which sequences finished within a budget, and which of them pass.

Contract: needs only records, {"task_id", "lanes": {"METHOD N": [sequence, ...]}}. A sequence is {"text",
"token_ids", "ended_ms", "logprob", "passed"}: `ended_ms` is the lane time of the token that ended it, None if it
did not end; `logprob` and `passed` are None until it is judged. A budget only cuts a lane off, so one run under
the longest budget contains those under all shorter ones.
"""

from __future__ import annotations

from typing import Any

SPECULATIVE = "speculative"
Record = dict[str, Any]
Sample = dict[str, Any]


def samples(record: Record, method: str, n: int) -> list[Sample]:
    """The lane's sequences. Single-sequence speculation ran once: its first n sequences are the lane of n."""
    lanes: dict[str, list[Sample]] = record["lanes"]
    if method != SPECULATIVE:
        return lanes[f"{method} {n}"]
    longest = max((lane for name, lane in lanes.items() if name.startswith(method)), key=len)
    return longest[:n]


def finished(record: Record, method: str, n: int, budget_ms: float) -> list[Sample]:
    """The sequences whose ending token came within the budget."""
    lane = samples(record, method, n)
    return [one for one in lane if one["ended_ms"] is not None and one["ended_ms"] <= budget_ms]


def row(records: list[Record], method: str, n: int, budget_ms: float, judged: bool) -> dict[str, Any]:
    """One line of the table. Pass@First and Pass@All are shares of all problems (one without a finished sequence
    does not pass), `finished share` is of all n sequences per problem, Pass@Finished of the finished sequences.
    Only shares of problems have Wilson intervals, as sequences of one problem are not independent.
    """
    each = [finished(record, method, n, budget_ms) for record in records]
    done = [one for found in each for one in found]
    line: dict[str, Any] = {
        "budget ms": round(budget_ms), "n": n, "method": method, "problems": len(records), "finished": len(done),
        "finished share": len(done) / (n * len(records)), "problems with one": sum(bool(found) for found in each),
    }  # fmt: skip
    line |= dict.fromkeys(("Pass@First", "95 % first", "Pass@All", "95 % all", "Pass@Finished"))
    if judged:
        first = sum(bool(found) and max(found, key=lambda one: one["logprob"])["passed"] for found in each)
        some = sum(any(one["passed"] for one in found) for found in each)
        line |= {
            "Pass@First": first / len(records),
            "95 % first": wilson(first, len(records)),
            "Pass@All": some / len(records),
            "95 % all": wilson(some, len(records)),
            "Pass@Finished": sum(one["passed"] for one in done) / len(done) if done else None,
        }
    return line


def wilson(passed: int, count: int) -> list[float]:
    """The 95 % interval of a share (Wilson 1927)."""
    from scipy.stats import binomtest

    interval = binomtest(passed, count).proportion_ci(method="wilson")
    return [round(float(interval.low), 4), round(float(interval.high), 4)]


def differing(records: list[Record], batches: list[int]) -> tuple[int, int]:
    """Of regular decoding's sequences in larger batches: how many differ from the same sequence in the smallest
    batch that has it, compared over the shorter length; and how many were compared.
    """
    compared = wrong = 0
    for record in records:
        for n in batches[1:]:
            for index, one in enumerate(samples(record, "regular", n)):
                other = next(samples(record, "regular", m)[index] for m in batches if m > index)
                if other is one:
                    continue
                both = min(len(one["token_ids"]), len(other["token_ids"]))
                compared += 1
                wrong += one["token_ids"][:both] != other["token_ids"][:both]
    return wrong, compared
