"""`python -m bench batch`: regular, speculative and batched speculative decoding (BASS) at growing batch sizes.

Prompts differ, decoding is greedy, and no text ends early. The arms take turns, and we report medians of the
repeats. Per-token latencies are the lanes' figures; `wall` is the time of whole calls. The crossover is the batch
size up to which BASS is faster than regular decoding, interpolated linearly in log2 of the batch size. Bandwidth
and FLOPs are shares of the peaks that bench/machine.py measures in the same run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go
import torch
from transformers import PreTrainedModel

from bass_core import ModelPair

from ..arms import LOOKUP, Sample, ours, theirs
from ..machine import Machine, measure
from ..prompts import mixed
from ..report.figures import COLOURS, draw, figure
from ..report.report import alike, document, load, median, parser, show, table, whole

REGULAR, SPECULATIVE, BASS, COST_AWARE, GENERATE = "regular", "speculative", "bass", "bass, cost-aware", "generate"

# BASS with a fixed length, which runs only if asked for.
FIXED = {f"bass, {drafts} drafts": drafts for drafts in (3, 5)}
ARMS = (REGULAR, SPECULATIVE, BASS, COST_AWARE, GENERATE, *FIXED)

Row = dict[str, Any]


def main(argv: list[str]) -> None:
    """Measure, print, draw, and write."""
    options = parser("batch", __doc__ or "", "pair", "draft", "device", "dtype", figures=True)
    options.add_argument("--batch", type=whole(), nargs="+", help="default: 1 2 4 8 16, on a GPU 32 as well")
    options.add_argument("--max-new-tokens", type=whole(), default=32)
    options.add_argument("--repeats", type=whole(), default=3)
    arguments = options.parse_args(argv)
    pair = load(arguments)
    batches = arguments.batch or [1, 2, 4, 8, 16] + ([32] if pair.device.type == "cuda" else [])
    if arguments.quick:
        batches, arguments.max_new_tokens, arguments.repeats = [1, 2], 12, 1
    machine = measure(pair.device, pair.dtype)
    results: list[Row] = []
    claims: list[Row] = []
    for batch in sorted(batches):
        samples = samples_of(pair, mixed(batch), arguments.max_new_tokens, arguments.repeats)
        results += rows_of(batch, samples, machine)
        print(table(results[-len(samples) :]), flush=True)
        texts = [sample.tokens for name in (REGULAR, SPECULATIVE, BASS, COST_AWARE) for sample in samples[name]]
        same = sum(all(text[row] == texts[0][row] for text in texts) for row in range(batch)) / batch
        # The share must be 1 in float32. In bfloat16 rounding may decide a near tie, so the claim stays open.
        claims.append(alike(f"rows alike in our decoders, batch {batch}", same, pair.dtype == torch.float32))
    report = document("batch", arguments, pair, results, claims)
    report["roofline"] = _roofline(pair, machine, results)
    report["crossover"] = {arm: crossover(results, arm) for arm in (SPECULATIVE, BASS, COST_AWARE)}
    print(_words(report))
    if arguments.report:
        report["files"] = draw("batch", arguments.report, {"speedup": speedup(report), "roofline": _roof(report)})
    show(report, arguments)


def _arms(
    pair: ModelPair, prompts: list[Any], tokens: int, names: Seq[str], options: dict[str, Any]
) -> dict[str, Callable[[], Sample]]:
    arms: dict[str, Callable[[], Sample]] = {
        REGULAR: lambda: ours(pair, "regular", prompts, tokens),
        SPECULATIVE: lambda: ours(pair, "speculative", prompts, tokens, **options),
        BASS: lambda: ours(pair, "bass", prompts, tokens, **options),
        COST_AWARE: lambda: ours(pair, "bass", prompts, tokens, draft_length="cost-aware", **options),
        GENERATE: lambda: theirs(pair, prompts, tokens),
    }
    if names:
        for name, drafts in FIXED.items():
            arms[name] = partial(ours, pair, "bass", prompts, tokens, draft_length=drafts, **options)
        return {name: arms[name] for name in dict.fromkeys((REGULAR, *names))}
    if len(prompts) == 1 and not options:
        arms["prompt lookup"] = lambda: theirs(pair, prompts, tokens, prompt_lookup_num_tokens=LOOKUP)
        if pair.draft is not None:
            arms["amusd"] = lambda: ours(pair, "amusd", prompts, tokens)
        if isinstance(pair.draft, PreTrainedModel):  # transformers can't run a draft head
            arms["assisted"] = lambda: theirs(pair, prompts, tokens, assistant_model=pair.draft)
    return arms


def samples_of(
    pair: ModelPair, prompts: list[Any], tokens: int, repeats: int, names: Seq[str] = (), **options: Any
) -> dict[str, list[Sample]]:
    """Run `repeats` calls of each arm in turns, after a short unmeasured call.

    Args:
        prompts: texts or token ids.
        tokens: new tokens per row.
        repeats: measured calls per arm.
        names: the arms of ARMS that run besides regular decoding; empty for all but FIXED.
        **options: more arguments of our drafting arms; transformers' assisted generation is then left out.
    """
    for arm in _arms(pair, prompts, min(tokens, 8), names, options).values():
        arm()
    arms = _arms(pair, prompts, tokens, names, options)
    samples: dict[str, list[Sample]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, arm in arms.items():
            samples[name].append(arm())
    return samples


def rows_of(batch: int, samples: dict[str, list[Sample]], machine: Machine) -> list[Row]:
    """Return a row of the result table for each arm, with its shares of the machine's peaks."""

    def ms(name: str) -> float | None:
        times = [sample.metrics.ms_per_token for sample in samples[name]]
        return median([t for t in times if t is not None]) if None not in times else None

    def wall(name: str) -> float:
        return median([sample.wall_ms for sample in samples[name]])

    base = ms(REGULAR)
    rows = []
    for name, calls in samples.items():
        mine, last = ms(name), calls[-1].metrics
        # By the lane's clock where there is one: a call's wall time includes the prompt and captures.
        times = [call.metrics.ms_per_token or call.wall_ms for call in calls]
        tokens = sum(len(text) for text in calls[-1].tokens)
        rows.append({
            "batch": batch,
            "arm": name,
            "ms/token": mine,
            "speed-up": base / mine if base and mine else None,
            **{f"PTL {which}": _median(calls, f"ptl_{which.lower()}_ms") for which in ("First", "Last", "All")},
            "tokens/s": 1000 * tokens / wall(name),
            "wall vs regular": wall(REGULAR) / wall(name),
            "spread": (max(times) - min(times)) / median(times),
            "acceptance": last.acceptance_rate,
            "accepted length": last.mean_acceptance_length,
            "draft length": _per_round(last, batch, drafted=True) if last.drafted else None,
            "ms/round": _round_ms(calls),
            "tokens/round": _per_round(last, batch) if calls[-1].flops is not None else None,
            "bandwidth": _share(calls, "bytes_read", machine.bandwidth),
            "FLOPs": _share(calls, "flops", machine.flops),
        })  # fmt: skip
    return rows


