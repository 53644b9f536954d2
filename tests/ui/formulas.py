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


def ms_per_token(lane: Lane) -> float:
    """n x lane time without prefills / (new tokens - sequences that have begun)."""
    n = len(lane.sequences)
    return n * lane.decode_ms / (new_tokens(lane) - n)


def speedup(lane: Lane, regular: Lane) -> float:
    """Regular's ms per token / the lane's."""
    return ms_per_token(regular) / ms_per_token(lane)


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


def tokens_a_row_round(lane: Lane) -> float:
    """Tokens that rounds wrote / row-rounds."""
    return sum(step["written"] for step in lane.steps) / len(lane.steps)


def cost(lane: Lane, regular: Lane) -> float:
    """(Decoding time / row-rounds), over regular decoding's."""
    return (lane.decode_ms / len(lane.steps)) / (regular.decode_ms / len(regular.steps))


def scatter(lane: Lane) -> float:
    """The relative standard error of tokens a ms, a ratio of sums (Cochran, section 6.4)."""
    each = [(sum(row["written"] for row in one["rows"]), one["spent"]) for one in lane.rounds]
    tokens, count = sum(written for written, _ in each), len(each)
    rate = tokens / sum(ms for _, ms in each)
    return sqrt(count / (count - 1) * sum((t - rate * s) ** 2 for t, s in each)) / tokens if count > 1 else inf


def level(faster: Lane, slower: Lane) -> bool:
    """Whether two lanes' times per token differ by less than two standard errors of their ratio."""
    ratio = ms_per_token(slower) / ms_per_token(faster)
    return ratio - 1 <= TWO_ERRORS * hypot(scatter(faster), scatter(slower)) * ratio


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
