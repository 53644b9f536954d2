"""The page's numbers computed again, only from the JSON that the page downloads.

Each formula follows its definition in docs/formulas.md. It uses no code of the project, and none of the metrics in
the JSON. A figure that does not apply is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot, inf, sqrt
from typing import Any

TWO_ERRORS = 2
# Two rounded times of the same moment differ by at most this many ms.
ROUNDED_MS = 2e-3
NATURAL = ("eos", "stop", "length")


@dataclass
class Lane:
    """One lane of a run.

    Attributes:
        rounds: verifications and plain steps, each with `begin` and `spent` in ms.
        prefills: prefills, with the same fields.
        steps: one entry per row and round, without prefills.
        drafting: the steps with drafts.
        decode_ms: lane time without prefills.
        ends: (ms of the last token, sequence), in order of finishing.
    """

    data: dict[str, Any]
    name: str

    def __post_init__(self) -> None:
        self.sequences: list[dict[str, Any]] = self.data["sequences"]
        times = [0.0, *(record["time_ms"] for record in self.data["rounds"])]
        records = [
            record | {"begin": before, "spent": record["time_ms"] - before}
            for record, before in zip(self.data["rounds"], times, strict=False)
        ]
        self.prefills = [record for record in records if record["kind"] == "prefill"]
        self.rounds = [record for record in records if record["kind"] != "prefill"]
        self.steps = [step for record in self.sequences for step in record["steps"] if step["kind"] != "prefill"]
        self.drafting = [step for step in self.steps if step["drafts"]]
        self.decode_ms = sum(record["spent"] for record in self.rounds)
        self.ends = sorted(((record["times_ms"][-1], record) for record in self.sequences), key=lambda end: end[0])


def sharing(lane: Lane) -> list[int]:
    """For each token but the first of a row: how many rows have a token at the same place, or were cut off."""
    rows = [(len(sequence["token_ids"]), sequence["finish_reason"] in NATURAL) for sequence in lane.sequences]
    return [
        sum(n >= place or not ended for n, ended in rows) for length, _ in rows for place in range(2, length + 1)
    ]


def ms_per_token(lane: Lane) -> float:
    """Lane time without prefills / plain steps."""
    return lane.decode_ms / sum(1 / m for m in sharing(lane))


def step_ms(regular: Lane, m: int) -> float:
    """Regular's mean time of a step with m rows, interpolated between measured numbers of rows."""
    times: dict[int, list[float]] = {}
    for record in regular.rounds:
        times.setdefault(len(record["rows"]), []).append(record["spent"])
    below = max((count for count in times if count <= m), default=min(times))
    above = min((count for count in times if count >= m), default=max(times))
    low, high = (sum(times[count]) / len(times[count]) for count in (below, above))
    return low + (high - low) * (m - below) / (above - below) if above > below else low


def speedup(lane: Lane, regular: Lane) -> float:
    """The time that Regular would need for this lane's texts / the lane's time."""
    return sum(step_ms(regular, m) / m for m in sharing(lane)) / lane.decode_ms


def throughput(lane: Lane) -> float:
    """New tokens / seconds of lane time until the last sequence finished."""
    return 1000 * new_tokens(lane) / lane.ends[-1][0]


def new_tokens(lane: Lane) -> int:
    """New tokens of all sequences."""
    return sum(len(one["token_ids"]) for one in lane.sequences)


def first_token(lane: Lane) -> float:
    """The lane's clock at the end of its first prefill, ms."""
    return min(one["times_ms"][0] for one in lane.sequences)


def _latencies(lane: Lane) -> list[float]:
    """(time of the last token - end of the first prefill) / (new tokens - 1), in order of finishing."""
    return [(end - first_token(lane)) / (len(one["token_ids"]) - 1) for end, one in lane.ends]


def _of_one(lane: Lane, place: int) -> float | str:
    """Per-token latency of one sequence, ms, or "ended together" if all ended at the same time."""
    together = len({end for end, _ in lane.ends}) == 1
    return "ended together" if together else _latencies(lane)[place]


def ptl_first(lane: Lane) -> float | str:
    return _of_one(lane, 0)