def _median(samples: list[Sample], name: str) -> float | None:
    values = [getattr(sample.metrics, name) for sample in samples]
    return None if None in values else median(values)


def _round_ms(samples: list[Sample]) -> float | None:
    return median([each.decode_ms / each.metrics.rounds for each in samples]) if samples[-1].decode_ms else None


def _per_round(metrics: Any, batch: int, drafted: bool = False) -> float:
    """Return the mean number of tokens that a round verifies, or with `drafted`, of drafts of one row."""
    row_rounds = metrics.new_tokens - batch - metrics.accepted
    return float(metrics.drafted / row_rounds if drafted else (row_rounds + metrics.drafted) / metrics.rounds)


def _share(samples: list[Sample], name: str, peak: float) -> float | None:
    """Return the samples' "bytes_read" or "flops" per second of lane time as a share of `peak`, if known."""
    values = [(getattr(sample, name), sample.decode_ms) for sample in samples]
    if any(done is None or not ms for done, ms in values):
        return None
    return median([done / (ms / 1000) / peak for done, ms in values])


def crossover(rows: list[Row], arm: str) -> float | None:
    """Return the batch size at which the arm's speed-up falls to 1, interpolated in log2.

    Returns None if the arm is always faster than regular decoding, and 0 if it never is.
    """
    points = [(math.log2(row["batch"]), row["speed-up"]) for row in rows if row["arm"] == arm]
    for (x0, y0), (x1, y1) in pairwise(points):
        if y0 >= 1 > y1:
            return float(2 ** (x0 + (x1 - x0) * (y0 - 1) / (y0 - y1)))
    return None if not points or points[0][1] >= 1 else 0.0


