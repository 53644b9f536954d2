"""Plays the page's JSON export: snapshots made again from its tokens and rounds.

Contract: `snapshots_of` yields a race's snapshots every STEP_MS of lane time, or more, so that there are at most
MOST: at each, every lane shows what it had written by that time on its own clock. The last one has the export's
own figures. Those before it have what follows from tokens and rounds alone (`_figures`); what an export does not
hold (the device and the caches over time, how far a prompt was read, AMUSD's timeline before the end) is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ui.race.looks import reference

ABOUT = "a race exported as JSON, played at the pace of its lanes' clocks"
STEP_MS, MOST = 100.0, 300


def snapshots_of(document: dict[str, Any]) -> Iterator[Any]:
    """The snapshots, each with the settings; raises LookupError, TypeError or ValueError for another document."""
    lanes = {name: _Lane(lane) for name, lane in document["lanes"].items()}
    device, settings = document["device"] or {}, document["settings"]
    end = max(lane.clock for lane in lanes.values())
    step = max(STEP_MS, end / MOST)
    count = max(1, round(end / step))
    for i in range(1, count + 1):
        done = i == count
        at = end if done else i * step
        shot = {
            "phase": "running", "done": done, "scheduling": settings.get("scheduling"), "elapsed_ms": at,
            "settings": settings, "device": device,
            "lanes": {name: lane.until(at, done) for name, lane in lanes.items()},
        }  # fmt: skip
        for name, lane in shot["lanes"].items():
            lane["metrics"] = lanes[name].last["metrics"] if done else _figures(shot["lanes"], name)
        if done and document.get("comparison"):
            shot["comparison"] = document["comparison"]
        yield shot


class _Lane:
    """One exported lane, whose lists of tokens and rounds grow with the time that is asked for."""

    def __init__(self, lane: dict[str, Any]) -> None:
        self.last, self.clock = lane, float(lane["clock_ms"])
        self.sequences: list[dict[str, Any]] = [
            {"text": "", "pieces": [], "token_ids": [], "origins": [], "times_ms": [], "finish_reason": None}
            for _ in lane["sequences"]
        ]
        steps: dict[tuple[int, float], list[dict[str, Any]]] = {}
        for index, sequence in enumerate(lane["sequences"]):
            for step in sequence["rounds"]:
                steps.setdefault((step["round"], step["ms"]), []).append(_row(index, step))
        self.records = [_record(one, steps.get((one["round"], one["ms"]), [])) for one in lane["rounds"]]
        self.rounds: list[dict[str, Any]] = []
        self.written = [0] * len(self.sequences)

    def until(self, at: float, done: bool) -> dict[str, Any]:
        """The lane at this time of its clock, without its figures."""
        finished = bool(self.last["finished"]) and (done or at >= self.clock)
        while len(self.rounds) < len(self.records) and (done or self.records[len(self.rounds)]["time_ms"] <= at):
            self.rounds.append(self.records[len(self.rounds)])
            for row in self.rounds[-1]["rows"]:
                self.written[row["sequence"]] = row["start"] + row["written"]
        for own, whole, count in zip(self.sequences, self.last["sequences"], self.written, strict=True):
            self._write(own, whole, len(whole["pieces"]) if done else count)
        return {
            "sequences": self.sequences, "rounds": self.rounds,
            "clock_ms": min(at, self.clock), "finished": finished, "error": self.last["error"] if done else None,
            **({"timeline": self.last["timeline"]} if done and "timeline" in self.last else {}),
        }  # fmt: skip

    @staticmethod
    def _write(own: dict[str, Any], whole: dict[str, Any], end: int) -> None:
        """Add the tokens up to the `end`-th, and why the text ended if these are all."""
        count, start = len(whole["pieces"]), len(own["pieces"])
        for key in ("pieces", "token_ids", "origins", "times_ms"):
            own[key].extend(whole[key][start:end])
        own["text"] += "".join(whole["pieces"][start:end])
        own["finish_reason"] = whole["finish_reason"] if end == count else None


def _record(one: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "round": one["round"], "kind": one["kind"], "draft_length": one["length"],
        "lengths": one.get("lengths"), "time_ms": one["ms"], "draft_ms": one.get("draft_ms"),
        "verify_ms": one.get("verify_ms"), "rows": rows,
    }  # fmt: skip


def _row(index: int, step: dict[str, Any]) -> dict[str, Any]:
    drafts = step["drafts"]
    columns = {key: [draft.get(key) for draft in drafts] for key in ("p", "q", "u", "chance")}
    return {
        "sequence": index, "start": step["start"], "written": step["written"], "accepted": step["accepted"],
        "one_by_one": step["alone"], "next_p": step["nextP"], "drafted_text": [draft["text"] for draft in drafts],
        "parents": step.get("parents"), "path": step.get("path"),
        "detail": _detail(step["detail"]) if step.get("detail") else None, **columns,
    }  # fmt: skip


def _detail(detail: dict[str, Any]) -> dict[str, Any]:
    ending = detail["ending"]
    if ending is not None:
        ending = {**ending, "top": [{**one, "token": one["id"]} for one in ending["top"]]}
    return {
        "rule": detail["rule"], "sources": detail["sources"], "own_p": detail["ownP"], "own_q": detail["ownQ"],
        "ending": ending,
    }  # fmt: skip


def _figures(lanes: dict[str, Any], name: str) -> dict[str, Any]:
    """The figures of a lane so far; for their formulas see Metrics (bass_core/lanes/metrics.py)."""
    lane, other = lanes[name], lanes.get(reference())
    ms, behind = _ms_per_token(lane), other and _ms_per_token(other)
    rows = [row for record in lane["rounds"] for row in record["rows"]]
    drafted, accepted = sum(len(row["p"]) for row in rows), sum(row["accepted"] for row in rows)
    tokens = sum(len(sequence["pieces"]) for sequence in lane["sequences"])
    return {
        "ms_per_token": ms, "speedup": behind / ms if ms and behind else None,
        "throughput_tps": 1000 * tokens / lane["clock_ms"] if tokens and lane["clock_ms"] else None,
        "acceptance_rate": accepted / drafted if drafted else None, "drafted": drafted, "accepted": accepted,
        "new_tokens": tokens, "rounds": sum(record["kind"] != "prefill" for record in lane["rounds"]),
    }  # fmt: skip


def _ms_per_token(lane: dict[str, Any]) -> float | None:
    reading, before = 0.0, 0.0
    for record in lane["rounds"]:
        if record["kind"] == "prefill":
            reading += record["time_ms"] - before
        before = record["time_ms"]
    sizes = [len(sequence["pieces"]) for sequence in lane["sequences"]]
    decoded = sum(sizes) - sum(map(bool, sizes))
    spent: float = len(sizes) * (lane["clock_ms"] - reading)
    return spent / decoded if decoded else None
