"""The page's numbers once more, from an exported run alone.

Contract: plain Python over the JSON that the page downloads. Each formula is written from its definition
(docs/formulas.md) and calls nothing of the project; the metrics that the JSON also holds are not looked at. A
figure that does not apply is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot, inf, sqrt
from typing import Any

TWO_ERRORS = 2
# How far rounding puts the times of one moment apart.
ROUNDED_MS = 2e-3
NATURAL = ("eos", "stop", "length")


@dataclass
class Lane:
    """One lane of a run.

    rounds: verifications and plain steps, each with the ms that it began and took; prefills: those too. steps:
    row-rounds. drafting: those with drafts. decode_ms: lane time without prefills. ends: (ms of the last token,
    sequence), the first to finish first.
    """

    data: dict[str, Any]
    name: str

    def __post_init__(self) -> None:
        self.sequences: list[dict[str, Any]] = self.data["sequences"]
        times = [0.0, *(one["time_ms"] for one in self.data["rounds"])]
        every = [
            one | {"begin": before, "spent": one["time_ms"] - before}
            for one, before in zip(self.data["rounds"], times, strict=False)
        ]
        self.prefills = [one for one in every if one["kind"] == "prefill"]
        self.rounds = [one for one in every if one["kind"] != "prefill"]
        self.steps = [step for one in self.sequences for step in one["steps"] if step["kind"] != "prefill"]
        self.drafting = [step for step in self.steps if step["drafts"]]
        self.decode_ms = sum(one["spent"] for one in self.rounds)
        self.ends = sorted(((one["times_ms"][-1], one) for one in self.sequences), key=lambda end: end[0])


def sharing(lane: Lane) -> list[int]:
    """For each token after its row's first: how many rows are at least as long at its place, or were cut."""
    rows = [(len(one["token_ids"]), one["finish_reason"] in NATURAL) for one in lane.sequences]
    return [
        sum(n >= place or not ended for n, ended in rows) for length, _ in rows for place in range(2, length + 1)
    ]


def ms_per_token(lane: Lane) -> float:
    """Lane time without prefills / plain steps."""
    return lane.decode_ms / sum(1 / m for m in sharing(lane))


def step_ms(regular: Lane, m: int) -> float:
    """Regular's mean time of a step with m rows, between and beyond the counts that it has seen."""
    taken: dict[int, list[float]] = {}
    for one in regular.rounds:
        taken.setdefault(len(one["rows"]), []).append(one["spent"])
    below = max((count for count in taken if count <= m), default=min(taken))
    above = min((count for count in taken if count >= m), default=max(taken))
    low, high = (sum(taken[count]) / len(taken[count]) for count in (below, above))
    return low + (high - low) * (m - below) / (above - below) if above > below else low


def speedup(lane: Lane, regular: Lane) -> float:
    """Regular's time for this lane's texts / the lane's time."""
    return sum(step_ms(regular, m) / m for m in sharing(lane)) / lane.decode_ms


def throughput(lane: Lane) -> float:
    """New tokens / seconds of lane time until the last sequence finished."""
    return 1000 * new_tokens(lane) / lane.ends[-1][0]


def new_tokens(lane: Lane) -> int:
    """Of all sequences."""
    return sum(len(one["token_ids"]) for one in lane.sequences)


def first_token(lane: Lane) -> float:
    """Lane time of the end of the lane's first prefill, ms."""
    return min(one["times_ms"][0] for one in lane.sequences)


def _latencies(lane: Lane) -> list[float]:
    """(finished - end of the lane's first prefill) / (new tokens - 1), the first to finish first."""
    return [(end - first_token(lane)) / (len(one["token_ids"]) - 1) for end, one in lane.ends]


def _of_one(lane: Lane, which: int) -> float | str:
    """Per-token latency of one that finished, ms; words where all sequences ended at the same time."""
    together = len({end for end, _ in lane.ends}) == 1
    return "ended together" if together else _latencies(lane)[which]


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
    """Accepted / tested, percent; tested: the accepted drafts and the first one behind them."""
    tested = sum(min(len(step["drafts"]), step["accepted"] + 1) for step in lane.drafting)
    return 100 * accepted(lane) / tested if tested else None


def by_rejection(lane: Lane) -> float | None:
    """Mean of min(1, p/q) over the tested drafts, percent."""
    tested = [draft for step in lane.drafting for draft in step["drafts"][: step["accepted"] + 1]]
    chances = [min(1.0, one["p"] / one["q"]) for one in tested if one["p"] is not None and one["q"]]
    return 100 * sum(chances) / len(chances) if chances else None


def mean_acceptance(lane: Lane) -> float | None:
    """1 + accepted / row-rounds that drafted."""
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
    """For each round, the rows that had not ended when it began."""
    ends = [one["times_ms"][-1] if one["finish_reason"] in NATURAL else inf for one in lane.sequences]
    return [sum(end > one["begin"] + ROUNDED_MS for end in ends) for one in lane.rounds]


def cost(lane: Lane, regular: Lane) -> float:
    """The lane's decoding time / that of regular decoding's steps with as many rows."""
    return lane.decode_ms / sum(step_ms(regular, m) for m in unfinished(lane))


def scatter(lane: Lane, regular: Lane) -> float:
    """The relative standard error of what rounds write a ms, in regular decoding's time (Cochran, section 6.4)."""
    each = [
        (sum(row["written"] for row in one["rows"]) * step_ms(regular, m) / m, one["spent"])
        for one, m in zip(lane.rounds, unfinished(lane), strict=True)
    ]
    worth, count = sum(t for t, _ in each), len(each)
    rate = worth / sum(ms for _, ms in each)
    return sqrt(count / (count - 1) * sum((t - rate * s) ** 2 for t, s in each)) / worth if count > 1 else inf


def level(faster: Lane, slower: Lane, regular: Lane) -> bool:
    """Whether two lanes' speeds differ by less than two standard errors of their ratio."""
    ratio = speedup(faster, regular) / speedup(slower, regular)
    return ratio - 1 <= TWO_ERRORS * hypot(scatter(faster, regular), scatter(slower, regular)) * ratio


def blocks(lane: Lane) -> list[tuple[int, str, float, float]]:
    """(round, kind, begin, end) of a timeline's blocks, ms: draft, then target, then the host's rest."""
    found = [(one["round"], "prefill", one["begin"], one["time_ms"]) for one in lane.prefills]
    for one in lane.rounds:
        drafted_at = one["begin"] + one["draft_ms"]
        verified_at = drafted_at + one["verify_ms"]
        found += [
            (one["round"], "draft", one["begin"], drafted_at),
            (one["round"], one["kind"], drafted_at, verified_at),
            (one["round"], "host", verified_at, one["time_ms"]),
        ]
    return [block for block in found if block[3] > block[2]]


def running_chance(step: dict[str, Any], count: int) -> float:
    """w of block verification behind `count` drafts: w = min(1, w p/q), from 1 on (Sun et al., section 4)."""
    w = 1.0
    for draft in step["drafts"][:count]:
        w = min(1.0, w * draft["p"] / draft["q"])
    return w
