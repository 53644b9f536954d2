"""The GPU bench's claims, computed from its rows. Every value is a plain ratio.

Contract: `holds` is None where a figure that the claim needs was not measured (its value is then 0.0). A dry run
and the quick form decide only the claims of equality (kernels against references, texts against generate).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..report.report import claim

Rows = list[dict[str, Any]]
_EQUALITIES = ("kernels-equal", "texts-equal-float32")


def claims(rows: Rows, open_: bool) -> list[dict[str, Any]]:
    """All claims; with `open_`, those about time are left undecided."""
    made = []
    for name, value, bar, holds in _values(rows):
        decided = None if value is None or (open_ and name not in _EQUALITIES) else holds(value)
        made.append(claim(name, 0.0 if value is None else value, bar, decided))
    return made


def _values(rows: Rows) -> list[tuple[str, float | None, str, Callable[[float], bool]]]:
    def get(section: str, case: str, what: str) -> float | None:
        found = [
            row["value"] for row in rows if (row["section"], row["case"], row["what"]) == (section, case, what)
        ]
        return found[-1] if found and isinstance(found[-1], int | float) else None

    def ratio(above: float | None, below: float | None) -> float | None:
        return above / below if above and below else None

    def every(section: str, prefix: str, what: str, middle: str = "") -> list[float]:
        return [
            row["value"]
            for row in rows
            if row["section"] == section and row["what"] == what and isinstance(row["value"], int | float)
            and row["case"].startswith(prefix) and middle in row["case"]
        ]  # fmt: skip

    regular = get("lanes", "b8 regular", "ms_per_token")
    bass = min(every("lanes", "b8 a0.8 bass", "ms_per_token"), default=None)
    flops = max(every("lanes", "b8 a", "flops_utilization", " bass "), default=None)
    own = get("lanes", "b8 regular", "flops_utilization")
    step = get("roofline", "decode-b8-kv512", "step")
    slower = max(every("attention", "b", "fused / best other"), default=None)
    checked = [row for row in rows if row["section"] == "checks" and row["what"] == "cases passed"]
    passed = sum(int(row["value"]) for row in checked)
    asked = sum(int(row["unit"].removeprefix("of ")) for row in checked)
    equal = every("graphs", "float32", "rows equal to eager steps") + every(
        "graphs", "float32", "rows equal to generate"
    )
    races = every("races", "float32 race", "rows equal to generate")
    return [
        ("kernels-equal", ratio(passed, asked), "1", lambda v: v == 1),
        ("texts-equal-float32", min(equal + races, default=None), "1", lambda v: v == 1),
        ("decode-b1", get("roofline", "decode-b1-kv512", "step / floor"), "at most 1.15", lambda v: v <= 1.15),
        ("decode-b8", get("roofline", "decode-b8-kv512", "step / floor"), "at most 1.25", lambda v: v <= 1.25),
        (
            "verify-b8",
            ratio(get("roofline", "verify5-b8-kv512", "step"), step),
            "at most 1.25",
            lambda v: v <= 1.25,
        ),
        ("bass-over-regular", ratio(regular, bass), "at least 2.5", lambda v: v >= 2.5),
        (
            "bass-over-generate",
            ratio(get("lanes", "b8", "generate, eager"), bass),
            "at least 4",
            lambda v: v >= 4,
        ),
        (
            "attention-bandwidth",
            get("attention", "b8 kv4096 x 1", "fused share of copy"),
            "at least 0.8",
            lambda v: v >= 0.8,
        ),
        ("attention-never-slower", slower, "at most 1.03", lambda v: v <= 1.03),
        ("flops", flops, "above 0.158", lambda v: v > 0.158),
        ("flops-over-regular", ratio(flops, own), "at least 3", lambda v: v >= 3),
    ]
