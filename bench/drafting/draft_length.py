"""`python -m bench draft-length`: Algorithm 1, fixed lengths and the cost-aware policy beside regular decoding.

Contract: different prompts, the same number of new tokens for every arm (no early end), arms interleaved, medians
of the lanes' own ms per token. The cost-aware policy's table is measured beforehand, once per pair and machine.
`spread` is (highest - lowest) / median of an arm's repeats: a smaller difference is noise.
"""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
from plotly.colors import qualitative

from bass_core import Generation, ModelPair, SamplingParams, generate, load_pair

from ..prompts import mixed
from ..report.figures import Report, figure
from ..report.report import claim, document, median, parser, show, table, with_report

FIXED = tuple(range(1, 11))
ALGORITHM_1, COST_AWARE, REGULAR = "Algorithm 1", "cost-aware", "regular"
# Claimed: the cost-aware policy is at most this share slower than the best fixed length, and than regular decoding
# (or the repeats' spread, where that is larger).
OVER_FIXED, OVER_REGULAR = 0.03, 0.05


def main(argv: list[str]) -> None:
    """Measure, print, and write."""
    options = with_report(parser("draft-length", __doc__ or ""))
    options.add_argument("--pair", default="smollm2")
    options.add_argument("--device", default="auto")
    options.add_argument("--dtype", default="auto")
    options.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8])
    options.add_argument("--max-new-tokens", type=int, default=48)
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument("--repeats", type=int, default=3)
    arguments = options.parse_args(argv)
    fixed: tuple[int, ...] = FIXED
    if arguments.quick:
        arguments.batch, arguments.max_new_tokens, arguments.repeats, fixed = [1, 2], 12, 1, (2,)
    pair = load_pair(arguments.pair, device=arguments.device, dtype=arguments.dtype)
    results: list[dict[str, Any]] = []
    claims: list[dict[str, Any]] = []
    for batch in arguments.batch:
        runs = _runs(pair, batch, fixed, arguments)
        rows = [_row(batch, name, made) for name, made in runs.items()]
        results += rows
        claims += _claims(batch, {row["arm"]: row for row in rows}, fixed, arguments.quick)
        if not arguments.temperature:
            texts = {tuple(tuple(s.token_ids) for s in run.sequences) for made in runs.values() for run in made}
            claims.append(claim(f"different texts, batch {batch}", len(texts), "1", len(texts) == 1))
    made = document("draft-length", arguments, pair.device, results, claims)
    print(table(results))
    if arguments.report:
        about = (__doc__ or "").split("\n\n", 1)[1]
        files = Report(made, about, {"policies": _drawn(results)}).write(arguments.report)
        made["files"] = [path.name for path in files]
    show(made, arguments)


def _runs(pair: ModelPair, batch: int, fixed: tuple[int, ...], arguments: Any) -> dict[str, list[Generation]]:
    """All runs of each arm, interleaved, after short unmeasured runs."""
    same: dict[str, Any] = {
        "max_new_tokens": arguments.max_new_tokens,
        "sampling": SamplingParams(temperature=arguments.temperature),
        "seed": arguments.seed,
        "eos_token_id": None,
    }
    lengths: dict[str, Any] = {ALGORITHM_1: "bass", COST_AWARE: "cost-aware", **{f"fixed {n}": n for n in fixed}}
    runs: dict[str, list[Generation]] = {name: [] for name in (REGULAR, *lengths)}
    for repeat in range(arguments.repeats + 1):
        for name, made in runs.items():
            method = {"method": "regular"} if name == REGULAR else {"draft_length": lengths[name]}
            some = same if repeat else same | {"max_new_tokens": min(8, arguments.max_new_tokens)}
            run = generate(pair, mixed(batch), **method, **some)
            if repeat:
                made.append(run)
    return runs


def _row(batch: int, name: str, runs: list[Generation]) -> dict[str, Any]:
    times = [run.metrics.ms_per_token or 0.0 for run in runs]
    last = runs[-1].metrics
    return {
        "batch": batch,
        "arm": name,
        "ms/token": median(times),
        "spread": (max(times) - min(times)) / median(times),
        "rounds": last.rounds,
        "acceptance": last.acceptance_rate,
        "tokens/round": last.mean_acceptance_length,
    }


def _drawn(rows: list[dict[str, Any]]) -> go.Figure:
    """ms per token of every arm, a line per batch size; the dashed line of the same colour is regular decoding."""
    drawn = figure("Draft length and latency", "draft length or policy", "ms per token", yaxis_rangemode="tozero")
    for batch, colour in zip(dict.fromkeys(row["batch"] for row in rows), qualitative.Safe, strict=False):
        mine = {row["arm"]: row["ms/token"] for row in rows if row["batch"] == batch}
        regular = mine.pop(REGULAR)
        ordered = [*(arm for arm in mine if arm.startswith("fixed")), ALGORITHM_1, COST_AWARE]
        y = [mine[arm] for arm in ordered]
        drawn.add_scatter(x=ordered, y=y, name=f"batch {batch}", mode="lines+markers", line_color=colour)
        line = {"color": colour, "dash": "dash"}
        x, y = [ordered[0], ordered[-1]], [regular, regular]
        drawn.add_scatter(x=x, y=y, name=f"batch {batch}, regular", mode="lines", line=line)
    return drawn


def _claims(
    batch: int, rows: dict[str, dict[str, Any]], fixed: tuple[int, ...], quick: bool
) -> list[dict[str, Any]]:
    best = min((rows[f"fixed {n}"] for n in fixed), key=lambda row: float(row["ms/token"]))
    found = []
    for other, allowed in ((best, OVER_FIXED), (rows[REGULAR], OVER_REGULAR)):
        spread = max(float(rows[COST_AWARE]["spread"]), float(other["spread"]))
        ratio = rows[COST_AWARE]["ms/token"] / other["ms/token"]
        bar = 1 + max(allowed, spread)
        name = f"{COST_AWARE} / {other['arm']}, batch {batch}"
        found.append(claim(name, ratio, f"at most {bar:.2f}", None if quick else ratio <= bar))
    return found