def _roofline(pair: ModelPair, machine: Machine, rows: list[Row]) -> dict[str, Any]:
    """Return the roofline plot's data: measured rounds, and the times to read their bytes and to compute."""
    cost, context = pair.target_step.cost, 100
    rounds = [
        {"arm": row["arm"], "batch": row["batch"], "tokens": row["tokens/round"],
         "ms": row["ms/round"]}
        for row in rows if row["arm"] in (REGULAR, BASS)
    ]  # fmt: skip
    most = max(round_["tokens"] for round_ in rounds)
    grid = [most ** (i / 24) for i in range(25)] if most > 1 else [1.0]
    return {
        "bandwidth_gb_s": machine.bandwidth / 1e9,
        "gflop_s": machine.flops / 1e9,
        "ridge_tokens": machine.ridge(cost, 1, context),
        "rounds": rounds,
        "bytes_ms": [[tokens, machine.bytes_ms(cost, 1, context)] for tokens in grid],
        "flops_ms": [[tokens, machine.flops_ms(cost, tokens, context)] for tokens in grid],
    }


def _words(report: dict[str, Any]) -> str:
    """Return the crossover and its reason in a few sentences."""
    roof, cross = report["roofline"], report["crossover"][BASS]
    speed = (
        "BASS was faster than regular decoding at every measured batch."
        if cross is None
        else "BASS was slower than regular decoding at every measured batch."
        if not cross
        else f"BASS was faster than regular decoding up to a batch of {cross:.1f}."
    )
    return (
        f"{speed} This machine reads {roof['bandwidth_gb_s']:.1f} GB/s and does {roof['gflop_s']:.0f} GFLOP/s. "
        f"Up to {roof['ridge_tokens']:.0f} tokens per step, reading the weights takes longer than multiplying, so "
        f"drafts cost little; beyond that, every draft costs its full time."
    )


def speedup(report: dict[str, Any]) -> go.Figure:
    """Draw each arm's speed-up over regular decoding at growing batches, and the crossover of BASS."""
    chart = figure(
        "Speed-up over regular decoding", "batch", "regular's ms per token / the arm's", xaxis_type="log"
    )
    rows = [row for row in report["results"] if row["arm"] != GENERATE and row["speed-up"] is not None]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        x, y = zip(*((row["batch"], row["speed-up"]) for row in rows if row["arm"] == arm), strict=True)
        chart.add_scatter(x=x, y=y, name=arm, mode="lines+markers", line_color=COLOURS[arm])
    batches = sorted({row["batch"] for row in rows})
    chart.update_xaxes(tickvals=batches, ticktext=[str(batch) for batch in batches])
    if report["crossover"][BASS]:
        chart.add_vline(report["crossover"][BASS], line_dash="dot")
        # On a logarithmic axis Plotly expects log10(x) for an annotation, but x for a line.
        at = math.log10(report["crossover"][BASS])
        chart.add_annotation(x=at, y=1, yref="paper", text="crossover of BASS", showarrow=False, xanchor="left")
    return chart


def _roof(report: dict[str, Any]) -> go.Figure:
    log = {"xaxis_type": "log", "yaxis_type": "log"}
    chart = figure("Rounds against the roofline", "tokens of all rows in a round", "ms a round", **log)
    for arm in (REGULAR, BASS):
        points = [round_ for round_ in report["roofline"]["rounds"] if round_["arm"] == arm]
        chart.add_scatter(
            x=[point["tokens"] for point in points], y=[point["ms"] for point in points],
            text=[f"batch {point['batch']}" for point in points],
            textposition="top center" if arm == BASS else "bottom center",
            mode="markers+text+lines", name=f"{arm}, measured", line_color=COLOURS[arm],
        )  # fmt: skip
    for key, name, dash in (("bytes_ms", "weights' bytes alone", "dash"), ("flops_ms", "products alone", "dot")):
        x, y = zip(*report["roofline"][key], strict=True)
        chart.add_scatter(x=x, y=y, name=name, mode="lines", line={"color": "#888", "dash": dash})
    return chart