def ptl_last(lane: Lane) -> float | str:
    return _of_one(lane, -1)


def ptl_all(lane: Lane) -> float:
    """Mean per-token latency, ms."""
    return sum(_latencies(lane)) / len(lane.sequences)


def drafted(lane: Lane) -> int:
    return sum(len(step["drafts"]) for step in lane.steps)


def accepted(lane: Lane) -> int:
    return sum(one["origins"].count("accepted") for one in lane.sequences)


def acceptance(lane: Lane) -> float | None:
    """Accepted / drafted, percent."""
    return 100 * accepted(lane) / drafted(lane) if drafted(lane) else None


def token_acceptance(lane: Lane) -> float | None:
    """Accepted / tested, percent. The tested drafts are the accepted ones and the first one after them."""
    tested = sum(min(len(step["drafts"]), step["accepted"] + 1) for step in lane.drafting)
    return 100 * accepted(lane) / tested if tested else None


def by_rejection(lane: Lane) -> float | None:
    """Mean of min(1, p/q) over the tested drafts, percent."""
    tested = [draft for step in lane.drafting for draft in step["drafts"][: step["accepted"] + 1]]
    chances = [min(1.0, one["p"] / one["q"]) for one in tested if one["p"] is not None and one["q"]]
    return 100 * sum(chances) / len(chances) if chances else None


def mean_acceptance(lane: Lane) -> float | None:
    """1 + accepted / steps with drafts."""
    return 1 + accepted(lane) / len(lane.drafting) if lane.drafting else None


def rounds(lane: Lane) -> int:
    """Verifications and plain steps."""
    return len(lane.rounds)


def forwards(lane: Lane) -> int:
    """Prefills and rounds."""
    return len(lane.data["rounds"])


def lane_seconds(lane: Lane) -> float:
    """The lane's clock at its end."""
    return float(lane.data["rounds"][-1]["time_ms"]) / 1000


def unfinished(lane: Lane) -> list[int]:
    """For each round, the number of rows that had not ended when it began."""
    ends = [one["times_ms"][-1] if one["finish_reason"] in NATURAL else inf for one in lane.sequences]
    return [sum(end > one["begin"] + ROUNDED_MS for end in ends) for one in lane.rounds]


def cost(lane: Lane, regular: Lane) -> float:
    """The lane's decoding time / the time of one regular step per round, with as many rows as that round had."""
    return lane.decode_ms / sum(step_ms(regular, m) for m in unfinished(lane))


def scatter(lane: Lane, regular: Lane) -> float:
    """The relative standard error of a lane's speed, from its rounds (Cochran, section 6.4)."""
    pairs = [
        (sum(row["written"] for row in record["rows"]) * step_ms(regular, m) / m, record["spent"])
        for record, m in zip(lane.rounds, unfinished(lane), strict=True)
    ]
    worth, count = sum(t for t, _ in pairs), len(pairs)
    rate = worth / sum(ms for _, ms in pairs)
    return sqrt(count / (count - 1) * sum((t - rate * s) ** 2 for t, s in pairs)) / worth if count > 1 else inf


def level(faster: Lane, slower: Lane, regular: Lane) -> bool:
    """Whether two lanes' speeds differ by less than two standard errors of their ratio."""
    ratio = speedup(faster, regular) / speedup(slower, regular)
    return ratio - 1 <= TWO_ERRORS * hypot(scatter(faster, regular), scatter(slower, regular)) * ratio


def mean_step(lane: Lane) -> tuple[float, float]:
    """(tokens, ms) of a lane's mean step: all its rounds without prefills."""
    tokens = sum(row["written"] for record in lane.rounds for row in record["rows"])
    return tokens / len(lane.rounds), sum(r["time_ms"] - r["begin"] for r in lane.rounds) / len(lane.rounds)


def running_chance(step: dict[str, Any], count: int) -> float:
    """w of block verification after `count` drafts: each draft changes w, at first 1, to min(1, w p/q).

    See Sun et al., section 4.
    """
    w = 1.0
    for draft in step["drafts"][:count]:
        w = min(1.0, w * draft["p"] / draft["q"])
    return w
